"""Whether the leader should run again: only where its noise can decide who leads."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from statistics import NormalDist

from hp_tool.domain.measurement import Measurement
from hp_tool.domain.records import RunRecord

_MEDIAN_EFFICIENCY = math.sqrt(math.pi / 2)
"""Standard error of a median by that of a mean, for normal noise."""


def repeat_gain(runs: Sequence[RunRecord]) -> tuple[RunRecord, float] | None:
    """(leader, what running it again is expected to win as a share of its step time); None without two measured rivals.

    If the leader is slower than it looked by more than the runner-up lies behind, the runner-up is the better choice:
    E[max(T1 - T2, 0)] / T1 for normal errors of both medians, as their steps scattered. A leader that ran twice stays.
    """
    latest = {run.parallel: run for run in runs if _is_timed(run)}
    ranked = sorted(latest.values(), key=lambda run: _step_s(run))
    if len(ranked) < 2 or sum(_is_timed(run) and run.parallel == ranked[0].parallel for run in runs) > 1:
        return None
    first, second = ranked[:2]
    noise_s = math.hypot(*(standard_error_s(run.measurement) for run in (first, second) if run.measurement is not None))
    behind_s = _step_s(second) - _step_s(first)
    if noise_s == 0.0:
        return first, 0.0
    z = behind_s / noise_s
    normal = NormalDist()
    return first, (noise_s * normal.pdf(z) - behind_s * (1.0 - normal.cdf(z))) / _step_s(first)


def standard_error_s(measurement: Measurement) -> float:
    """Of the median step time, from how its steps scattered; 0 where that is not known."""
    times = measurement.repetitions_s
    if len(times) < 2:
        return 0.0
    return _MEDIAN_EFFICIENCY * statistics.stdev(times) / math.sqrt(len(times))


def _is_timed(run: RunRecord) -> bool:
    return run.measurement is not None and run.measurement.status == "ok" and run.fidelity.is_whole


def _step_s(run: RunRecord) -> float:
    assert run.measurement is not None and run.measurement.objective_s is not None
    return run.measurement.objective_s
