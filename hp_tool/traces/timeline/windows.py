"""The steps of one rank as windows in time: marked on its host, or found between its optimizers."""

from __future__ import annotations

import numpy as np

from hp_tool.traces.timeline.events import PHASES, FloatArray, RankEvents
from hp_tool.traces.timeline.split import OWNERS, owners

SAME_UPDATE = 0.5
"""Share of the longest pause between two kernels of the optimizer up to which both belong to one
update.
"""
LEAST_SHARE_IN_STEPS = 1.0 / 3.0
"""Share of the recorded time that steps found between updates span at least: n updates enclose n -
1 steps, and at most one further step was recorded before them and one after. Pauses within a single
update enclose less.
"""


def windows(events: RankEvents) -> tuple[FloatArray, bool]:
    """((steps, 2) start and end of each step, whether steps were marked or found: else all that was
    recorded is one).

    On a device a step ends when the last kernel does that its host launched within the marked step:
    hosts run ahead.
    """
    if len(events.steps_s):
        return _on_device(events, events.steps_s), True
    if not len(events.start_s):
        return np.empty((0, 2)), False
    first, last = float(events.start_s.min()), float(events.end_s.max())
    ends = _update_ends(events)
    if len(ends) > 1 and ends[-1] - ends[0] >= LEAST_SHARE_IN_STEPS * (last - first):
        return np.stack([ends[:-1], ends[1:]], axis=1), True
    return np.array([[first, last]]), False


def _on_device(events: RankEvents, steps_s: FloatArray) -> FloatArray:
    if not events.on_device or not len(events.start_s) or np.isnan(events.launch_s).all():
        return steps_s
    order = np.argsort(np.where(np.isnan(events.launch_s), np.inf, events.launch_s), kind="stable")
    launched, ended = events.launch_s[order], np.maximum.accumulate(events.end_s[order])
    last = np.searchsorted(launched, steps_s[:, 1]) - 1
    ends = np.maximum.accumulate(np.where(last >= 0, ended[np.maximum(last, 0)], steps_s[:, 1]))
    first = max(
        steps_s[0, 0],
        min(
            ended[last[0]] if last[0] >= 0 else np.inf, _last_before(launched, ended, steps_s[0, 0])
        ),
    )
    starts = np.concatenate([[first], ends[:-1]])
    long = ends > starts
    return np.stack([starts[long], ends[long]], axis=1)


def _last_before(launched: FloatArray, ended: FloatArray, time_s: float) -> float:
    """When the last kernel ended that was launched before this time; -inf where none was."""
    row = int(np.searchsorted(launched, time_s)) - 1
    return float(ended[row]) if row >= 0 else -np.inf


def _update_ends(events: RankEvents) -> FloatArray:
    """When each optimizer step ended, by its spans on the host of a CPU process, else by its
    kernels.
    """
    spans = events.phases.phase == PHASES.index("optimizer")
    if not events.on_device and spans.any():
        return np.sort(events.phases.end_s[spans])
    rows = np.flatnonzero(owners(events) == OWNERS.index("optimizer"))
    if len(rows) < 2:
        return np.empty(0)
    order = rows[np.argsort(events.start_s[rows], kind="stable")]
    ends = np.maximum.accumulate(events.end_s[order])
    pauses = events.start_s[order][1:] - ends[:-1]
    breaks = np.flatnonzero(pauses > SAME_UPDATE * pauses.max())
    return np.append(ends[breaks], ends[-1]) if pauses.max() > 0 else ends[-1:]
