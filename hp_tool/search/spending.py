"""What runs have cost, and what another one will."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from hp_tool.domain.query import SearchSettings
from hp_tool.domain.records import REUSED, RunRecord, RunState

UNKNOWN_STARTUP_S = 20.0
"""Seconds from submit to the first step, until a run has shown them: interpreter, process group, weights."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Spent:
    """What a search has used up."""

    profile_runs: int
    """Real runs that ended with a measurement, good or bad."""
    gpu_seconds: float
    """Devices x wall seconds of all runs, abandoned ones too."""


def spent_by(runs: Sequence[RunRecord]) -> Spent:
    """What runs have cost: reused measurements are no runs, abandoned ones cost seconds only."""
    real = sum(run.state is RunState.FINISHED and REUSED not in run.predicted for run in runs)
    return Spent(profile_runs=real, gpu_seconds=sum(run.gpu_seconds or 0.0 for run in runs))


def open_runs(runs: Sequence[RunRecord]) -> list[RunRecord]:
    """Those that have not ended."""
    return [run for run in runs if not run.state.ended]


def startup_s(runs: Sequence[RunRecord], *, settings: SearchSettings) -> float:
    """Median seconds of a run that are no training step, by the runs that succeeded."""
    seen = []
    for run in runs:
        measurement = run.measurement
        if measurement is not None and measurement.step_s is not None and measurement.wall_s is not None and run.gpu_seconds:
            steps = settings.warmup_steps + (len(measurement.step_times_s) or settings.steps)
            seen.append(max(measurement.wall_s - steps * measurement.step_s, 0.0))
    return statistics.median(seen) if seen else UNKNOWN_STARTUP_S


def run_gpu_seconds(*, num_gpus: int, step_s: float, startup_s: float, settings: SearchSettings) -> float:
    """Devices x (start-up and all steps) of a run yet to come."""
    return num_gpus * (startup_s + (settings.warmup_steps + settings.steps) * step_s)
