"""Posterior estimates of a search's rows, from calibrated predictions and its own runs."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np

from hp_tool.cost.uncertainty import NORMAL_QUANTILE
from hp_tool.domain.measurement import Measurement
from hp_tool.domain.records import RunRecord
from hp_tool.loop.calibration import Calibration, MemoryPrediction, StepPrediction
from hp_tool.loop.calibration.evidence import BoolArray, FloatArray
from hp_tool.loop.calibration.posterior import (
    OwnRuns,
    memory_posterior,
    ratio,
    repeat_log_sd,
    step_posterior,
)
from hp_tool.loop.search.fidelity import standing
from hp_tool.loop.search.noise import spread_of
from hp_tool.loop.search.problem import Question
from hp_tool.questions.training.calibrated import KnownRow


@dataclass(frozen=True, kw_only=True)
class KnownRows:
    """One estimate of each of n rows, used to choose, compare and show them."""

    alone: StepPrediction
    """Prediction of the calibration only, in which a row's own runs are some of many."""
    step: StepPrediction
    memory: MemoryPrediction
    """Allocated memory."""
    fails: FloatArray
    """(n,) probability of running out of memory; 0 for rows that ran as a whole."""
    ran: BoolArray
    """(n,) whether a whole run of the row succeeded."""
    repeat_log_sd: float
    """Standard deviation of ln(seconds) between runs of one row."""

    def row(self, row: int) -> KnownRow:
        """Return the estimate of one row, with the interval of another run of it."""
        one = np.array([row])
        step = self.step.take(one)
        if self.ran[row]:
            step = replace(step, log_sd=np.hypot(step.log_sd, self.repeat_log_sd))
        return KnownRow(step=step, memory=self.memory.take(one), ran=bool(self.ran[row]))


def known_rows(
    *, search: Question, calibration: Calibration, runs: Sequence[RunRecord]
) -> KnownRows:
    """Return the rows of a training search after its runs."""
    table, kind = search.table, search.cluster.gpu.kind
    alone = table.predict_step(calibration)
    memory = memory_posterior(
        table.predict_memory(calibration), runs=own_runs(search, runs, shown=_peak)
    )
    whole = own_runs(search, runs, shown=lambda run: _step(run) if run.fidelity.is_whole else None)
    ran = np.isin(np.arange(len(table)), whole.rows)
    timed = own_runs(search, runs, shown=_step)
    return KnownRows(
        alone=alone,
        step=step_posterior(alone, runs=timed, kind=kind),
        memory=memory,
        fails=np.where(ran, 0.0, 1.0 - memory.fit_probability(table.device_bytes)),
        ran=ran,
        repeat_log_sd=repeat_log_sd(timed, kind=kind),
    )


def own_runs(
    search: Question,
    runs: Sequence[RunRecord],
    *,
    shown: Callable[[Measurement], tuple[float, float] | None],
) -> OwnRuns:
    """Return the measurements of successful runs by row: all whole runs of a configuration, else
    its relevant reduced one.

    Configurations whose last whole run failed are omitted. `shown` returns a run's value and the
    standard deviation of its logarithm; None if the run has none.
    """
    counting = {parallel: run for parallel, run in standing(runs).items() if run.status == "ok"}
    known: list[tuple[int, float, float]] = []
    for run in runs:
        counts, row = counting.get(run.parallel), search.row(run.parallel)
        if counts is None or row is None or run.measurement is None or run.status != "ok":
            continue
        if (counts is run or run.fidelity.is_whole) and (
            figure := shown(run.measurement)
        ) is not None:
            known.append((row, *figure))
    rows, values, log_sds = zip(*known, strict=True) if known else ((), (), ())
    return OwnRuns(
        row=np.array(rows, dtype=np.intp),
        value=np.array(values, dtype=np.float64),
        log_sd=np.array(log_sds, dtype=np.float64),
    )


def as_good(rows: Sequence[int], *, step: StepPrediction) -> int:
    """Return how many of the following rows are tied with the first: the 90% interval of the ratio
    contains 1.
    """
    first, *others = rows
    _, low, high = ratio(
        (step.median_s[others], step.log_sd[others]),
        (step.median_s[first], step.log_sd[first]),
        quantile=NORMAL_QUANTILE,
    )
    return int(np.count_nonzero((low <= 1.0) & (high >= 1.0)))


def _step(measurement: Measurement) -> tuple[float, float] | None:
    """Return seconds of the whole configuration's step; reduced runs include the extrapolation
    error.
    """
    if measurement.objective_s is None:
        return None
    if measurement.extrapolated_step_s_interval is None:
        return measurement.objective_s, spread_of(measurement)
    low, high = measurement.extrapolated_step_s_interval
    return measurement.objective_s, math.log(high / low) / (2.0 * NORMAL_QUANTILE)


def _peak(measurement: Measurement) -> tuple[float, float] | None:
    """Return bytes of a whole run; a reduced one needs another amount of memory."""
    peak = measurement.peak_memory_bytes
    return (float(peak), 0.0) if peak and measurement.fidelity.is_whole else None
