"""Accounting of a search: cost of its runs and of the next run, stop criteria, progress."""

import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import Literal

from hp_tool.domain.measurement import Measurement
from hp_tool.domain.query import SearchSettings
from hp_tool.domain.records import REUSED, JsonObject, RunRecord
from hp_tool.domain.states import RunState
from hp_tool.loop.assumptions import assumed
from hp_tool.loop.calibration import Prior
from hp_tool.loop.search.acquisition import Proposal
from hp_tool.loop.search.fidelity import combine_repeats, find_leader
from hp_tool.loop.search.rivals import BESIDE

BUDGETS = ("budget_runs", "budget_gpu_seconds")
"""Search settings that may be changed while a search is running."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """Why the loop ended. The caller ends or releases the search accordingly."""

    state: Literal["succeeded", "cancelled", "paused", "released"]
    stopped_because: str
    expected_gain_fraction: float | None = None
    """Last expected gain from the best further runs (`lookahead.FURTHER_RUNS`), as a fraction of
    the best step time; None without measurements.
    """


@dataclass(frozen=True, slots=True, kw_only=True)
class Spent:
    """Runs, GPU-seconds and waiting time that a search has used so far."""

    profile_runs: int
    """Number of actual runs that ended with a measurement, whether or not they succeeded."""
    gpu_seconds: float
    """Devices x wall seconds over all runs, including abandoned ones."""
    queue_s: float = 0.0
    """Seconds that jobs waited for devices. Waiting is free."""


def spent_by(runs: Sequence[RunRecord]) -> Spent:
    """Return the cost of runs.

    Reused measurements do not count as runs. Abandoned runs count only with their time.
    """
    real = sum(run.state is RunState.FINISHED and REUSED not in run.predicted for run in runs)
    return Spent(
        profile_runs=real,
        gpu_seconds=sum(run.gpu_seconds or 0.0 for run in runs),
        queue_s=sum((run.account or {}).get("queue_s", 0.0) for run in runs),
    )


def open_runs(runs: Sequence[RunRecord]) -> list[RunRecord]:
    """Return the runs that have not finished."""
    return [run for run in runs if not run.state.ended]


def startup_s(runs: Sequence[RunRecord], *, settings: SearchSettings) -> float | None:
    """Return the median start-up time of successful runs in seconds; None if there are none."""
    ended = [
        run.measurement
        for run in runs
        if run.measurement is not None and run.gpu_seconds and BESIDE not in run.predicted
    ]
    seen = [
        each
        for measurement in ended
        if (each := measured_startup_s(measurement, settings=settings)) is not None
    ]
    return statistics.median(seen) if seen else None


def measured_startup_s(measurement: Measurement, *, settings: SearchSettings) -> float | None:
    """Return a run's seconds outside training steps; None if its duration is unknown."""
    if measurement.step_s is None or measurement.wall_s is None:
        return None
    warmup_s = sum(measurement.warmup_times_s) or settings.warmup_steps * measurement.step_s
    steps = len(measurement.step_times_s) or settings.steps
    return max(measurement.wall_s - warmup_s - steps * measurement.step_s, 0.0)


def run_gpu_seconds(
    *, num_gpus: int, step_s: float, startup_s: float, settings: SearchSettings
) -> float:
    """Return devices x (start-up and all steps) for a future run, in GPU-seconds."""
    return num_gpus * (startup_s + (settings.warmup_steps + settings.steps) * step_s)


def coverage_runs(settings: SearchSettings, *, prior: Prior) -> int:
    """Return how many of the first runs may cover unseen axis values.

    These runs do not maximize the expected gain. The number is 0 if the cost model is accurate to
    tens of percent, because the expected gain then gives less regret on measured grids. Earlier
    evidence does not reduce the number, because hosts change.
    """
    return (
        _least_runs(settings) if prior.group_log_sd > assumed().search.roughly_known_log_sd else 0
    )


def why_stop(
    *,
    settings: SearchSettings,
    spent: Spent,
    next_run_gpu_seconds: float,
    proposal: Proposal | None,
) -> str | None:
    """Return why the search should stop now; None to continue.

    A run is not started if it is expected to exceed `budget_gpu_seconds`. It is not started either
    if no sequence of further runs is expected to save `min_gain_fraction` with each of its runs.
    """
    if proposal is None:
        return "space_exhausted"
    if spent.profile_runs >= settings.budget_runs:
        return "budget_runs"
    if (
        settings.budget_gpu_seconds is not None
        and spent.gpu_seconds + next_run_gpu_seconds > settings.budget_gpu_seconds
    ):
        return "budget_gpu_seconds"
    enough = spent.profile_runs >= _least_runs(settings)
    if (
        enough
        and proposal.reason != "coverage"
        and not proposal.is_worth(settings.min_gain_fraction)
    ):
        return "no_expected_gain"
    return None


def _least_runs(settings: SearchSettings) -> int:
    return min(assumed().search.least_runs, settings.budget_runs)


def with_budget(settings: SearchSettings, *, stored: JsonObject) -> SearchSettings:
    """Return the settings with the budget currently in the stored query."""
    return replace(settings, **{name: stored[name] for name in BUDGETS if name in stored})


def progress_of(
    runs: Sequence[RunRecord], *, budget_runs: int, expected_gain: float | None
) -> JsonObject:
    """Return the cost and the best configuration of a search's runs.

    `expected_gain` is that of the best further runs, as a fraction of the best step time.
    """
    spent = spent_by(runs)
    best, best_step_s = find_leader(runs) or (None, None)
    its_runs = None if best is None else combine_repeats(runs)[best.parallel]
    return {
        "profile_runs": spent.profile_runs,
        "budget_runs": budget_runs,
        "gpu_seconds": spent.gpu_seconds,
        "queue_s": spent.queue_s,
        "best_run_id": best.id if best else None,
        "best_step_s": best_step_s,
        "best_measured_s": best.measurement.measured_s if best and best.measurement else None,
        "best_parallel": asdict(best.parallel) if best else None,
        "best_num_runs": its_runs.num_runs if its_runs else None,
        "best_step_s_range": [its_runs.low_s, its_runs.high_s] if its_runs else None,
        "expected_gain_fraction": expected_gain,
    }
