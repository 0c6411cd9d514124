"""How well a step uses its tensor cores and links, as far as shapes and bytes were recorded."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass

import numpy as np

from hp_tool.traces.timeline.events import COLLECTIVES, KINDS
from hp_tool.traces.timeline.ranks import Timeline

BUS = {"all_reduce": 2.0, "all_gather": 1.0, "reduce_scatter": 1.0, "all_to_all": 1.0}
"""Bytes on the wire over (n - 1)/n of a message, as NCCL's bus bandwidth counts them; a message
between two is sent once.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class LinkUse:
    """Collectives of one kind in one group, of all recorded steps."""

    part: str
    operation: str
    """Of COLLECTIVES."""
    ranks: tuple[int, ...]
    """The group; empty where it was not recorded."""
    messages: float
    """In a step."""
    size_bytes: float | None
    """Of a message, mean; None where it was not recorded."""
    seconds: float
    """In a step, waits for other ranks left out."""
    bytes_per_second: float | None
    """NCCL's bus bandwidth; None where bytes or group were not recorded."""


def matmul_flops_per_second(line: Timeline, *, row: int) -> float | None:
    """Floating-point operations of the matmuls of recorded shape over the seconds in which matmul
    kernels run, on one rank.

    None where no shapes were recorded.
    """
    events, spans = line.ranks[row], line.windows_s[row]
    low, high = float(spans[0, 0]), float(spans[-1, 1])
    called = (events.flops[:, 0] >= low) & (events.flops[:, 0] < high)
    kinds = [KINDS.index("matmul"), KINDS.index("experts")]
    rows = np.isin(events.kind, kinds) & (events.start_s >= low) & (events.end_s <= high)
    seconds = float((events.end_s[rows] - events.start_s[rows]).sum())
    flops = float(events.flops[called, 1].sum())
    return flops / seconds if flops and seconds else None


def link_use(line: Timeline, *, row: int) -> tuple[LinkUse, ...]:
    """Every kind of collective on one rank, the most seconds first."""
    events, spans, until = line.ranks[row], line.windows_s[row], line.waits_until_s[row]
    columns = events.collectives
    start = np.maximum(events.start_s[columns.event], until[columns.event])
    lengths = events.end_s[columns.event] - start
    inside = (start >= spans[0, 0]) & (start < spans[-1, 1])
    sums: dict[tuple[str, int, tuple[int, ...], int], list[tuple[float, float]]] = defaultdict(list)
    for each in np.flatnonzero(inside).tolist():
        group = events.groups[columns.group[each]]
        key = (group.part, int(columns.operation[each]), group.ranks, group.members)
        sums[key].append((float(lengths[each]), float(columns.size_bytes[each])))
    uses = []
    for (part, operation, ranks, count), messages in sums.items():
        seconds, size = np.array(messages).sum(axis=0).tolist()
        seconds = max(seconds, 0.0)  # clocks of ranks agree to microseconds
        name = COLLECTIVES[operation]
        members = max(count, 2)
        factor = BUS.get(name, 1.0) * ((members - 1) / members if name in BUS else 1.0)
        known = size == size and seconds > 0 and (bool(count) or name == "send_receive")
        uses.append(
            LinkUse(
                part=part,
                operation=name,
                ranks=ranks,
                messages=len(messages) / len(spans),
                size_bytes=size / len(messages) if size == size else None,
                seconds=seconds / len(spans),
                bytes_per_second=factor * size / seconds if known else None,
            )
        )
    return tuple(sorted(uses, key=lambda use: -use.seconds))
