"""Regimes of runs: regular, stalled, and outliers.

On real clusters, some configurations stall: a group that spans nodes waits at every micro-batch,
and the step takes 2 to 50 times as long. Such runs reveal nothing about the speed of others. They
show which configurations stall and what a stall costs per micro-batch. Each run has a probability
for each regime. Outliers are steps that are faster than possible.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from hp_tool.loop.assumptions import assumed
from hp_tool.loop.calibration.evidence import FloatArray


@dataclass(frozen=True, slots=True, kw_only=True)
class Judgement:
    """Regime probabilities of n runs. Leading axes (...,) are explanations."""

    slow: FloatArray
    """(..., n) probability that the run stalled."""
    regular: FloatArray
    """(..., n) probability that the run neither stalled nor is an outlier."""
    doubt: FloatArray
    """(..., n) additional variance of a run, which lowers its weight the likelier it is not
    regular.
    """
    score: FloatArray
    """(...,) sum of the log densities of the stalled fraction, of each run's likeliest regime, and
    of the runs that are not regular.
    """


def classify_runs(excess: FloatArray, variance: FloatArray, *, usual_share: float) -> Judgement:
    """Classify runs by the excess of ln(step) over its expected value, and its variance.

    Both have the shape (..., n).

    `usual_share` is the typical fraction of stalls elsewhere.
    """
    figures, slow_share = assumed().stalls, np.asarray(usual_share)[..., None]
    for _ in range(5):
        tail = np.exp(-np.abs(excess) / figures.mean_log_excess) / figures.mean_log_excess
        regular = (
            (1.0 - slow_share - figures.slip_share)
            * np.exp(-0.5 * excess**2 / variance)
            / np.sqrt(2 * np.pi * variance)
        )
        slow, slip = slow_share * tail * (excess > 0), 0.5 * figures.slip_share * tail
        total = regular + slow + slip + 1e-300
        slow_share = share(slow / total, usual_share=usual_share)[..., None]
    more = usual_share * np.log(slow_share / usual_share)
    fewer = (1.0 - usual_share) * np.log((1.0 - slow_share) / (1.0 - usual_share))
    usual = np.log(1.0 - slow_share - figures.slip_share)
    each = np.where(regular > 0.5 * total, usual, np.log(slow + slip + 1e-300))
    score = each.sum(axis=-1) + figures.share_runs * (more + fewer)[..., 0]
    odds = (slow + slip) / (regular + 1e-6 * total)
    return Judgement(slow=slow / total, regular=regular / total, doubt=variance * odds, score=score)


def share(slow: FloatArray, *, usual_share: float) -> FloatArray:
    """Return the fraction of slow runs, shape (...,), from their probabilities, shape (..., n).

    Without runs, return the typical fraction `usual_share`.
    """
    worth = assumed().stalls.share_runs
    return np.asarray((worth * usual_share + slow.sum(axis=-1)) / (worth + slow.shape[-1]))


@dataclass(frozen=True, slots=True, kw_only=True)
class Stalls:
    """Stalled runs, and how much time they lost."""

    points: FloatArray
    """(n, k) features of all runs, in units of their length scales."""
    slow: FloatArray
    """(n,) probability that the run stalled."""
    log_stall: FloatArray
    """(n,) ln of the seconds lost per micro-batch, if the run stalled."""
    share: float

    def predict(self, points: FloatArray) -> tuple[FloatArray, FloatArray]:
        """Return the stall probability and the seconds lost per micro-batch, each of shape (m,).

        Runs are weighted by their distance to the configuration. Far from all runs, the fraction of
        stalls among all runs applies.
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
        )  # Far from every slow run, all runs have the same weight.
        return probability, np.exp(slow @ self.log_stall / slow.sum(axis=1))


def stalls(
    slow: FloatArray,
    points: FloatArray,
    *,
    expected_s: FloatArray,
    measured_s: FloatArray,
    micro_batches: FloatArray,
    usual_share: float,
) -> Stalls | None:
    """Fit stalls to the runs.

    Return None if probably no run stalled and none typically does.
    """
    stalled, figures = slow > 0.5, assumed().stalls
    if usual_share <= figures.unseen_share and not stalled.any():
        return None
    lost_s = np.where(
        stalled, measured_s - expected_s, expected_s * np.expm1(figures.mean_log_excess)
    )
    return Stalls(
        points=points,
        slow=slow,
        log_stall=np.log(np.maximum(lost_s, 1e-9) / micro_batches),
        share=float(share(slow, usual_share=usual_share)),
    )
