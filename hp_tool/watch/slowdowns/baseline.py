"""Baseline of a regime: its newest steady steps, with median and deviation."""

import math
import statistics
from bisect import bisect_left, insort
from dataclasses import dataclass, field

from hp_tool.loop.assumptions import assumed

REACH = 1.645
"""Half-width of a 90% interval in standard deviations."""
UPPER_BOUND_SDS = 2.33
"""One-sided 99% bound of a fraction, in standard deviations."""
DIGITS = 6
"""Number of stored decimals of ln seconds, which is a millionth of a step."""
OUTLIER_CAP = 10.0
"""In means, step times are capped at this multiple of the median, because stalls have no finite
mean (`stalls.mean_log_excess`).
"""


@dataclass(slots=True, kw_only=True)
class Baseline:
    """The newest steady steps of a regime, at most `Watch.baseline_steps`.

    The reference is the median of the newest `Watch.reference_steps` of them. It follows daily load
    variations, which a fixed reference would report as slowdowns.
    """

    logs: list[float] = field(default_factory=list)
    """ln step times, oldest first."""
    _window: list[float] = field(init=False)
    """Sorted ln step times of the newest `reference_steps`."""

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
        """Median ln step time of the newest reference_steps."""
        middle = len(self._window) // 2
        return (
            self._window[middle]
            if len(self._window) % 2
            else (self._window[middle - 1] + self._window[middle]) / 2.0
        )

    @property
    def reference_steps(self) -> int:
        """Number of steps that determine the reference."""
        return len(self._window)

    @property
    def median(self) -> float:
        """Median ln step time of all steps."""
        return statistics.median(self.logs)

    def interval(self) -> tuple[float, float]:
        """Return the median's 90% interval from order statistics n / 2 -+ 1.645 sqrt(n) / 2."""
        ordered = sorted(self.logs)
        n = len(ordered)
        reach = REACH * math.sqrt(n) / 2.0
        low, high = math.floor(n / 2.0 - reach), math.ceil(n / 2.0 + reach)
        return ordered[max(low, 0)], ordered[min(high, n - 1)]

    def mean(self) -> tuple[float, float]:
        """Return ln of the mean step time, and the half-width of its 90% interval.

        Step times are capped at OUTLIER_CAP times the median.
        """
        cap = self.median + math.log(OUTLIER_CAP)
        seconds = [math.exp(min(log_s, cap)) for log_s in self.logs]
        mean = statistics.fmean(seconds)
        error = statistics.stdev(seconds) / math.sqrt(len(seconds)) if len(seconds) > 1 else 0.0
        return math.log(mean), REACH * error / mean


def upper_bound(share: float, n: int) -> float:
    """Return Wilson's upper bound of a probability, from the fraction observed in n draws.

    It is always below 1.
    """
    centre = share + UPPER_BOUND_SDS**2 / (2.0 * n)
    reach = UPPER_BOUND_SDS * math.sqrt(
        share * (1.0 - share) / n + (UPPER_BOUND_SDS / (2.0 * n)) ** 2
    )
    return min((centre + reach) / (1.0 + UPPER_BOUND_SDS**2 / n), 1.0 - 1e-6)
