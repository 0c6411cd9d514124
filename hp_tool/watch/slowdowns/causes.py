"""Find ranks and parts that explain a slowdown, from their times before and after the change."""

import math
import statistics
from bisect import bisect_left, bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

LAG_SDS = 4.0
"""A rank lags if it is this many robust standard deviations above the typical rank."""
MIN_SPREAD = 0.01
"""Minimum standard deviation assumed among healthy ranks, in ln seconds."""
TREND_SDS = 3.0
"""Minimum Mann-Whitney statistic, in standard deviations, that counts as a trend."""
COMMUNICATION = "communication"
"""Part in which a rank waits for other ranks."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RankTimes:
    """Median seconds by part of one rank, before and after a change."""

    rank: int
    before: Mapping[str, float]
    after: Mapping[str, float]

    def compute_growth(self) -> float | None:
        """Return the log growth of all parts except communication; None without such parts."""
        before, after = (
            sum(s for name, s in parts.items() if name != COMMUNICATION)
            for parts in (self.before, self.after)
        )
        return math.log(after / before) if before > 0.0 and after > 0.0 else None


def lagging(ranks: Sequence[RankTimes]) -> tuple[list[tuple[int, float]], float | None]:
    """Return ranks whose compute time grew more than the typical rank's, and the typical growth.

    The typical rank is the lower median, and the deviation is estimated from the ranks below it.
    This assumes that most ranks are healthy and, for two ranks, that the faster one is.

    Returns:
        (rank, ln growth) pairs, worst first; the typical ln growth, None without data.
    """
    growths = [
        (rank.rank, growth) for rank in ranks if (growth := rank.compute_growth()) is not None
    ]
    if not growths:
        return [], None
    typical = statistics.median_low(growth for _, growth in growths)
    below = [typical - growth for _, growth in growths if growth <= typical]
    spread = max(1.4826 * statistics.median(below), MIN_SPREAD)
    beyond = [(rank, growth) for rank, growth in growths if growth - typical > LAG_SDS * spread]
    return sorted(beyond, key=lambda pair: -pair[1]), typical


def part_growths(ranks: Sequence[RankTimes]) -> dict[str, float]:
    """Return how many seconds each part grew (median over ranks), largest first."""
    names = {name: None for rank in ranks for name in rank.before if name in rank.after}
    grown = {
        name: statistics.median(
            rank.after[name] - rank.before[name]
            for rank in ranks
            if name in rank.before and name in rank.after
        )
        for name in names
    }
    return dict(sorted(grown.items(), key=lambda pair: -pair[1]))


def grows(logs: Sequence[float]) -> bool:
    """Return True if step times keep rising, by a Mann-Whitney U test (1947) of the two halves.

    Without a trend, U for halves of m and n steps has mean m n / 2 and variance m n (m + n + 1) /
    12. The variance is lower with ties, which occur because logs round times. Ties share their mean
    rank.
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
    return u - m * n / 2.0 > TREND_SDS * math.sqrt(m * n * (m + n + 1) / 12.0)
