"""Posterior of a configuration given its calibrated prediction and its own runs, and ratios."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np

from hp_tool.domain.hardware import Kind
from hp_tool.loop.assumptions import assumed
from hp_tool.loop.calibration.evidence import FloatArray, IntArray
from hp_tool.loop.calibration.memory import MemoryPrediction
from hp_tool.loop.calibration.prediction import StepPrediction


@dataclass(frozen=True, kw_only=True)
class OwnRuns:
    """Values measured in k runs, and the row of each run; arrays of shape (k,)."""

    row: IntArray
    value: FloatArray
    """Seconds or bytes."""
    log_sd: FloatArray
    """Standard deviation of each run's ln(value), from the variation of its steps or from
    extrapolation; 0 if unknown.
    """

    @cached_property
    def rows(self) -> IntArray:
        """Return the distinct rows with runs."""
        return np.unique(self.row)

    def mean(self, row: int, *, noise_log_sd: float) -> tuple[float, float]:
        """Return the mean and variance of a row's ln(value) from its runs alone.

        Runs are weighted by 1 / u_i; see `combine_with_runs`.
        """
        own = self.row == row
        certainty = 1.0 / np.maximum(noise_log_sd, self.log_sd[own]) ** 2
        variance = 1.0 / float(certainty.sum())
        return variance * float(certainty @ np.log(self.value[own])), variance


def repeat_log_sd(runs: OwnRuns, *, kind: Kind) -> float:
    """Return s, the standard deviation of ln(seconds) between runs of one configuration.

    s^2 = (w s0^2 + sum_i (y_i - mean of its row)^2) / (w + sum_rows (n - 1)). This combines the
    repeats among the runs with s0, the stated deviation for the kind of device
    (`Repeats.step_log_sd`), which has the weight w (`step_prior_runs`).
    """
    logs, scatter, freedom = np.log(runs.value), 0.0, 0
    for row in runs.rows:
        own = logs[runs.row == row]
        scatter += float(((own - own.mean()) ** 2).sum())
        freedom += len(own) - 1
    stated, worth = assumed().repeats.step_log_sd[kind], assumed().repeats.step_prior_runs
    return float(np.sqrt((worth * stated**2 + scatter) / (worth + freedom)))


def combine_with_runs(
    median: FloatArray, log_sd: FloatArray, *, runs: OwnRuns, noise_log_sd: float
) -> tuple[FloatArray, FloatArray]:
    """Return the median and log_sd of n rows given their own runs, each of shape (n,).

    Rows without runs keep their prediction. The calibration gives ln t ~ N(m, v). Run i gives y_i ~
    N(ln t, u_i) with u_i = max(s^2, e_i^2), where s is the noise between repeats (`noise_log_sd`)
    and e_i the run's own deviation (`OwnRuns.log_sd`). Together, ln t ~ N(M, V):

        1 / V = 1 / v' + sum_i 1 / u_i        M = V (m / v' + sum_i y_i / u_i)
        v' = max(v, (y - m)^2 - u)            y, u: mean and variance of the row's runs alone

    v' exceeds v only if the runs deviate more than v allows, so that a wrong prediction does not
    shift measured values. The calibration was fitted to these runs as well, among many others.
    Counting them twice has little effect if v contains the noise.
    """
    center, spread = np.log(median), log_sd.copy()
    for row in runs.rows:
        y, u = runs.mean(row, noise_log_sd=noise_log_sd)
        v = max(float(log_sd[row]) ** 2, (y - center[row]) ** 2 - u)
        variance = 1.0 / (1.0 / v + 1.0 / u)
        center[row], spread[row] = variance * (center[row] / v + y / u), np.sqrt(variance)
    return np.exp(center), spread


def step_posterior(prediction: StepPrediction, *, runs: OwnRuns, kind: Kind) -> StepPrediction:
    """Return the step times of n rows given the calibration and their own runs.

    A row that ran stays in its observed regime.
    """
    median_s, log_sd = combine_with_runs(
        prediction.median_s,
        prediction.log_sd,
        runs=runs,
        noise_log_sd=repeat_log_sd(runs, kind=kind),
    )
    ran = np.isin(np.arange(len(median_s)), runs.rows)
    slow = prediction.slow and replace(
        prediction.slow, probability=np.where(ran, 0.0, prediction.slow.probability)
    )
    return replace(
        prediction,
        regular_s=np.where(ran, median_s, prediction.regular_s),
        log_sd=log_sd,
        slow=slow,
    )


def memory_posterior(prediction: MemoryPrediction, *, runs: OwnRuns) -> MemoryPrediction:
    """Return the memory needs of n rows given the calibration and the peaks of their runs."""
    median, log_sd = combine_with_runs(
        prediction.median_bytes,
        prediction.log_sd,
        runs=runs,
        noise_log_sd=assumed().repeats.peak_log_sd,
    )
    return MemoryPrediction(median_bytes=median, log_sd=log_sd)


Estimates = tuple[FloatArray | float, FloatArray | float]
"""(median, log_sd) of one row or of n rows."""


def ratio_interval(
    one: Estimates, other: Estimates, *, quantile: float
) -> tuple[FloatArray, FloatArray, FloatArray]:
    """Return the ratio one / other and its bounds (low, high), each of shape () or (n,).

    ln(one / other) ~ N(M_1 - M_2, V_1 + V_2); low and high are `quantile` standard deviations away.
    Shared errors are assumed not to cancel, which only widens the interval. Rows that ran share
    little error.
    """
    factor = np.asarray(one[0]) / other[0]
    width = np.exp(quantile * np.hypot(one[1], other[1]))
    return factor, factor / width, factor * width
