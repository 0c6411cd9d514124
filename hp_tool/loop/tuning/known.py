"""What a search knows of its rows: calibrated predictions and its own runs as one estimate of
each.
"""

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
    """One estimate of each of n rows, by which they are chosen, compared and shown."""

    alone: StepPrediction
    """The calibration's, which takes a row's own runs for some of many."""
    step: StepPrediction
    memory: MemoryPrediction
    """Of what is allocated."""
    fails: FloatArray
    """(n,) chance of running out of memory; 0 of what ran as a whole."""
    ran: BoolArray
    """(n,) whether a whole run of it worked."""
    repeat_log_sd: float
    """Standard deviation of ln(seconds) between runs of one row."""

    def row(self, row: int) -> KnownRow:
        """The estimate of one row; its interval is that of another run, which the calibration's of
        what did not run is too.
        """
        one = np.array([row])
        step = self.step.take(one)
        if self.ran[row]:
            step = replace(step, log_sd=np.hypot(step.log_sd, self.repeat_log_sd))
        return KnownRow(step=step, memory=self.memory.take(one), ran=bool(self.ran[row]))


def known_rows(
    *, search: Question, calibration: Calibration, runs: Sequence[RunRecord]
) -> KnownRows:
    """The rows of a training search after its runs."""
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
    """What runs that worked measured of the search's rows: all whole ones of a configuration, else
    the reduced one that counts.

    A configuration whose last whole run failed is left out. `shown`: a run's figure and the
    standard deviation of its logarithm; None where the run does not show it.
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
    """How many rows after the first cannot be told apart from it: the 90 % interval of the ratio of
    their times holds 1.
    """
    first, *others = rows
    _, low, high = ratio(
        (step.median_s[others], step.log_sd[others]),
        (step.median_s[first], step.log_sd[first]),
        quantile=NORMAL_QUANTILE,
    )
    return int(np.count_nonzero((low <= 1.0) & (high >= 1.0)))


def _step(measurement: Measurement) -> tuple[float, float] | None:
    """Seconds of the whole configuration's step: of a reduced run as far as its extrapolation may
    be off.
    """
    if measurement.objective_s is None:
        return None
    if measurement.extrapolated_step_s_interval is None:
        return measurement.objective_s, spread_of(measurement)
    low, high = measurement.extrapolated_step_s_interval
    return measurement.objective_s, math.log(high / low) / (2.0 * NORMAL_QUANTILE)


def _peak(measurement: Measurement) -> tuple[float, float] | None:
    """Bytes of a whole run; a reduced one needs another amount of memory."""
    peak = measurement.peak_memory_bytes
    return (float(peak), 0.0) if peak and measurement.fidelity.is_whole else None
