"""Achieved matmul rates and link bandwidths of a step. They need recorded shapes and sizes."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass

import numpy as np

from hp_tool.traces.timeline.events import COLLECTIVES, KINDS
from hp_tool.traces.timeline.ranks import Timeline

BUS_FACTORS = {"all_reduce": 2.0, "all_gather": 1.0, "reduce_scatter": 1.0, "all_to_all": 1.0}
"""Bytes on the wire as a multiple of (n - 1)/n of the message size, as in NCCL's bus bandwidth.
Point-to-point messages have the factor 1.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class LinkUse:
    """Collectives of one kind in one group, over all recorded steps."""

    part: str
    operation: str
    """One of COLLECTIVES."""
    ranks: tuple[int, ...]
    """Ranks of the group; empty if not recorded."""
    messages: float
    """Number of messages per step."""
    size_bytes: float | None
    """Mean message size in bytes; None if not recorded."""
    seconds: float
    """Seconds per step, excluding waits for other ranks."""
    bytes_per_second: float | None
    """Bus bandwidth as defined by NCCL; None if sizes or the group were not recorded."""


def matmul_flops_per_second(line: Timeline, *, row: int) -> float | None:
    """Return the FLOP/s of one rank while matmul kernels run; None without recorded shapes."""
    events, spans = line.ranks[row], line.windows_s[row]
    low, high = float(spans[0, 0]), float(spans[-1, 1])
    called = (events.flops[:, 0] >= low) & (events.flops[:, 0] < high)
    kinds = [KINDS.index("matmul"), KINDS.index("experts")]
    rows = np.isin(events.kind, kinds) & (events.start_s >= low) & (events.end_s <= high)
    seconds = float((events.end_s[rows] - events.start_s[rows]).sum())
    flops = float(events.flops[called, 1].sum())
    return flops / seconds if flops and seconds else None


def link_use(line: Timeline, *, row: int) -> tuple[LinkUse, ...]:
    """Return the links used by each kind of collective on one rank, longest time first."""
    events, spans, until = line.ranks[row], line.windows_s[row], line.waits_until_s[row]
    columns = events.collectives
    start = np.maximum(events.start_s[columns.event], until[columns.event])
    lengths = events.end_s[columns.event] - start
    inside = (start >= spans[0, 0]) & (start < spans[-1, 1])
    sums: dict[tuple[str, int, tuple[int, ...], int], list[tuple[float, float]]] = defaultdict(list)
    for place in np.flatnonzero(inside).tolist():
        group = events.groups[columns.group[place]]
        key = (group.part, int(columns.operation[place]), group.ranks, group.members)
        sums[key].append((float(lengths[place]), float(columns.size_bytes[place])))
    uses = []
    for (part, operation, ranks, count), messages in sums.items():
        seconds, size = np.array(messages).sum(axis=0).tolist()
        seconds = max(seconds, 0.0)  # Clocks of ranks differ by microseconds.
        name = COLLECTIVES[operation]
        members = max(count, 2)
        factor = BUS_FACTORS.get(name, 1.0) * (
            (members - 1) / members if name in BUS_FACTORS else 1.0
        )
        has_bandwidth = size == size and seconds > 0 and (bool(count) or name == "send_receive")
        uses.append(
            LinkUse(
                part=part,
                operation=name,
                ranks=ranks,
                messages=len(messages) / len(spans),
                size_bytes=size / len(messages) if size == size else None,
                seconds=seconds / len(spans),
                bytes_per_second=factor * size / seconds if has_bandwidth else None,
            )
        )
    return tuple(sorted(uses, key=lambda use: -use.seconds))
