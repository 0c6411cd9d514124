"""One log-normal of each configuration from its calibrated prediction and its own runs, and the
ratio of two of those.
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
    """What k runs measured of rows of a table; arrays of shape (k,)."""

    row: IntArray
    value: FloatArray
    """Seconds or bytes."""
    log_sd: FloatArray
    """Of each run's own logarithm, as its steps scattered or its extrapolation doubts; 0 where
    nothing says.
    """

    @cached_property
    def rows(self) -> IntArray:
        """The rows that ran, each once."""
        return np.unique(self.row)

    def mean(self, row: int, *, noise_log_sd: float) -> tuple[float, float]:
        """(mean, variance) of ln(value) of a row by its runs alone, weighted by their certainty 1 /
        u_i; see `combined`.
        """
        own = self.row == row
        certainty = 1.0 / np.maximum(noise_log_sd, self.log_sd[own]) ** 2
        variance = 1.0 / float(certainty.sum())
        return variance * float(certainty @ np.log(self.value[own])), variance


def repeat_log_sd(runs: OwnRuns, *, kind: Kind) -> float:
    """Standard deviation s of ln(seconds) between runs of one configuration.

    s^2 = (w s0^2 + sum_i (y_i - mean of its row)^2) / (w + sum_rows (n - 1)): the repeats among the
    runs, beside the stated s0 of the device's kind (`Repeats.step_log_sd`), which is worth w of
    them (`step_prior_runs`).
    """
    logs, scatter, freedom = np.log(runs.value), 0.0, 0
    for row in runs.rows:
        own = logs[runs.row == row]
        scatter += float(((own - own.mean()) ** 2).sum())
        freedom += len(own) - 1
    stated, worth = assumed().repeats.step_log_sd[kind], assumed().repeats.step_prior_runs
    return float(np.sqrt((worth * stated**2 + scatter) / (worth + freedom)))


def combined(
    median: FloatArray, log_sd: FloatArray, *, runs: OwnRuns, noise_log_sd: float
) -> tuple[FloatArray, FloatArray]:
    """(median, log_sd) of n rows, each (n,), after their own runs; rows without runs stay as
    predicted.

    The calibration says ln t ~ N(m, v), a run i says y_i ~ N(ln t, u_i) with u_i = max(s^2, e_i^2):
    s is the noise of repeats (`noise_log_sd`), e_i the run's own (`OwnRuns.log_sd`). Together ln t
    ~ N(M, V):

        1 / V = 1 / v' + sum_i 1 / u_i        M = V (m / v' + sum_i y_i / u_i)
        v' = max(v, (y - m)^2 - u)            y, u: mean and variance of the row's runs alone

    v' is v, or what the runs show where they lie outside: a prediction that is far off does not
    pull on what was measured. The calibration has seen these runs too, as some of many; that they
    count twice hardly matters where v holds the noise.
    """
    center, spread = np.log(median), log_sd.copy()
    for row in runs.rows:
        y, u = runs.mean(row, noise_log_sd=noise_log_sd)
        v = max(float(log_sd[row]) ** 2, (y - center[row]) ** 2 - u)
        variance = 1.0 / (1.0 / v + 1.0 / u)
        center[row], spread[row] = variance * (center[row] / v + y / u), np.sqrt(variance)
    return np.exp(center), spread


def step_posterior(prediction: StepPrediction, *, runs: OwnRuns, kind: Kind) -> StepPrediction:
    """Step times of n rows by calibration and own runs. A row that ran is in the regime in which it
    was seen.
    """
    median_s, log_sd = combined(
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
    """Memory needs of n rows by calibration and the peaks of their own runs."""
    median, log_sd = combined(
        prediction.median_bytes,
        prediction.log_sd,
        runs=runs,
        noise_log_sd=assumed().repeats.peak_log_sd,
    )
    return MemoryPrediction(median_bytes=median, log_sd=log_sd)


Estimates = tuple[FloatArray | float, FloatArray | float]
"""(median, log_sd) of one row or of n."""


def ratio(
    one: Estimates, other: Estimates, *, quantile: float
) -> tuple[FloatArray, FloatArray, FloatArray]:
    """(one / other, low, high), each () or (n,).

    ln(one / other) ~ N(M_1 - M_2, V_1 + V_2); low and high lie `quantile` of its standard
    deviations away. What both share is not taken to cancel, which only widens the interval: rows
    that ran share little.
    """
    factor = np.asarray(one[0]) / other[0]
    width = np.exp(quantile * np.hypot(one[1], other[1]))
    return factor, factor / width, factor * width
