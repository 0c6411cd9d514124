"""Runs that are not what their configuration is: stalls, which happen again, and steps faster than
can be, which are slips.

On real clusters some configurations stall: a group that crosses nodes waits for every micro-batch
and the step takes two to fifty times as long. Those runs say nothing about the others; they say
where the slow regime is and what a micro-batch costs in it. Every run belongs to each regime with a
probability.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from hp_tool.loop.assumptions import assumed
from hp_tool.loop.calibration.evidence import FloatArray


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
    """How far ln(step) lies above what is expected, with the variance of that expectation, as
    regimes; `usual_share`: of runs that stall, elsewhere.
    """
    figures, slow_share = assumed().stalls, usual_share
    for _ in range(5):
        tail = np.exp(-np.abs(excess) / figures.mean_log_excess) / figures.mean_log_excess
        regular = (
            (1.0 - slow_share - figures.slip_share)
            * np.exp(-0.5 * excess**2 / variance)
            / np.sqrt(2 * np.pi * variance)
        )
        slow, slip = slow_share * tail * (excess > 0), 0.5 * figures.slip_share * tail
        total = regular + slow + slip + 1e-300
        slow_share = share(slow / total, usual_share=usual_share)
    more = usual_share * np.log(slow_share / usual_share)
    fewer = (1.0 - usual_share) * np.log((1.0 - slow_share) / (1.0 - usual_share))
    score = float(np.log(total).sum() + figures.share_runs * (more + fewer))
    odds = (slow + slip) / (regular + 1e-6 * total)
    return Judgement(slow=slow / total, regular=regular / total, doubt=variance * odds, score=score)


def share(slow: FloatArray, *, usual_share: float) -> float:
    """Return the share of slow runs; without runs it is the prior's."""
    worth = assumed().stalls.share_runs
    return float((worth * usual_share + slow.sum()) / (worth + len(slow)))


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
        """Return, each (m,), the probability of a stall, and the seconds that a micro-batch then
        loses.

        Each run counts by how near it is to the configuration asked for; far from all, the share of
        all does.
        """
        figures = assumed().stalls
        squares = (
            np.sum(points**2, axis=1)[:, None]
            + np.sum(self.points**2, axis=1)
            - 2.0 * points @ self.points.T
        )
        near = np.exp(-0.5 * np.maximum(squares, 0.0) / figures.distance**2)
        slow = near * self.slow
        probability = (figures.configuration_runs * self.share + slow.sum(axis=1)) / (
            figures.configuration_runs + near.sum(axis=1)
        )
        slow = slow + (
            1e-3 * self.slow + 1e-8
        )  # far from every slow run, all of them count the same
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
    stalled, figures = judged.slow > 0.5, assumed().stalls
    if usual_share <= figures.unseen_share and not stalled.any():
        return None
    lost_s = np.where(
        stalled, measured_s - expected_s, expected_s * np.expm1(figures.mean_log_excess)
    )
    return Stalls(
        points=points,
        slow=judged.slow,
        log_stall=np.log(np.maximum(lost_s, 1e-9) / micro_batches),
        share=share(judged.slow, usual_share=usual_share),
    )
