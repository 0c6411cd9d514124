"""Find what lengthens recorded steps by comparing ranks and groups. No prediction is needed."""

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
MIN_FAULT_SHARE = 0.1
"""Faults below this fraction of a step are not reported."""
LONG_GAP_SHARE = 0.03
"""Minimum idle time that counts as a gap instead of a launch delay, as a fraction of a step."""
MIN_HIDDEN_SHARE = 0.1
"""Communication counts as not overlapped if a smaller fraction of it is hidden."""
UNEQUAL_WORK_RATIO = 1.1
"""Minimum ratio of a rank's work to the mean at which work counts as unequal."""
_COMPUTE = [
    KINDS.index(kind) for kind in ("matmul", "attention", "experts", "elementwise", "unknown")
]


@dataclass(frozen=True, slots=True, kw_only=True)
class Fault:
    """One cause of lost time."""

    kind: FaultKind
    seconds: float
    """Seconds that the fault adds to the median step."""
    rank: int | None = None
    """Rank that causes the fault; None if all ranks are alike."""
    part: str | None = None
    """Affected entry of COMMUNICATION."""
    ranks: tuple[int, ...] = ()
    """Ranks of the affected group."""
    factor: float | None = None
    """Duration or amount of work relative to the others."""


def faults(line: Timeline) -> tuple[Fault, ...]:
    """Return the faults that cost at least MIN_FAULT_SHARE of the median step, largest first."""
    if not line.splits or not line.splits[0]:
        return ()
    step_s = float(np.median([step.step_s for step in line.splits[line.critical]]))
    kinds: tuple[Callable[[Timeline, float], Iterator[Fault]], ...] = (
        _slow_or_overloaded_ranks,
        _host_gaps,
        _exposed_data_parallel,
        _slow_links,
    )
    found = [fault for kind in kinds for fault in kind(line, step_s)]
    return tuple(
        sorted(
            (fault for fault in found if fault.seconds >= MIN_FAULT_SHARE * step_s),
            key=lambda fault: -fault.seconds,
        )
    )


def _slow_or_overloaded_ranks(line: Timeline, step_s: float) -> Iterator[Fault]:
    """Yield ranks with slower kernels than the others, and ranks that run more kernels.

    Rank r runs n_rk kernels of kind k in the median step, with the median duration d_rk. Slower
    kernels cost sum_k n_rk (d_rk - median over the others' d_k). Additional work costs sum_k (n_rk
    - mean n_k) mean d_k. Medians ignore kernels that were delayed only once.
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
        similar = [
            other
            for other in range(len(line.ranks))
            if other != row and _have_similar_kernels(counts[row], counts[other])
        ]
        if not similar:
            continue
        usual = np.median(lengths[similar], axis=0)
        slower = float(counts[row] @ (lengths[row] - usual))
        if slower > 0 and (base := float(counts[row] @ usual)) > 0:
            yield Fault(
                kind="slow_rank", seconds=slower, rank=events.rank, factor=1.0 + slower / base
            )
    row = int(np.argmax(work))
    if work.mean() > 0 and work[row] > UNEQUAL_WORK_RATIO * work.mean():
        more = float(work[row] - work.mean())
        yield Fault(
            kind="unequal_work",
            seconds=more,
            rank=line.ranks[row].rank,
            factor=float(work[row] / work.mean()),
        )


def _have_similar_kernels(counts: FloatArray, others: FloatArray) -> bool:
    """Return True if two ranks run about as many kernels of each kind."""
    return bool(
        np.all(np.abs(counts - others) <= (UNEQUAL_WORK_RATIO - 1.0) * np.maximum(counts, others))
    )


def _kernels(events: RankEvents, spans: FloatArray) -> tuple[FloatArray, FloatArray]:
    """Return the counts of compute kernels and their median durations.

    Their shapes are (steps, kinds) and (kinds,).
    """
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
    """Yield the rank with the longest total time in long idle gaps."""
    long_s = [
        float(
            np.median([step.gaps_s[step.gaps_s >= LONG_GAP_SHARE * step_s].sum() for step in steps])
        )
        for steps in line.splits
    ]
    row = int(np.argmax(long_s))
    all_idle = len(line.ranks) > 1 and min(long_s) > 0.5 * long_s[row]
    rank = None if all_idle else line.ranks[row].rank
    yield Fault(kind="host_gap", seconds=long_s[row], rank=rank)


def _exposed_data_parallel(line: Timeline, step_s: float) -> Iterator[Fault]:
    """Yield data-parallel communication if backward passes hide almost none of it."""
    steps = line.splits[line.critical]
    part = "data_parallel"
    exposed = exposed_s(line)[part]
    hidden = float(np.median([step.hidden_s[part] for step in steps]))
    computes = float(np.median([sum(step.parts_s[name] for name in BUSY) for step in steps]))
    if exposed > 0 and hidden < MIN_HIDDEN_SHARE * (exposed + hidden):
        yield Fault(kind="exposed_communication", seconds=min(exposed, computes), part=part)


def exposed_s(line: Timeline) -> dict[str, float]:
    """Return exposed communication in the critical rank's median step, in seconds by part.

    Waits for recorded ranks are excluded: they are another rank's fault or the pipeline bubble.
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
    """Yield groups whose messages are slower than equal messages in other groups of the same part.

    Message times start when the last rank arrives.
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
        usual = {ranks: float(np.median(times)) for ranks, times in groups.items()}
        for ranks, times in groups.items():
            others = [usual[other] for other in groups if other != ranks]
            if others:
                members = sum(events.rank in ranks for events in line.ranks)
                count = len(times) / steps / members
                lost[part, ranks].append((count * usual[ranks], count * float(np.median(others))))
    for (part, ranks), pairs in lost.items():
        group_s, usual_s = (sum(column) for column in zip(*pairs, strict=True))
        if group_s > usual_s > 0:
            exposed = _exposed_share(line, part, ranks)
            factor = group_s / usual_s
            yield Fault(
                kind="slow_link",
                seconds=float(exposed * (group_s - usual_s)),
                part=part,
                ranks=ranks,
                factor=factor,
            )


def _exposed_share(line: Timeline, part: str, ranks: tuple[int, ...]) -> float:
    steps = [
        step
        for events, rank_steps in zip(line.ranks, line.splits, strict=True)
        if events.rank in ranks
        for step in rank_steps
    ]
    exposed = sum(step.parts_s[part] for step in steps)
    return exposed / max(exposed + sum(step.hidden_s[part] for step in steps), 1e-12)
