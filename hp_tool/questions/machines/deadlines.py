"""The probability that a training meets its deadline."""

import math
from statistics import NormalDist

import numpy as np

from hp_tool.cost.goodput import lost_s
from hp_tool.cost.uncertainty import NORMAL_QUANTILE
from hp_tool.domain.result import Estimate
from hp_tool.domain.units import SECONDS_PER_DAY

NUM_QUADRATURE_NODES = 64
"""Number of equally likely durations that represent the uncertainty."""


def deadline_probability(estimate: Estimate, *, max_days: float) -> float:
    """Return the probability that a training ends within a number of calendar days.

    Its duration without failures is log-normal, with the deviation of the step-time interval on the
    side of the deadline. Failures are distributed as in its goodput.
    """
    days, kept = estimate.days, estimate.goodput
    assert days is not None and estimate.time is not None and estimate.intervals is not None
    end_s = estimate.intervals.step_s[1 if (estimate.calendar_days or days) < max_days else 0]
    log_sd = abs(math.log(end_s / estimate.time.step_s)) / NORMAL_QUANTILE
    middle = (np.arange(NUM_QUADRATURE_NODES) + 0.5) / NUM_QUADRATURE_NODES
    lengths_s = (
        days
        * SECONDS_PER_DAY
        * np.exp(log_sd * np.array([NormalDist().inv_cdf(each) for each in middle]))
    )
    limit_s = max_days * SECONDS_PER_DAY
    if kept is None:
        return float(np.mean(lengths_s <= limit_s))
    stretches = days * SECONDS_PER_DAY / kept.checkpoint_interval_s
    seconds, probability = lost_s(
        stretches=stretches,
        interval_s=kept.checkpoint_interval_s,
        checkpoint_s=kept.checkpoint_s,
        restart_s=kept.restart_s,
        mtbf_s=kept.mtbf_s,
    )
    busy_s = (
        1.0 + kept.checkpoint_s / kept.checkpoint_interval_s
    )  # Each second of training, including its share of a checkpoint.
    spare_s = limit_s * (days * SECONDS_PER_DAY / lengths_s) - days * SECONDS_PER_DAY * busy_s
    return float(
        np.mean(np.interp(spare_s, seconds, np.minimum(np.cumsum(probability), 1.0), left=0.0))
    )
