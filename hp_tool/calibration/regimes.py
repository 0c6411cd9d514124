"""Runs that are not what their configuration is: stalls, which happen again, and steps faster than can be, which are slips.

On real clusters some configurations stall: a group that crosses nodes waits for every micro-batch and the step takes two
to fifty times as long. Those runs say nothing about the others; they say where the slow regime is and what a
micro-batch costs in it. Every run belongs to each regime with a probability.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from hp_tool.calibration.evidence import FloatArray

LOG_MEAN = 1.1
"""Mean of |ln(step / regular)| outside the regular regime, exponentially distributed: slightly slow runs are common, fifty
times slower ones exist. As in nanotron's grid, the only one with many stalls: 1.0 (1B) and 1.2 (8B) beyond 0.4."""
SLIPS = 0.02
"""Share of runs that are slips, half of them too slow and half too fast: judged. Published runs hold fewer."""
RARE = 0.01
"""Share of runs that stall where nobody saw any."""
WEIGHT = 2.0
"""Runs of the same configuration that the share of slow runs is worth where a configuration is judged: one slow run alone may
be a slip, two are a habit; ..."""
SHARE_WEIGHT = 20.0
"""... and runs that its prior is worth where the share itself is."""
NEAR = 0.5
"""Distance, in units of the features' scales, over which runs share a regime: nearer than that over which speeds vary."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Judgement:
    """n runs by regime."""

    slow: FloatArray
    """(n,) probability of a stall."""
    regular: FloatArray
    """(n,) of neither a stall nor a slip."""
    doubt: FloatArray
    """(n,) variance that takes a run's weight as far as it is not regular."""
    score: float
    """Log density of all of them, and of the share that stalled."""


def judge(excess: FloatArray, variance: FloatArray, *, usual_share: float) -> Judgement:
    """How far ln(step) lies above what is expected, with the variance of that expectation, as regimes; `usual_share`: of runs
    that stall, elsewhere."""
    slow_share = usual_share
    for _ in range(5):
        tail = np.exp(-np.abs(excess) / LOG_MEAN) / LOG_MEAN
        regular = (1.0 - slow_share - SLIPS) * np.exp(-0.5 * excess**2 / variance) / np.sqrt(2 * np.pi * variance)
        slow, slip = slow_share * tail * (excess > 0), 0.5 * SLIPS * tail
        total = regular + slow + slip + 1e-300
        slow_share = share(slow / total, usual_share=usual_share)
    more = usual_share * np.log(slow_share / usual_share)
    fewer = (1.0 - usual_share) * np.log((1.0 - slow_share) / (1.0 - usual_share))
    score = float(np.log(total).sum() + SHARE_WEIGHT * (more + fewer))
    odds = (slow + slip) / (regular + 1e-6 * total)
    return Judgement(slow=slow / total, regular=regular / total, doubt=variance * odds, score=score)


def share(slow: FloatArray, *, usual_share: float) -> float:
    """Return the share of slow runs; without runs it is the prior's."""
    return float((SHARE_WEIGHT * usual_share + slow.sum()) / (SHARE_WEIGHT + len(slow)))


@dataclass(frozen=True, slots=True, kw_only=True)
class Stalls:
    """Where runs stalled, and by how much."""

    points: FloatArray
    """(n, k) of all runs, in units of the features' scales."""
    slow: FloatArray
    """(n,) probability that the run stalled."""
    log_stall: FloatArray
    """(n,) ln of the seconds that each micro-batch lost, if it did."""
    share: float

    def predict(self, points: FloatArray) -> tuple[FloatArray, FloatArray]:
        """Return, each (m,), the probability of a stall, and the seconds that a micro-batch then loses.

        Each run counts by how near it is to the configuration asked for; far from all, the share of all does.
        """
        squares = np.sum(points**2, axis=1)[:, None] + np.sum(self.points**2, axis=1) - 2.0 * points @ self.points.T
        near = np.exp(-0.5 * np.maximum(squares, 0.0) / NEAR**2)
        slow = near * self.slow
        probability = (WEIGHT * self.share + slow.sum(axis=1)) / (WEIGHT + near.sum(axis=1))
        slow = slow + (1e-3 * self.slow + 1e-8)  # far from every slow run, all of them count the same
        return probability, np.exp(slow @ self.log_stall / slow.sum(axis=1))


def stalls(
    judged: Judgement,
    points: FloatArray,
    *,
    expected_s: FloatArray,
    measured_s: FloatArray,
    micro_batches: FloatArray,
    usual_share: float,
) -> Stalls | None:
    """What the runs say of stalls; None where none probably did and none usually does."""
    stalled = judged.slow > 0.5
    if usual_share <= RARE and not stalled.any():
        return None
    lost_s = np.where(stalled, measured_s - expected_s, expected_s * np.expm1(LOG_MEAN))
    return Stalls(
        points=points,
        slow=judged.slow,
        log_stall=np.log(np.maximum(lost_s, 1e-9) / micro_batches),
        share=share(judged.slow, usual_share=usual_share),
    )
