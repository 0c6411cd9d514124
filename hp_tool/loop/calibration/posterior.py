"""The posterior of a configuration given its calibrated prediction and its own runs, and ratios of
posteriors.
"""

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
    """Measured values of k runs, and the row of each; arrays of shape (k,)."""

    row: IntArray
    value: FloatArray
    """Seconds or bytes."""
    log_sd: FloatArray
    """Standard deviation of the logarithm of each run, from the variation of its steps or from
    extrapolation; 0 if unknown.
    """

    @cached_property
    def rows(self) -> IntArray:
        """Return the distinct rows that ran."""
        return np.unique(self.row)

    def mean(self, row: int, *, noise_log_sd: float) -> tuple[float, float]:
        """Return (mean, variance) of a row's ln(value) from its runs alone, weighted by 1 / u_i;
        see `combine_with_runs`.
        """
        own = self.row == row
        certainty = 1.0 / np.maximum(noise_log_sd, self.log_sd[own]) ** 2
        variance = 1.0 / float(certainty.sum())
        return variance * float(certainty @ np.log(self.value[own])), variance


def repeat_log_sd(runs: OwnRuns, *, kind: Kind) -> float:
    """Return the standard deviation s of ln(seconds) between runs of one configuration.

    s^2 = (w s0^2 + sum_i (y_i - mean of its row)^2) / (w + sum_rows (n - 1)): the repeats among the
    runs, and the stated s0 of the device's kind (`Repeats.step_log_sd`) with the weight w
    (`step_prior_runs`).
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
    """Return (median, log_sd) of n rows, each (n,), given their own runs.

    Rows without runs keep their prediction. The calibration gives ln t ~ N(m, v). A run i gives y_i
    ~ N(ln t, u_i) with u_i = max(s^2, e_i^2), where s is the noise of repeats (`noise_log_sd`) and
    e_i the run's own (`OwnRuns.log_sd`). Together ln t ~ N(M, V):

        1 / V = 1 / v' + sum_i 1 / u_i        M = V (m / v' + sum_i y_i / u_i)
        v' = max(v, (y - m)^2 - u)            y, u: mean and variance of the row's runs alone

    v' equals v, or is larger if the runs deviate more than v allows, so that a wrong prediction
    does not shift measured values. The calibration was also fitted to these runs, among many
    others; counting them twice has little effect if v contains the noise.
    """
    center, spread = np.log(median), log_sd.copy()
    for row in runs.rows:
        y, u = runs.mean(row, noise_log_sd=noise_log_sd)
        v = max(float(log_sd[row]) ** 2, (y - center[row]) ** 2 - u)
        variance = 1.0 / (1.0 / v + 1.0 / u)
        center[row], spread[row] = variance * (center[row] / v + y / u), np.sqrt(variance)
    return np.exp(center), spread


def step_posterior(prediction: StepPrediction, *, runs: OwnRuns, kind: Kind) -> StepPrediction:
    """Return the step times of n rows given the calibration and their own runs; a row that ran
    stays in its observed regime.
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
    """Return the memory needs of n rows given the calibration and the peaks of their own runs."""
    median, log_sd = combine_with_runs(
        prediction.median_bytes,
        prediction.log_sd,
        runs=runs,
        noise_log_sd=assumed().repeats.peak_log_sd,
    )
    return MemoryPrediction(median_bytes=median, log_sd=log_sd)


Estimates = tuple[FloatArray | float, FloatArray | float]
"""(median, log_sd) of one row or of n."""


def ratio_interval(
    one: Estimates, other: Estimates, *, quantile: float
) -> tuple[FloatArray, FloatArray, FloatArray]:
    """Return (one / other, low, high), each () or (n,).

    ln(one / other) ~ N(M_1 - M_2, V_1 + V_2); low and high are `quantile` standard deviations away.
    Errors that both share are assumed not to cancel, which only widens the interval; rows that ran
    share little.
    """
    factor = np.asarray(one[0]) / other[0]
    width = np.exp(quantile * np.hypot(one[1], other[1]))
    return factor, factor / width, factor * width
