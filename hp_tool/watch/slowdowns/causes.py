"""Which ranks or parts could explain a slowdown: arrays of step times before and after a change in,
ranks and parts out.
"""

import math
import statistics
from bisect import bisect_left, bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

LAGS = 4.0
"""Robust standard deviations by which a lagging rank is beyond the typical one."""
LEAST_SPREAD = 0.01
"""Of ln seconds between ranks that are alike."""
GROWS = 3.0
"""Standard deviations of Mann and Whitney's statistic."""
COMMUNICATION = "communication"
"""The part in which a rank waits for others."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RankTimes:
    """Median seconds by part of one rank, before the change and since."""

    rank: int
    before: Mapping[str, float]
    after: Mapping[str, float]

    def own_growth(self) -> float | None:
        """ln of what the rank's own parts take now over what they took; None where it reports
        none.
        """
        before, after = (
            sum(s for name, s in each.items() if name != COMMUNICATION)
            for each in (self.before, self.after)
        )
        return math.log(after / before) if before > 0.0 and after > 0.0 else None


def lagging(ranks: Sequence[RankTimes]) -> tuple[list[tuple[int, float]], float | None]:
    """(rank, ln growth) of those whose own parts grew more than the typical rank's, the worst
    first; and the typical growth.

    Typical is the lower median, and the spread that of ranks below it: most ranks are taken to be
    well, and of two the faster.
    """
    growths = [(each.rank, growth) for each in ranks if (growth := each.own_growth()) is not None]
    if not growths:
        return [], None
    typical = statistics.median_low(growth for _, growth in growths)
    below = [typical - growth for _, growth in growths if growth <= typical]
    spread = max(1.4826 * statistics.median(below), LEAST_SPREAD)
    beyond = [(rank, growth) for rank, growth in growths if growth - typical > LAGS * spread]
    return sorted(beyond, key=lambda each: -each[1]), typical


def part_growths(ranks: Sequence[RankTimes]) -> dict[str, float]:
    """Seconds that each part grew by, in the median over ranks, the most first."""
    names = {name: None for each in ranks for name in each.before if name in each.after}
    grown = {
        name: statistics.median(
            each.after[name] - each.before[name]
            for each in ranks
            if name in each.before and name in each.after
        )
        for name in names
    }
    return dict(sorted(grown.items(), key=lambda each: -each[1]))


def grows(logs: Sequence[float]) -> bool:
    """Whether ln step times go on rising: the second half is above the first by Mann and Whitney's
    U (1947).

    Under no trend U of halves of m and n steps has the mean m n / 2 and the variance m n (m + n +
    1) / 12, less with ties, as rounded logs have: equal times share their mean place.
    """
    m = len(logs) // 2
    n = len(logs) - m
    if m < 4:
        return False
    ranked = sorted(logs)
    places = {
        log: (bisect_left(ranked, log) + bisect_right(ranked, log) + 1) / 2.0 for log in set(logs)
    }
    u = sum(places[log] for log in logs[m:]) - n * (n + 1) / 2.0
    return u - m * n / 2.0 > GROWS * math.sqrt(m * n * (m + n + 1) / 12.0)
