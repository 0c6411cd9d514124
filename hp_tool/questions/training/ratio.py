"""Compute the ratio of two configurations' step times, with its interval."""

import math

from hp_tool.cost.uncertainty import NORMAL_QUANTILE, ratio_log_sd
from hp_tool.domain.result import Estimate
from hp_tool.questions.training.problem import TrainingProblem
from hp_tool.wording.columns import unmeasured_features

Known = tuple[TrainingProblem, Estimate]
"""A configuration's problem, and its estimate, calibrated if possible."""


def step_ratio(first: Known, second: Known) -> tuple[float, tuple[float, float]] | None:
    """Return the second step time divided by the first, with its 90% interval; None if one of them
    has no step time.

    For one model and workload on one cluster, errors that both predictions share cancel. The
    interval is then that of pairs of measured runs. If the intervals of both step times are
    narrower because the configurations ran, the interval follows from these instead.
    """
    (problem, one), (other_problem, other) = first, second
    if one.time is None or other.time is None or one.intervals is None or other.intervals is None:
        return None
    log_sd = math.hypot(_log_sd(one), _log_sd(other))
    shared_fields = ("model", "cluster", "workload")
    if all(getattr(problem, name) == getattr(other_problem, name) for name in shared_fields):
        differing = len({*unmeasured_features(one)} ^ {*unmeasured_features(other)})
        log_sd = min(log_sd, float(ratio_log_sd(problem.profile, differing=differing)))
    factor, spread = other.time.step_s / one.time.step_s, math.exp(NORMAL_QUANTILE * log_sd)
    return factor, (factor / spread, factor * spread)


def _log_sd(estimate: Estimate) -> float:
    """Return the standard deviation of ln(step time) implied by an estimate's interval."""
    assert estimate.intervals is not None
    low, high = estimate.intervals.step_s
    return math.log(high / low) / (2.0 * NORMAL_QUANTILE)
