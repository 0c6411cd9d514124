"""Split a time window of one rank into disjoint parts, by a priority order of owners."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from hp_tool.domain.parts import COMMUNICATION, STEP_KEYS
from hp_tool.traces.timeline.events import (
    KINDS,
    PHASES,
    BoolArray,
    FloatArray,
    IntArray,
    Phases,
    RankEvents,
)

UNKNOWN = "unknown"
"""Part for kernels that match no rule. Only measured steps have it."""
MEASURED_PARTS = (*STEP_KEYS, UNKNOWN)
BUSY = ("attention", "recompute", "optimizer", "compute", UNKNOWN)
"""Parts that compute (unknown kernels probably do). They hide communication."""
OWNERS = (*BUSY, *COMMUNICATION, "offload", *(f"wait {part}" for part in COMMUNICATION))
"""Owners in order of priority. `wait PART` is a collective's wait for a rank of its group."""
_BUSY_OF_KIND = {
    "attention": "attention",
    "optimizer": "optimizer",
    "copy_host": "offload",
    "unknown": UNKNOWN,
}
_KIND_OWNERS = np.array([OWNERS.index(_BUSY_OF_KIND.get(kind, "compute")) for kind in KINDS])
IDLE = len(OWNERS)


@dataclass(frozen=True, slots=True, kw_only=True)
class StepSplit:
    """Times of one step on one rank, in seconds."""

    parts_s: dict[str, float]
    """Seconds by part in MEASURED_PARTS; their sum is the step time. Communication counts where
    compute does not hide it, including waits for other ranks. `pipeline_bubble` is waits for
    another stage, and `overhead` is idle time.
    """
    hidden_s: dict[str, float]
    """Communication that overlaps with compute, in seconds by COMMUNICATION."""
    waits_s: dict[str, float]
    """Time in `parts_s` during which a collective waits for another rank, in seconds by
    COMMUNICATION. The waits in pipeline_p2p are the pipeline bubble.
    """
    host_s: float
    """Part of `overhead` until the host launched the next kernel, in seconds."""
    gaps_s: FloatArray
    """Lengths of idle gaps in seconds, longest first."""

    @property
    def step_s(self) -> float:
        """Length of the window, in seconds."""
        return sum(self.parts_s.values())

    @property
    def own_s(self) -> float:
        """Step time without waits for other ranks, in seconds."""
        return self.step_s - sum(self.waits_s.values())


def owners(events: RankEvents) -> IntArray:
    """Return the owner of each event as an index in OWNERS, shape (n,).

    Collectives belong to the part of their group.
    """
    owner = _KIND_OWNERS[events.kind]
    computes = owner < len(BUSY)
    for phase, part in (("recompute", "recompute"), ("optimizer", "optimizer")):
        owner[computes & in_phase(events, phase)] = OWNERS.index(part)
    parts = np.array([OWNERS.index(group.part) for group in events.groups], dtype=np.int64)
    owner[events.collectives.event] = parts[events.collectives.group]
    return owner


def in_phase(events: RankEvents, phase: str) -> BoolArray:
    """Return a mask of the events launched within a phase of their thread, shape (n,).

    For `recompute`, events in backward spans nested in a recompute span are excluded.
    """
    inside = np.zeros(len(events.start_s), dtype=bool)
    launched = np.where(np.isnan(events.launch_s), events.start_s, events.launch_s)
    for thread in np.unique(events.phases.thread[events.phases.phase == PHASES.index(phase)]):
        rows = events.thread == thread
        depth = _depth(events.phases, phase, thread, launched[rows])
        if phase == "recompute":
            # The recompute span is inside its backward span, so count only backward spans nested in
            # it.
            depth = np.where(
                _depth(events.phases, "backward", thread, launched[rows], within=phase) > 0,
                0,
                depth,
            )
        inside[rows] = depth > 0
    return inside


def _depth(
    phases: Phases, phase: str, thread: int, times_s: FloatArray, *, within: str | None = None
) -> IntArray:
    """Return the number of spans of a phase on a thread that cover each time.

    Args:
        phases: Host spans.
        phase: Name of the phase.
        thread: Thread of the spans.
        times_s: Times in seconds.
        within: Count only spans that begin inside a span of this phase.
    """
    rows = (phases.phase == PHASES.index(phase)) & (phases.thread == thread)
    if within is not None:
        rows[rows] = _depth(phases, within, thread, phases.start_s[rows]) > 0
    starts, ends = np.sort(phases.start_s[rows]), np.sort(phases.end_s[rows])
    return np.searchsorted(starts, times_s, side="right") - np.searchsorted(
        ends, times_s, side="right"
    )


def split(
    events: RankEvents, *, owner: IntArray, waits_until_s: FloatArray, window_s: tuple[float, float]
) -> StepSplit:
    """Split a window among owners.

    Let c_o(t) be the number of owner o's events that are running at time t. Time t belongs to the
    first o in OWNERS with c_o(t) > 0, so the sum of the parts is the window.

    Args:
        events: Events of the rank.
        owner: (n,) owners from `owners`.
        waits_until_s: (n,) time until which each collective waits for other ranks; -inf if it does
            not wait.
        window_s: Start and end of the window.
    """
    low, high = window_s
    rows = np.flatnonzero((events.end_s > low) & (events.start_s < high))
    start = np.maximum(events.start_s[rows], low)
    end = np.minimum(events.end_s[rows], high)
    row_owner = owner[rows]
    until = np.clip(waits_until_s[rows], start, end)
    waiting = np.flatnonzero(until > start)
    shift = OWNERS.index(f"wait {COMMUNICATION[0]}") - OWNERS.index(COMMUNICATION[0])
    starts = np.concatenate([np.where(until > start, until, start), start[waiting]])
    ends = np.concatenate([end, until[waiting]])
    owns = np.concatenate([row_owner, row_owner[waiting] + shift])
    seconds, covered, idle = _sweep(starts, ends, owns, window_s=window_s)
    exposed = dict(zip(OWNERS, seconds.tolist(), strict=False))
    waits = {part: exposed[f"wait {part}"] for part in COMMUNICATION}
    parts = dict.fromkeys(MEASURED_PARTS, 0.0) | {
        name: exposed[name] for name in (*BUSY, *COMMUNICATION, "offload")
    }
    for part in COMMUNICATION:
        parts["pipeline_bubble" if part == "pipeline_p2p" else part] += waits[part]
    parts["overhead"] = high - low - sum(parts.values())
    hidden = {part: float(covered[OWNERS.index(part)]) - exposed[part] for part in COMMUNICATION}
    gaps = idle[:, 1] - idle[:, 0]
    return StepSplit(
        parts_s=parts,
        hidden_s=hidden,
        waits_s=waits,
        host_s=_late_host(idle, start=start, launch=events.launch_s[rows])
        if events.on_device
        else float(gaps.sum()),
        gaps_s=np.sort(gaps)[::-1],
    )


def _sweep(
    start: FloatArray, end: FloatArray, owner: IntArray, *, window_s: tuple[float, float]
) -> tuple[FloatArray, FloatArray, FloatArray]:
    """Return each owner's time in a window by sweeping over its events.

    Returns:
        (owners + 1,) seconds that belong to each owner, the last one idle; (owners,) seconds
        covered by each owner's events; (gaps, 2) idle gaps.
    """
    times = np.concatenate([[window_s[0]], start, end, [window_s[1]]])
    small = owner.astype(np.int8)  # A window may have millions of events.
    edge = np.array([IDLE], dtype=np.int8)
    change = np.ones(len(times), dtype=np.int8)
    change[1 + len(start) :] = -1
    of = np.concatenate([edge, small, small, edge])
    order = np.argsort(times, kind="stable").astype(np.int32)
    times, change, of = times[order], change[order], of[order]
    lengths = np.diff(times)
    first = np.full(len(lengths), IDLE, dtype=np.int8)
    covered = np.zeros(IDLE)
    for index in np.unique(small)[::-1]:
        active = np.cumsum(np.where(of == index, change, 0), dtype=np.int32)[:-1] > 0
        covered[index] = lengths[active].sum()
        first[active] = index
    seconds = np.bincount(first, weights=lengths, minlength=IDLE + 1).astype(np.float64)
    free = np.flatnonzero((first == IDLE) & (lengths > 0))
    if not len(free):
        return seconds, covered, np.empty((0, 2))
    starts, ends = times[free], times[free + 1]
    breaks = np.flatnonzero(starts[1:] > ends[:-1])
    idle = np.stack([starts[np.r_[0, breaks + 1]], ends[np.r_[breaks, len(ends) - 1]]], axis=1)
    return seconds, covered, idle


def _late_host(idle: FloatArray, *, start: FloatArray, launch: FloatArray) -> float:
    """Return the idle seconds before the host launched the kernel that ends each gap.

    If that launch is unknown, or nothing follows a gap, the entire gap counts.
    """
    if not len(idle):
        return 0.0
    order = np.argsort(start, kind="stable")
    following = np.searchsorted(start[order], idle[:, 1] - 1e-9)
    launched = np.append(launch[order], np.nan)[following]
    late = np.where(np.isnan(launched), idle[:, 1], launched)
    return float((np.clip(late, idle[:, 0], idle[:, 1]) - idle[:, 0]).sum())
