"""When further runs cannot pay: budgets, and what the next run is expected to win."""

from __future__ import annotations

from hp_tool.calibration import Prior
from hp_tool.domain.query import SearchSettings
from hp_tool.search.acquisition import Proposal
from hp_tool.search.spending import Spent

MIN_RUNS = 4
"""Before this many runs the expected gain is not asked: fewer measurements cannot tell the speed of compute and of
communication, the overheads and the noise apart, so the expectation would rest on the prior."""
ROUGHLY_KNOWN = 0.5
"""Doubt about a group of parts (standard deviation of the logarithm) above which axis values are shown first."""


def coverage_runs(settings: SearchSettings, *, prior: Prior) -> int:
    """How many of the first runs may be spent on showing axis values not yet seen, rather than on expected improvement.

    None where the cost model is believed within tens of per cent: what it expects of a run says enough, and measured grids
    were searched with less regret. Else it rarely takes all of them. Earlier evidence changes nothing: hosts change.
    """
    return min(MIN_RUNS, settings.budget_runs) if prior.group_log_sd > ROUGHLY_KNOWN else 0


def why_stop(*, settings: SearchSettings, spent: Spent, next_run_gpu_seconds: float, proposal: Proposal | None) -> str | None:
    """A reason to stop now, or None.

    `budget_gpu_seconds` is not overdrawn knowingly: a run that is expected to exceed it is not started.
    """
    if proposal is None:
        return "space_exhausted"
    if spent.profile_runs >= settings.budget_runs:
        return "budget_runs"
    if settings.budget_gpu_seconds is not None and spent.gpu_seconds + next_run_gpu_seconds > settings.budget_gpu_seconds:
        return "budget_gpu_seconds"
    enough = spent.profile_runs >= min(MIN_RUNS, settings.budget_runs)
    if enough and proposal.reason != "coverage" and proposal.expected_gain < settings.min_gain_fraction:
        return "no_expected_gain"
    return None
