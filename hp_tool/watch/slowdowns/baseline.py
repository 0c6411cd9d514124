"""The newest steady steps of a job: the reference that further steps are compared with, and how
they scatter about it.
"""

import math
import statistics
from bisect import bisect_left, insort
from dataclasses import dataclass, field

from hp_tool.loop.assumptions import assumed

REACH = 1.645
"""Standard deviations to either end of an interval of 90 %."""
DOUBT = 2.33
"""Standard deviations of a share's upper bound: a baseline shows too small a share in one case of a
hundred.
"""
DIGITS = 6
"""Decimals of ln seconds that are kept: a millionth of a step."""
CAP = 10.0
"""Medians beyond which a step counts as so many in a mean: stalls have no mean of their own
(`stalls.mean_log_excess`).
"""


@dataclass(slots=True, kw_only=True)
class Baseline:
    """Steady steps of a regime, at most `Watch.baseline_steps`, the newest ones.

    The reference is the median of the newest `Watch.reference_steps`: it follows the load of a day,
    which a fixed one would mistake for a slowdown.
    """

    logs: list[float] = field(default_factory=list)
    """ln seconds, in their order."""
    _window: list[float] = field(init=False)
    """ln seconds of the newest reference_steps, sorted."""

    def __post_init__(self) -> None:
        self._window = sorted(self.logs[-assumed().watch.reference_steps :])

    def add(self, log_s: float) -> None:
        """Add a steady step."""
        self.logs.append(log_s)
        insort(self._window, log_s)
        if len(self._window) > assumed().watch.reference_steps:
            del self._window[bisect_left(self._window, self.logs[-len(self._window)])]
        if len(self.logs) > assumed().watch.baseline_steps:
            del self.logs[0]

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
    def reference_steps(self) -> int:
        """Number of steps that the reference is the median of."""
        return len(self._window)

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


def upper_bound(share: float, n: int) -> float:
    """Return Wilson's upper bound of a probability from its share of n draws, below 1."""
    centre = share + DOUBT**2 / (2.0 * n)
    reach = DOUBT * math.sqrt(share * (1.0 - share) / n + (DOUBT / (2.0 * n)) ** 2)
    return min((centre + reach) / (1.0 + DOUBT**2 / n), 1.0 - 1e-6)
