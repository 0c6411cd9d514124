"""Fit the time that nanotron adds to isolated kernels: `python -m evidence.fit --only
nanotron`.

Writes hp_tool/catalog/data/efficiency/frameworks/nanotron/*.yaml: thirteen time constants and three
memory constants, fitted to the published grid of runs on 1 to 64 nodes of 8 H100. The fit is
robust, because some runs were many times slower than similar ones. Priors limit all constants to
physical values. `fit(rows=...)` fits a subset of the rows. The report shows which configurations
fail, how fast the rest are, and their order within a cell. It compares the shipped constants with
constants fitted without the row's model or its number of nodes.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
from numpy.typing import NDArray
from scipy.special import ndtr
from scipy.stats import spearmanr

from benchmarks.accuracy.comparison import Comparison
from benchmarks.accuracy.data import Row
from benchmarks.accuracy.fitting import (
    Fit,
    Floats,
    Prior,
    fit_settings,
    fixed_constants,
    framework_file,
    priors,
    with_constants,
)
from benchmarks.accuracy.grid_rows import GPU, Group, grid_rows, groups
from evidence.fitted_file import FittedFile
from hp_tool.catalog import gpu
from hp_tool.catalog.efficiency import efficiency_profile
from hp_tool.cost.memory import NEARLY_FULL
from hp_tool.cost.uncertainty import ALLOCATABLE_FRACTION, NORMAL_QUANTILE
from hp_tool.domain.efficiency import FrameworkEfficiency
from hp_tool.domain.units import GIB

COMMAND = "python -m evidence.fit --only nanotron"

NOISE = fit_settings("nanotron")["noise"]
RETRY_BYTES_PER_SECOND = 2.0**21 / 1e-4
"""Prior of the rate at which the allocator maps memory again: about 100 us for a page of 2 MiB. The
CUDA calls that map a page, make it accessible and unmap it took 63 us on an A100, without the
page's creation (github.com/magnate3/linux-riscv-dev, nccl/gpu/shm/bench_vmm).
"""
FIXED = fixed_constants("nanotron")
"""Constants that the runs do not determine."""


def fit(*, rows: Sequence[Row], clocks_known: bool = False) -> FrameworkEfficiency:
    """Return the constants fitted to these rows of the grid. Rows that failed, and rows whose sizes
    contradict each other, are ignored.

    `clocks_known`: matmuls run at the shipped clocks.
    """
    ran = [row for row in rows if row["status"] == "ok"]
    grouped = groups(ran)
    free = priors("nanotron")
    if clocks_known:
        del free["matmul_slowdown"]
    start = dataclasses.replace(FIXED, matmul_slowdown=1.0) if clocks_known else FIXED
    timed = _fitted(start, free, grouped, measured="step_s", predicted="step_s")
    timed = dataclasses.replace(timed, retry_bytes_per_second=_retry_rate(grouped, timed))
    constants = _fitted(
        timed,
        priors("nanotron", "priors_memory"),
        grouped,
        measured="used_bytes",
        predicted="first_stage_bytes",
    )
    models = " and ".join(sorted({row["model"] for row in ran}))
    return dataclasses.replace(
        constants,
        fitted_on=f"{sum(len(group.rows) for group in grouped)} runs of nanotron ({models}) on 1 "
        "to 64 nodes of 8 H100 by "
        f"{COMMAND}; see FIXED there for what they do not tell",
    )


def _retry_rate(grouped: Sequence[Group], timed: FrameworkEfficiency) -> float:
    """Return the geometric mean of the rates (bytes per second) at which pipelines that used at
    least NEARLY_FULL of their device would have allocated their activations again in the time that
    they lost. The prior counts as one of these rates.
    """
    logs = [math.log(RETRY_BYTES_PER_SECOND)]
    retrying = dataclasses.replace(timed, retry_bytes_per_second=RETRY_BYTES_PER_SECOND)
    for group in grouped:
        step_s = np.asarray(group.predict(timed).step_s)
        full = group.used_bytes >= NEARLY_FULL * group.cluster.gpu.memory_bytes
        slow = full & (group.candidates.pipeline_parallel_size > 1) & (group.step_s > step_s)
        kept = (
            (np.asarray(group.predict(retrying).retry_slowdown) - 1.0)
            * RETRY_BYTES_PER_SECOND
            * step_s
        )
        logs += list(np.log(kept[slow] / (group.step_s - step_s)[slow]))
    return float(f"{math.exp(np.mean(logs)):.4g}")


def _fitted(
    start: FrameworkEfficiency,
    free: Mapping[str, Prior],
    grouped: Sequence[Group],
    *,
    measured: str,
    predicted: str,
) -> FrameworkEfficiency:
    """Return the maximum a posteriori constants with Cauchy-like tails: a run that is ten times
    slower than predicted has no more weight than one that is twice as slow. The robust loss applies
    to the runs only; the priors stay quadratic.
    """

    def errors(grouped: Sequence[Group]) -> Callable[[FrameworkEfficiency], Floats]:
        logs = np.log(np.concatenate([getattr(group, measured) for group in grouped]))

        def of(trial: FrameworkEfficiency) -> Floats:
            values = np.concatenate([getattr(group.predict(trial), predicted) for group in grouped])
            return np.asarray(np.sqrt(np.log1p(((np.log(values) - logs) / NOISE) ** 2)))

        return of

    fit = Fit[Group, FrameworkEfficiency](
        priors=free,
        constants=functools.partial(with_constants, start),
        errors=errors,
        near=0.1,
        options={"diff_step": 1e-2, "xtol": 1e-4, "ftol": 1e-4},
    )
    return fit(grouped)


def fitted(folder: Path) -> Iterator[FittedFile]:
    """Yield nanotron's profile. Forward matmuls, input gradients and weight gradients take equally
    long. Only weight gradients accumulate in fp32, so they get the slowdown of all three.
    """
    constants = fit(rows=grid_rows(folder), clocks_known=False)
    slowdown = (2.0 + FIXED.fp32_accumulation["h100"]) * constants.matmul_slowdown - 2.0
    added = {"h100": float(f"{slowdown:.4g}")}
    yield framework_file(
        "default", dataclasses.replace(constants, matmul_slowdown=1.0, fp32_accumulation=added)
    )


MIN_CELL = 20
"""Minimum number of rows of a cell for a meaningful rank correlation."""

Bools = NDArray[np.bool_]


@dataclass(frozen=True, kw_only=True)
class Cell:
    """Predictions and measurements of one group; arrays over its rows."""

    group: Group
    ran: Bools
    legal: Bools
    fits: Bools
    """Whether the row fits in memory with the headroom free, as predicted."""
    fit_probability: Floats
    time_ratio: Floats
    """Predicted / measured throughput - 1 of the rows that ran."""
    memory_ratio: Floats
    """Predicted / measured bytes - 1 of the rows that ran."""
    rank_correlation: float | None
    constants: FrameworkEfficiency

    @property
    def time_within(self) -> Bools:
        """Return which of the rows that ran have a step time inside the predicted 90% interval."""
        within: Bools = (
            np.abs(np.log1p(self.time_ratio)) <= NORMAL_QUANTILE * self.constants.time_log_sd
        )
        return within

    @property
    def memory_within(self) -> Bools:
        """Return which rows have a measured memory inside the predicted interval."""
        within: Bools = (
            np.abs(np.log1p(self.memory_ratio)) <= NORMAL_QUANTILE * self.constants.memory_log_sd
        )
        return within


def predict_cell(group: Group, constants: FrameworkEfficiency) -> Cell:
    """Return one group's predictions with these constants."""
    costs = group.predict(constants)
    ran, legal, step_s = group.ran, group.legal, np.asarray(costs.step_s)
    allocatable = ALLOCATABLE_FRACTION * group.cluster.gpu.memory_bytes
    room = np.log(allocatable / costs.memory_total_bytes)
    rank = (
        float(spearmanr(-step_s[ran], -group.step_s[ran]).statistic)
        if ran.sum() >= MIN_CELL
        else None
    )
    return Cell(
        group=group,
        ran=ran,
        legal=legal,
        fits=np.asarray(costs.feasible),
        fit_probability=np.where(legal, ndtr(room / constants.memory_log_sd), 0.0),
        time_ratio=group.step_s[ran] / step_s[ran] - 1.0,
        memory_ratio=np.asarray(costs.first_stage_bytes)[ran] / group.used_bytes[ran] - 1.0,
        rank_correlation=rank,
        constants=constants,
    )


def compare_step_times(cells: Iterable[Cell]) -> list[Comparison]:
    """Return the step times of all runs that did not fail."""
    return [
        row
        for cell in cells
        for row in _rows(cell, cell.group.step_s, cell.time_ratio, cell.constants.time_log_sd)
    ]


def compare_memory(cells: Iterable[Cell]) -> list[Comparison]:
    """Return the GiB of the first stages of all runs that did not fail."""
    rows = []
    for cell in cells:
        used = cell.group.used_bytes / GIB
        rows += _rows(
            cell, used, 1.0 / (1.0 + cell.memory_ratio) - 1.0, cell.constants.memory_log_sd
        )
    return rows


def _rows(cell: Cell, published: Floats, over: Floats, log_sd: float) -> list[Comparison]:
    """`over`: published over predicted, minus one, of the rows that ran."""
    spread = float(np.exp(NORMAL_QUANTILE * log_sd))
    comparisons = []
    fine = (cell.legal & cell.fits)[cell.ran]
    for row, value, ratio, fits in zip(
        np.array(cell.group.rows)[cell.ran], published[cell.ran], over, fine, strict=True
    ):
        predicted = float(value / (1.0 + ratio))
        comparisons.append(
            Comparison(
                source="nanotron's grid",
                model=row["model"],
                gpu=GPU,
                part=f"{row['nodes']} x 8 H100",
                what=", ".join(
                    f"{name} {row[name]}"
                    for name in ("nodes", "variant", "dp", "tp", "pp", "mbs", "zero", "gbs")
                ),
                published=float(value),
                predicted=predicted,
                low=predicted / spread,
                high=predicted * spread,
                refused=None if fits else "memory or rules",
            )
        )
    return comparisons


def leave_out_models(rows: list[Row]) -> list[Cell]:
    """Return every group, predicted by constants fitted to the other models."""
    models = sorted({row["model"] for row in rows})
    constants = {name: fit(rows=[row for row in rows if row["model"] != name]) for name in models}
    return [predict_cell(group, constants[group.model.name]) for group in groups(rows)]


def leave_out_nodes(rows: list[Row]) -> list[Cell]:
    """Return every group, predicted by constants fitted to other numbers of nodes. Each of two
    folds has every second number.
    """
    sizes = sorted({row["nodes"] for row in rows}, key=int)
    cells = []
    for fold in (sizes[::2], sizes[1::2]):
        constants = fit(rows=[row for row in rows if row["nodes"] not in fold])
        cells += [
            predict_cell(group, constants)
            for group in groups(row for row in rows if row["nodes"] in fold)
        ]
    return cells


def summary(cells: list[Cell]) -> dict[str, Any]:
    """Return counts and fractions over all cells."""
    ran, legal, fits, probability = (
        np.concatenate([getattr(cell, name) for cell in cells])
        for name in ("ran", "legal", "fits", "fit_probability")
    )
    time, memory, time_within, memory_within = (
        np.concatenate([getattr(cell, name) for cell in cells])
        for name in ("time_ratio", "memory_ratio", "time_within", "memory_within")
    )
    called = legal & fits
    ranked = [cell.rank_correlation for cell in cells if cell.rank_correlation is not None]
    return {
        "ran": int(ran.sum()),
        "ran_but_refused": int((ran & ~called).sum()),
        "ran_but_refused_share": float((~called)[ran].mean()),
        "failed": int((~ran).sum()),
        "failed_called_infeasible_share": float((~called)[~ran].mean()),
        "failed_called_illegal_share": float((~legal)[~ran].mean()),
        "fit_brier": float(((probability - ran) ** 2).mean()),
        "throughput_median_error": float(np.median(np.abs(time))),
        "throughput_bias": float(np.expm1(np.median(np.log1p(time)))),
        "throughput_within_2x_share": float((np.abs(np.log1p(time)) < np.log(2.0)).mean()),
        "throughput_within_interval_share": float(time_within.mean()),
        "memory_median_error": float(np.median(np.abs(memory))),
        "memory_within_interval_share": float(memory_within.mean()),
        "memory_bias": float(np.median(memory)),
        "rank_correlation_median": median(ranked) if ranked else None,
    }


@functools.cache
def cells(folder: Path) -> dict[str, list[Cell]]:
    """Return the predictions of every group by the shipped constants, by constants fitted without
    its model, and by constants fitted without its number of nodes.
    """
    rows = grid_rows(folder)
    shipped = efficiency_profile(gpu=gpu(GPU), framework="nanotron").framework
    return {
        "shipped": [predict_cell(group, shipped) for group in groups(rows)],
        "model_left_out": leave_out_models(rows),
        "nodes_left_out": leave_out_nodes(rows),
    }


def evaluate(folder: Path) -> dict[str, Any] | None:
    """Return the errors of the shipped constants and of constants fitted without one model or one
    number of nodes; None if the grid is not in the folder.
    """
    rows = grid_rows(folder)
    if not rows:
        return None
    by = cells(folder)
    kept = sum(len(cell.group.rows) for cell in by["shipped"])
    return {
        "rows": len(rows),
        "dropped": len(rows) - kept,
        **{name: summary(cells) for name, cells in by.items()},
        "cells": [_cell(cell) for cell in by["model_left_out"]],
    }


def _cell(cell: Cell) -> dict[str, Any]:
    return {
        "model": cell.group.model.name,
        "num_key_value_heads": cell.group.model.kv_heads,
        "nodes": cell.group.cluster.num_gpus // 8,
        "ran": int(cell.ran.sum()),
        "failed": int((~cell.ran).sum()),
        "throughput_median_error": float(np.median(np.abs(cell.time_ratio)))
        if cell.ran.any()
        else None,
        "memory_median_error": float(np.median(np.abs(cell.memory_ratio)))
        if cell.ran.any()
        else None,
        "rank_correlation": cell.rank_correlation,
    }
