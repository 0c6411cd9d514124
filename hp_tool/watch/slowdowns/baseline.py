"""The newest steady steps of a job: the reference that further steps are compared with, and how
they scatter about it.
"""

import itertools
import math
import statistics
from bisect import bisect_left, bisect_right, insort
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Self

from hp_tool.loop.assumptions import assumed

REACH = 1.645
"""Standard deviations to either end of an interval of 90 %."""
DOUBT = 2.33
"""Standard deviations of a share's upper bound: a baseline shows too small a share in one case of a
hundred.
"""
DIGITS = 6
"""Decimals of ln seconds that are kept: a millionth of a step."""
NORMAL_QUARTILES = 1.349
"""Interquartile range of the normal distribution, in standard deviations."""
MOST_IN_ROWS = 0.95
"""Largest correlation of signs that is believed."""
CAP = 10.0
"""Medians beyond which a step counts as so many in a mean: stalls have no mean of their own
(`stalls.mean_log_excess`).
"""


@dataclass(slots=True, kw_only=True)
class Baseline:
    """Steady steps of a regime, at most `Watch.baseline_steps`, the newest ones.

    The reference is the median of the newest `Watch.reference_steps`: it follows the load of a day,
    which a fixed one would mistake for a slowdown. A step's residual is its distance from the
    reference that stood before it came, so that residuals scatter by as much as the reference lags
    behind, too.
    """

    logs: list[float] = field(default_factory=list)
    """ln seconds, in their order."""
    residuals: list[float] = field(default_factory=list)
    """ln seconds less the reference, of the same steps; empty until there are
    `Watch.least_baseline_steps`.
    """
    _window: list[float] = field(default_factory=list)
    """ln seconds of the newest reference_steps, sorted."""

    def add(self, log_s: float) -> None:
        """Add a steady step."""
        least = assumed().watch.least_baseline_steps
        if self.residuals:
            self.residuals.append(round(log_s - self.reference, DIGITS))
        self.logs.append(log_s)
        insort(self._window, log_s)
        if len(self._window) > assumed().watch.reference_steps:
            leaving = self.logs[-len(self._window)]
            del self._window[bisect_left(self._window, leaving)]
        if not self.residuals and len(self.logs) >= least:
            self.residuals = [round(each - self.reference, DIGITS) for each in self.logs]
        if len(self.logs) > assumed().watch.baseline_steps:
            del self.logs[0], self.residuals[0]

    @classmethod
    def of(cls, logs: list[float], residuals: list[float]) -> Self:
        """Return the baseline that had these steps."""
        return cls(
            logs=logs, residuals=residuals, _window=sorted(logs[-assumed().watch.reference_steps :])
        )

    def __len__(self) -> int:
        return len(self.logs)

    @property
    def reference(self) -> float:
        """Median of the newest reference_steps."""
        middle = len(self._window) // 2
        return (
            self._window[middle]
            if len(self._window) % 2
            else (self._window[middle - 1] + self._window[middle]) / 2.0
        )

    @property
    def median(self) -> float:
        """Median of all steps."""
        return statistics.median(self.logs)

    def interval(self) -> tuple[float, float]:
        """90 % interval of the median, from order statistics: ranks n / 2 -+ 1.645 sqrt(n) / 2."""
        ordered = sorted(self.logs)
        n = len(ordered)
        reach = REACH * math.sqrt(n) / 2.0
        low, high = math.floor(n / 2.0 - reach), math.ceil(n / 2.0 + reach)
        return ordered[max(low, 0)], ordered[min(high, n - 1)]

    def mean(self) -> tuple[float, float]:
        """Return ln of the mean step time, each capped at CAP medians, and half of its 90 %
        interval in ln.
        """
        cap = self.median + math.log(CAP)
        seconds = [math.exp(min(each, cap)) for each in self.logs]
        mean = statistics.fmean(seconds)
        error = statistics.stdev(seconds) / math.sqrt(len(seconds)) if len(seconds) > 1 else 0.0
        return math.log(mean), REACH * error / mean

    def noise(self) -> tuple[float, float]:
        """Return the standard deviation of steps about the median of all, and the correlation of
        consecutive signs.

        The deviation is the interquartile range over that of the normal distribution: neither
        follows the tails.
        """
        ordered = sorted(self.logs)
        n, median = len(ordered), self.median
        signs = [each > median for each in self.logs]
        in_rows = 2.0 * sum(a == b for a, b in itertools.pairwise(signs)) / (n - 1) - 1.0
        return (ordered[3 * n // 4] - ordered[n // 4]) / NORMAL_QUARTILES, max(in_rows, 0.0)


def correlation_bound(in_rows: float, n: int) -> float:
    """Return an upper bound of the correlation of consecutive steps from that of their signs in n
    steps.

    sin(pi q / 2) for signs of correlation q (the arcsine law of normal variables), with q larger by
    (1 + q)^2 / sqrt(n): a standard error of 1 / sqrt(n) if they are independent, and more of it the
    longer the noise remembers.
    """
    return math.sin(
        math.pi / 2.0 * min(in_rows + (1.0 + in_rows) ** 2 / math.sqrt(n), MOST_IN_ROWS)
    )


def share_beyond(ordered: Sequence[float], limit: float, *, above: bool) -> float:
    """Return the share of sorted values above the limit, or below it."""
    count = len(ordered) - bisect_right(ordered, limit) if above else bisect_left(ordered, limit)
    return count / len(ordered)


def upper_bound(share: float, n: int) -> float:
    """Return Wilson's upper bound of a probability from its share of n draws, below 1."""
    centre = share + DOUBT**2 / (2.0 * n)
    reach = DOUBT * math.sqrt(share * (1.0 - share) / n + (DOUBT / (2.0 * n)) ** 2)
    return min((centre + reach) / (1.0 + DOUBT**2 / n), 1.0 - 1e-6)


def correlation(bits: Sequence[bool]) -> float:
    """Return the correlation of consecutive bits (Yule's phi); 0 if all are equal."""
    n = len(bits)
    share = sum(bits) / n
    if not 0.0 < share < 1.0 or n < 2:
        return 0.0
    both = sum(a and b for a, b in itertools.pairwise(bits)) / (n - 1)
    return (both - share**2) / (share * (1.0 - share))
