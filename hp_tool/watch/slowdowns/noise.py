"""Noise of steady steps, estimated from a baseline: an AR(1) process with outliers."""

from __future__ import annotations

import functools
import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Self

import numpy as np

from hp_tool.watch.slowdowns.baseline import REACH

NORMAL_QUARTILES = 1.349
"""Interquartile range of a normal distribution, in standard deviations."""
OUTLIER_SDS = 3.5
"""A step this many standard deviations above the level is an outlier (checkpoint, stall, pause)."""
MIN_SD = 0.001
"""Minimum standard deviation of ln step times, because logs round their times."""
MAX_CORRELATION = 0.97


@dataclass(frozen=True, slots=True, kw_only=True)
class Noise:
    """AR(1) noise of ln step times without outliers: y[t] = correlation * y[t - 1] + shock."""

    shock_sd: float
    correlation: float
    """Correlation of consecutive steps."""
    steps: int
    """Number of steps in the estimate."""

    @property
    def correlation_bound(self) -> float:
        """Upper bound of the correlation's 90% interval."""
        return min(
            self.correlation + REACH * math.sqrt((1.0 - self.correlation**2) / self.steps),
            MAX_CORRELATION,
        )

    @property
    def sd(self) -> float:
        """Standard deviation of one step, at the correlation's upper bound."""
        return self.shock_sd / math.sqrt(1.0 - self.correlation_bound**2)

    @classmethod
    def of(cls, logs: Sequence[float]) -> Self:
        """Estimate the noise around a straight line through ln step times of consecutive steps.

        The sample correlation r is corrected for its bias of -(2 + 4 r) / n.
        """
        values, places = np.asarray(logs), np.arange(len(logs)) - (len(logs) - 1) / 2.0
        low, median, high = np.quantile(values, (0.25, 0.5, 0.75))
        spread = max(float(high - low) / NORMAL_QUARTILES, MIN_SD)
        usual = np.abs(values - median) <= OUTLIER_SDS * spread
        slope, level = np.polyfit(places[usual], values[usual], 1)
        centred = values - level - slope * places
        pairs = usual[1:] & usual[:-1]
        first, second, n = centred[:-1][pairs], centred[1:][pairs], max(int(pairs.sum()), 4)
        r = min(
            max(float(first @ second) / max(float(first @ first), n * MIN_SD**2), 0.0),
            MAX_CORRELATION,
        )
        shock_sd = max(math.sqrt(float(((second - r * first) ** 2).sum()) / max(n - 3, 1)), MIN_SD)
        return cls(
            shock_sd=shock_sd, correlation=min(r + (2.0 + 4.0 * r) / n, MAX_CORRELATION), steps=n
        )

    def state(self) -> list[float]:
        """Return the state as JSON types."""
        return [self.shock_sd, self.correlation, self.steps]

    @classmethod
    def from_state(cls, state: Sequence[float]) -> Self:
        """Restore the noise from its stored state."""
        shock_sd, correlation, steps = state
        return cls(shock_sd=float(shock_sd), correlation=float(correlation), steps=int(steps))

    def drift_sd(self, n: int, reference_steps: int) -> float:
        """Return the standard deviation of a difference of two medians.

        They are the medians of n and of `reference_steps` steps.
        """
        r = self.correlation
        sd = self.shock_sd / math.sqrt(1.0 - r * r)
        return sd * math.sqrt(median_variance(n, r) + median_variance(reference_steps, r))

    def drift(self, n: int, reference_steps: int, *, probability: float) -> float:
        """Return the difference of the two medians that noise exceeds with this probability.

        Means of correlated steps are as uncertain as means of (1 - r) / (1 + r) times as many
        independent steps.
        """
        independent = self.steps * (1.0 - self.correlation) / (1.0 + self.correlation)
        return t_quantile(probability, independent) * self.drift_sd(n, reference_steps)


@functools.lru_cache(maxsize=1024)
def t_quantile(probability: float, n: float) -> float:
    """Return the upper quantile of Student's t with n degrees of freedom (Cornish-Fisher)."""
    z = -statistics.NormalDist().inv_cdf(probability)
    return z * (
        1.0 + (z * z + 1.0) / (4.0 * n) + (5.0 * z**4 + 16.0 * z * z + 3.0) / (96.0 * n * n)
    )


@functools.lru_cache(maxsize=1024)
def median_variance(n: int, r: float) -> float:
    """Return the variance of the median of n steps of an AR(1) process with variance 1.

    It is (1 / n) sum over |k| < n of (1 - |k| / n) asin(r^|k|). The covariance of the signs of two
    variables is (2 / pi) asin of their correlation, and the density at the median is 1 / sqrt(2
    pi). For r = 0, this is the well-known (pi / 2) / n.

    Args:
        n: Number of steps.
        r: Correlation of consecutive steps.
    """
    total, power = math.pi / 2.0, 1.0
    for k in range(1, n):
        power *= r
        if power < 1e-3:
            break
        total += 2.0 * (1.0 - k / n) * math.asin(power)
    return total / n
