"""Expected gain from the best sequence of further runs.

Each run is chosen given the earlier ones.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from hp_tool.loop.calibration.evidence import BoolArray, FloatArray
from hp_tool.loop.calibration.prediction import JointSteps
from hp_tool.loop.search.improvement import expected_improvement

FURTHER_RUNS = 4
"""Length of the longest sequence."""
DRAWS = 16
"""Number of simulated sequences. Only their choices are random, because each sequence sums the
expected gains of its choices.
"""
ROWS = 16
"""Maximum number of rows from which sequences choose, and maximum number of rows that ran."""


def further_gains(
    steps: JointSteps, *, measured_s: FloatArray, holds: FloatArray, rng: np.random.Generator
) -> tuple[tuple[float, ...], FloatArray]:
    """Return the expected gains of sequences of 1 to FURTHER_RUNS runs, and of one run of each row.

    Gains are fractions of the best step time so far; those of single runs have the shape (m,).

    A run of row i moves the expected ln(step) of row i with the standard deviation s_i = c_ii /
    sqrt(c_ii + n_i), where c_ii is the variance shared by all runs of row i and n_i that of a
    single run (Frazier, Powell and Dayanik 2009, the knowledge gradient). Its gain is E[max(1 -
    exp(M_i) / best, 0)] with M_i ~ N(m_i, s_i^2), times the probability that the run holds.

    Each sequence takes the row with the largest gain, draws its measurement, updates all m and c
    and the weights of the explanations, and repeats (Lam, Willcox and Wolpert 2016, rollout). A run
    that distinguishes explanations is therefore credited with the gains that it enables later.

    Without repeats, it is unknown whether the variance n_i is between configurations or between
    runs. Each gets half of the weight.

    Args:
        steps: Joint distribution of m rows.
        measured_s: (m,) step time in seconds of the rows that ran (at least one), NaN for the
            others.
        holds: (m,) probabilities that a run fits, works and does not stall.
        rng: Draws the measurements.
    """
    start = _State.of(steps, measured_s)
    first = start.gains(holds)
    gains = np.zeros((DRAWS, FURTHER_RUNS))
    for draw in gains:
        state, each = start, first
        for number in range(FURTHER_RUNS):
            if number:
                each = state.gains(holds)
            row = int(np.argmax(each))
            if each[row] <= 0.0:
                break
            draw[number] = each[row] * np.exp(state.best - start.best)
            if number + 1 < FURTHER_RUNS:
                state = state.after(row, rng=rng)
    return tuple(np.cumsum(gains.mean(axis=0)).tolist()), first


@dataclass(frozen=True, slots=True, kw_only=True)
class _State:
    """Joint distribution of m rows under K explanations, after actual and simulated runs."""

    weight: FloatArray
    mean: FloatArray
    covariance: FloatArray
    noise: FloatArray
    ran: BoolArray

    @staticmethod
    def of(steps: JointSteps, measured_s: FloatArray) -> _State:
        """Return the initial state.

        Half of its explanations attribute the noise to configurations, so a measured row is known
        exactly. The other half attribute it to single runs.
        """
        ran = np.isfinite(measured_s)
        known = np.log(np.where(ran, measured_s, 1.0))
        own = steps.covariance + steps.noise[:, None] * np.eye(len(ran))
        return _State(
            weight=np.tile(0.5 * steps.weight, 2),
            mean=np.concatenate([np.where(ran, known, steps.mean), steps.mean]),
            covariance=np.concatenate([np.where(ran | ran[:, None], 0.0, own), steps.covariance]),
            noise=np.concatenate([np.zeros_like(steps.noise), steps.noise]),
            ran=ran,
        )

    @property
    def best(self) -> float:
        """Return the lowest expected ln(step) among the rows that ran."""
        return float((self.weight @ self.mean)[self.ran].min())

    def gains(self, holds: FloatArray) -> FloatArray:
        """Return the expected gains of one run as fractions of the best step, (m,); 0 if it ran."""
        variance = np.einsum("kii->ki", self.covariance)
        moves = variance / np.sqrt(np.maximum(variance + self.noise, np.finfo(float).tiny))
        won = expected_improvement(
            median_s=np.exp(self.mean - self.best), log_sd=np.maximum(moves, 1e-9), best_s=1.0
        )
        return np.asarray(np.where(self.ran, 0.0, holds * (self.weight @ won)))

    def after(self, row: int, *, rng: np.random.Generator) -> _State:
        """Return the state after a run of `row`, whose result is drawn from one explanation."""
        mean = self.mean[:, row]
        variance = self.covariance[:, row, row] + self.noise[:, row]
        true = rng.choice(len(self.weight), p=self.weight)
        off = rng.normal(mean[true], np.sqrt(variance[true])) - mean
        pull = self.covariance[:, row] / np.maximum(variance, np.finfo(float).tiny)[:, None]
        score = -0.5 * (off**2 / variance + np.log(variance))
        weight = self.weight * np.exp(score - score[true])
        return replace(
            self,
            weight=weight / weight.sum(),
            mean=self.mean + pull * off[:, None],
            covariance=self.covariance - pull[:, :, None] * self.covariance[:, row, None],
            ran=self.ran | (np.arange(len(self.ran)) == row),
        )
