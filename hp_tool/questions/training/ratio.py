"""How many times as long one configuration's step takes as another's, with the interval of that."""

import math

from hp_tool.cost.uncertainty import NORMAL_QUANTILE, ratio_log_sd
from hp_tool.domain.result import Estimate
from hp_tool.questions.training.problem import TrainingProblem
from hp_tool.wording.columns import unmeasured

Known = tuple[TrainingProblem, Estimate]
"""A configuration's problem, and all that is known of it."""


def step_ratio(first: Known, second: Known) -> tuple[float, tuple[float, float]] | None:
    """Return the second's step time over the first's with its 90 % interval; None where one of them
    has none.

    What misleads both predictions alike cancels out of the ratio: of one model and workload on one
    cluster it scatters as pairs of measured runs do, or as the two intervals allow where they are
    narrower, which runs of one's own make them.
    """
    (problem, one), (other_problem, other) = first, second
    if one.time is None or other.time is None or one.intervals is None or other.intervals is None:
        return None
    log_sd = math.hypot(_log_sd(one), _log_sd(other))
    same = ("model", "cluster", "workload")
    if all(getattr(problem, name) == getattr(other_problem, name) for name in same):
        differing = len({*unmeasured(one)} ^ {*unmeasured(other)})
        log_sd = min(log_sd, float(ratio_log_sd(problem.profile, differing=differing)))
    factor, spread = other.time.step_s / one.time.step_s, math.exp(NORMAL_QUANTILE * log_sd)
    return factor, (factor / spread, factor * spread)


def _log_sd(estimate: Estimate) -> float:
    """Standard deviation of ln(step time) that the interval of an estimate stands for."""
    assert estimate.intervals is not None
    low, high = estimate.intervals.step_s
    return math.log(high / low) / (2.0 * NORMAL_QUANTILE)
