"""Noise of measured step times, within a run and between repeated runs."""

import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from hp_tool.cost.uncertainty import NORMAL_QUANTILE
from hp_tool.domain.hardware import Kind
from hp_tool.domain.measurement import Measurement
from hp_tool.domain.records import RunRecord
from hp_tool.domain.serving import RunConfig
from hp_tool.loop.assumptions import assumed
from hp_tool.loop.calibration.posterior import OwnRuns, ratio_interval, repeat_log_sd

_MEDIAN_EFFICIENCY = math.sqrt(math.pi / 2)
"""Standard error of a median relative to that of a mean, for normal noise."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MeasuredSteps:
    """Measured step times of complete configurations, with their noise."""

    known: Mapping[RunConfig, tuple[float, float]]
    """(seconds, log_sd) of each configuration: the mean of its runs, weighted as in
    `posterior.combine_with_runs`.
    """
    repeat_log_sd: float
    """Standard deviation of ln(seconds) between runs of a configuration; see
    `calibration.posterior`.
    """
    num_repeats: int
    """Number of runs that repeat an earlier configuration. If 0, the noise is assumed."""

    def ratio(self, one: RunConfig, other: RunConfig) -> tuple[float, float, float]:
        """Return the ratio of two step times and its 90% interval: (ratio, low, high)."""
        factor, low, high = ratio_interval(
            self.known[one], self.known[other], quantile=NORMAL_QUANTILE
        )
        return float(factor), float(low), float(high)


def measured_steps(
    runs: Sequence[RunRecord],
    *,
    kind: Kind,
    seconds: Callable[[Measurement], float | None] = lambda run: run.objective_s,
) -> MeasuredSteps:
    """Return the measurements of successful complete runs.

    ln(seconds) of run i has the variance u_i = max(s^2, e_i^2), where s is the noise between
    repeats and e_i that of the run's own steps. `seconds` returns the value of a run that is
    compared.
    """
    worked = [
        (run, figure)
        for run in runs
        if run.measurement is not None
        and run.status == "ok"
        and run.fidelity.is_whole
        and (figure := seconds(run.measurement))
    ]
    configs = list(dict.fromkeys(run.parallel for run, _ in worked))
    repeated = OwnRuns(
        row=np.array([configs.index(run.parallel) for run, _ in worked], dtype=np.intp),
        value=np.array([figure for _, figure in worked], dtype=np.float64),
        log_sd=np.array(
            [spread_of(run.measurement) if run.measurement else 0.0 for run, _ in worked],
            dtype=np.float64,
        ),
    )
    noise = repeat_log_sd(repeated, kind=kind)
    known = {}
    for place, config in enumerate(configs):
        log_s, variance = repeated.mean(place, noise_log_sd=noise)
        known[config] = math.exp(log_s), math.sqrt(variance)
    return MeasuredSteps(known=known, repeat_log_sd=noise, num_repeats=len(worked) - len(configs))


def standard_error_s(measurement: Measurement) -> float:
    """Return the standard error of a run's median step time, in seconds.

    It is computed from the variation of the run's steps or, for a single step, from the typical
    variation. It is 0 without steps.
    """
    times = measurement.repetitions_s
    if len(times) < 2:
        return assumed().search.single_step_sd * sum(times)
    return _MEDIAN_EFFICIENCY * statistics.stdev(times) / math.sqrt(len(times))


def spread_of(measurement: Measurement) -> float:
    """Return the standard deviation of the ln of a run's median, from its steps or repetitions.

    It is 0 if there are none.
    """
    times = measurement.repetitions_s
    return standard_error_s(measurement) / (sum(times) / len(times)) if times else 0.0
