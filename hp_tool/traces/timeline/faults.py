"""What makes recorded steps longer than they had to be, without any prediction: ranks and groups
held against their like.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Literal

import numpy as np

from hp_tool.domain.parts import COMMUNICATION
from hp_tool.traces.timeline.events import KINDS, FloatArray, RankEvents
from hp_tool.traces.timeline.ranks import Timeline
from hp_tool.traces.timeline.split import BUSY

FaultKind = Literal["slow_rank", "unequal_work", "host_gap", "exposed_communication", "slow_link"]
LEAST_SHARE = 0.1
"""Share of a step below which a fault is not worth a word."""
LONG_GAP = 0.03
"""Share of a step from which a stretch without a kernel is a gap of its own, and no pause between
launches.
"""
HIDDEN_LITTLE = 0.1
"""Share of communication beneath computing below which nothing hides it."""
UNEQUAL = 1.1
"""Work of a rank over the mean of all from which it is unequal."""
_COMPUTE = [
    KINDS.index(kind) for kind in ("matmul", "attention", "experts", "elementwise", "unknown")
]


@dataclass(frozen=True, slots=True, kw_only=True)
class Fault:
    """One reason for lost seconds."""

    kind: FaultKind
    seconds: float
    """Of the median step, that would be won without it."""
    rank: int | None = None
    """Who is at fault; None: all alike."""
    part: str | None = None
    """Of COMMUNICATION."""
    ranks: tuple[int, ...] = ()
    """Members of the group at fault."""
    factor: float | None = None
    """How many times as long, or as much, as with the others."""


def faults(line: Timeline) -> tuple[Fault, ...]:
    """Return what cost at least LEAST_SHARE of the median step, the most seconds first."""
    if not line.splits or not line.splits[0]:
        return ()
    step_s = float(np.median([step.step_s for step in line.splits[line.critical]]))
    kinds: tuple[Callable[[Timeline, float], Iterator[Fault]], ...] = (
        _work,
        _host_gaps,
        _exposed,
        _slow_links,
    )
    each = [fault for kind in kinds for fault in kind(line, step_s)]
    return tuple(
        sorted(
            (one for one in each if one.seconds >= LEAST_SHARE * step_s),
            key=lambda one: -one.seconds,
        )
    )


def _work(line: Timeline, step_s: float) -> Iterator[Fault]:
    """Ranks that take longer for kernels like others', and ranks that have more of them.

    For n_rk kernels of kind k on rank r in the median step and their median duration d_rk: the pace
    costs sum_k n_rk (d_rk - median over the others' d_k), the amount sum_k (n_rk - mean n_k) mean
    d_k. Medians do not follow a kernel that was held up once.
    """
    if len(line.ranks) < 2:
        return
    amounts = [
        _kernels(events, spans) for events, spans in zip(line.ranks, line.windows_s, strict=True)
    ]
    counts = np.array([np.median(count, axis=0) for count, _ in amounts])
    lengths = np.array([length for _, length in amounts])
    mean_s = lengths.mean(axis=0)
    work = counts @ mean_s
    for row, events in enumerate(line.ranks):
        alike = [
            each
            for each in range(len(line.ranks))
            if each != row and _alike(counts[row], counts[each])
        ]
        if not alike:
            continue
        usual = np.median(lengths[alike], axis=0)
        slower = float(counts[row] @ (lengths[row] - usual))
        if slower > 0 and (base := float(counts[row] @ usual)) > 0:
            yield Fault(
                kind="slow_rank", seconds=slower, rank=events.rank, factor=1.0 + slower / base
            )
    row = int(np.argmax(work))
    if work.mean() > 0 and work[row] > UNEQUAL * work.mean():
        more = float(work[row] - work.mean())
        yield Fault(
            kind="unequal_work",
            seconds=more,
            rank=line.ranks[row].rank,
            factor=float(work[row] / work.mean()),
        )


def _alike(counts: FloatArray, others: FloatArray) -> bool:
    """Whether two ranks run about as many kernels of each kind."""
    return bool(np.all(np.abs(counts - others) <= (UNEQUAL - 1.0) * np.maximum(counts, others)))


def _kernels(events: RankEvents, spans: FloatArray) -> tuple[FloatArray, FloatArray]:
    """((steps, kinds) computing kernels of each step by kind, (kinds,) their median length)."""
    step = np.searchsorted(spans[:, 0], events.start_s, side="right") - 1
    inside = (step >= 0) & (events.start_s < spans[np.maximum(step, 0), 1])
    counts, lengths = np.zeros((len(spans), len(_COMPUTE))), np.zeros(len(_COMPUTE))
    for column, kind in enumerate(_COMPUTE):
        rows = np.flatnonzero(inside & (events.kind == kind))
        counts[:, column] = np.bincount(step[rows], minlength=len(spans))
        if len(rows):
            lengths[column] = np.median(events.end_s[rows] - events.start_s[rows])
    return counts, lengths


def _host_gaps(line: Timeline, step_s: float) -> Iterator[Fault]:
    """The rank with the most seconds of long stretches in which nothing runs."""
    long_s = [
        float(np.median([step.gaps_s[step.gaps_s >= LONG_GAP * step_s].sum() for step in steps]))
        for steps in line.splits
    ]
    row = int(np.argmax(long_s))
    alike = len(line.ranks) > 1 and min(long_s) > 0.5 * long_s[row]
    yield Fault(kind="host_gap", seconds=long_s[row], rank=None if alike else line.ranks[row].rank)


def _exposed(line: Timeline, step_s: float) -> Iterator[Fault]:
    """Communication of data parallelism, which backward passes could hide, and of which nothing is
    hidden.
    """
    steps = line.splits[line.critical]
    part = "data_parallel"
    exposed = exposed_s(line)[part]
    hidden = float(np.median([step.hidden_s[part] for step in steps]))
    computes = float(np.median([sum(step.parts_s[each] for each in BUSY) for step in steps]))
    if exposed > 0 and hidden < HIDDEN_LITTLE * (exposed + hidden):
        yield Fault(kind="exposed_communication", seconds=min(exposed, computes), part=part)


def exposed_s(line: Timeline) -> dict[str, float]:
    """Return the seconds of the median step on the critical rank in which nothing computes and it
    communicates, by COMMUNICATION.

    Waits for recorded ranks are left out: they are another rank's fault, or the pipeline's bubble.
    """
    steps = line.splits[line.critical]
    return {
        part: float(
            np.median(
                [
                    step.parts_s[part] - (part != "pipeline_p2p") * step.waits_s[part]
                    for step in steps
                ]
            )
        )
        for part in COMMUNICATION
    }


def _slow_links(line: Timeline, step_s: float) -> Iterator[Fault]:
    """Groups whose messages take longer than equal ones of other groups of their part, once the
    last rank has come.
    """
    seconds: dict[tuple[str, int, float], dict[tuple[int, ...], list[float]]] = defaultdict(
        lambda: defaultdict(list)
    )
    for events, until in zip(line.ranks, line.waits_until_s, strict=True):
        columns = events.collectives
        start = np.maximum(events.start_s[columns.event], until[columns.event])
        lengths = events.end_s[columns.event] - start
        for row in range(len(columns.event)):
            group = events.groups[columns.group[row]]
            size = columns.size_bytes[row]
            if len(group.ranks) > 1 and size == size:
                seconds[group.part, int(columns.operation[row]), float(size)][group.ranks].append(
                    float(lengths[row])
                )
    lost: dict[tuple[str, tuple[int, ...]], list[tuple[float, float]]] = defaultdict(list)
    steps = len(line.splits[0])
    for (part, _, _), groups in seconds.items():
        usual = {ranks: float(np.median(own)) for ranks, own in groups.items()}
        for ranks, own in groups.items():
            others = [usual[each] for each in groups if each != ranks]
            if others:
                members = sum(events.rank in ranks for events in line.ranks)
                count = len(own) / steps / members
                lost[part, ranks].append((count * usual[ranks], count * float(np.median(others))))
    for (part, ranks), pairs in lost.items():
        own_s, usual_s = (sum(column) for column in zip(*pairs, strict=True))
        if own_s > usual_s > 0:
            exposed = _exposed_share(line, part, ranks)
            factor = own_s / usual_s
            yield Fault(
                kind="slow_link",
                seconds=float(exposed * (own_s - usual_s)),
                part=part,
                ranks=ranks,
                factor=factor,
            )


def _exposed_share(line: Timeline, part: str, ranks: tuple[int, ...]) -> float:
    """Share of a part's communication that these ranks do not hide."""
    steps = [
        step
        for events, own in zip(line.ranks, line.splits, strict=True)
        if events.rank in ranks
        for step in own
    ]
    shown = sum(step.parts_s[part] for step in steps)
    return shown / max(shown + sum(step.hidden_s[part] for step in steps), 1e-12)
