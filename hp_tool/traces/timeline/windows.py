"""Step boundaries of one rank: marked by its host, or found between optimizer updates."""

from __future__ import annotations

import numpy as np

from hp_tool.traces.timeline.events import PHASES, FloatArray, RankEvents
from hp_tool.traces.timeline.split import OWNERS, owners

UPDATE_GAP_SHARE = 0.5
"""Maximum pause between optimizer kernels of the same update, as a fraction of the longest pause.
"""
MIN_SHARE_IN_STEPS = 1.0 / 3.0
"""Minimum fraction of the recording that must be covered by steps found between updates.

n updates enclose n - 1 steps, and at most one more step lies before and after them. Pauses within a
single update enclose less.
"""


def windows(events: RankEvents) -> tuple[FloatArray, bool]:
    """Find the steps of a rank.

    The host runs ahead of the device. On a device, a step therefore ends with the last kernel that
    the host launched within the marked step.

    Returns:
        (steps, 2) start and end of each step, and True if steps were marked or found. If False, the
        recording counts as one step.
    """
    if len(events.steps_s):
        return _on_device_time(events, events.steps_s), True
    if not len(events.start_s):
        return np.empty((0, 2)), False
    first, last = float(events.start_s.min()), float(events.end_s.max())
    ends = _update_ends(events)
    if len(ends) > 1 and ends[-1] - ends[0] >= MIN_SHARE_IN_STEPS * (last - first):
        return np.stack([ends[:-1], ends[1:]], axis=1), True
    return np.array([[first, last]]), False


def _on_device_time(events: RankEvents, steps_s: FloatArray) -> FloatArray:
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
    """Return when the last kernel launched before a given time ended; -inf if there is none."""
    row = int(np.searchsorted(launched, time_s)) - 1
    return float(ended[row]) if row >= 0 else -np.inf


def _update_ends(events: RankEvents) -> FloatArray:
    """Return when each optimizer update ended, from host spans (CPU process) or kernels."""
    spans = events.phases.phase == PHASES.index("optimizer")
    if not events.on_device and spans.any():
        return np.sort(events.phases.end_s[spans])
    rows = np.flatnonzero(owners(events) == OWNERS.index("optimizer"))
    if len(rows) < 2:
        return np.empty(0)
    order = rows[np.argsort(events.start_s[rows], kind="stable")]
    ends = np.maximum.accumulate(events.end_s[order])
    pauses = events.start_s[order][1:] - ends[:-1]
    breaks = np.flatnonzero(pauses > UPDATE_GAP_SHARE * pauses.max())
    return np.append(ends[breaks], ends[-1]) if pauses.max() > 0 else ends[-1:]
