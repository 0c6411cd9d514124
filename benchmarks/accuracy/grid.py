"""A real grid on 1 to 64 nodes of 8 H100: which configurations fail, how fast the others are, and
their order in a cell.

The runs are nanotron's. By the shipped constants, which saw them; and by constants that did not see
the row's model, or its number of nodes.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable
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
from benchmarks.accuracy.fit_nanotron import fit
from benchmarks.accuracy.grid_rows import GPU, Group, grid_rows, groups
from hp_tool.catalog import gpu
from hp_tool.catalog.efficiency import efficiency
from hp_tool.cost.uncertainty import NORMAL_QUANTILE
from hp_tool.domain.efficiency import FrameworkEfficiency
from hp_tool.domain.units import GIB

MIN_CELL = 20
"""Rows below which a cell's rank correlation says nothing."""

Floats = NDArray[np.float64]
Bools = NDArray[np.bool_]


@dataclass(frozen=True, kw_only=True)
class Cell:
    """One group's predictions beside what happened; arrays over its rows."""

    group: Group
    ran: Bools
    legal: Bools
    fits: Bools
    """By memory, headroom kept free."""
    fit_probability: Floats
    time_ratio: Floats
    """Predicted over measured throughput, minus one; of the rows that ran."""
    memory_ratio: Floats
    """Predicted over measured bytes, minus one; of the rows that ran."""
    rank_correlation: float | None
    constants: FrameworkEfficiency

    @property
    def time_within(self) -> Bools:
        """Which rows that ran did so within the stated 90 % interval of step time."""
        within: Bools = (
            np.abs(np.log1p(self.time_ratio)) <= NORMAL_QUANTILE * self.constants.time_log_sd
        )
        return within

    @property
    def memory_within(self) -> Bools:
        """Return which rows' measured memory lies within the stated interval."""
        within: Bools = (
            np.abs(np.log1p(self.memory_ratio)) <= NORMAL_QUANTILE * self.constants.memory_log_sd
        )
        return within


def predicted(group: Group, constants: FrameworkEfficiency) -> Cell:
    """One group under these constants."""
    costs = group.predict(constants)
    ran, legal, step_s = group.ran, group.legal, np.asarray(costs.step_s)
    room = np.log(group.cluster.gpu.memory_bytes / costs.memory_total_bytes)
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


def steps(cells: Iterable[Cell]) -> list[Comparison]:
    """Seconds of every run that did not fail."""
    return [
        row
        for cell in cells
        for row in _rows(cell, cell.group.step_s, cell.time_ratio, cell.constants.time_log_sd)
    ]


def memory(cells: Iterable[Cell]) -> list[Comparison]:
    """GiB of their first stages."""
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


def held_out(rows: list[Row]) -> list[Cell]:
    """Every group by constants fitted on other models: leave one model out."""
    models = sorted({row["model"] for row in rows})
    constants = {name: fit(rows=[row for row in rows if row["model"] != name]) for name in models}
    return [predicted(group, constants[group.model.name]) for group in groups(rows)]


def held_out_nodes(rows: list[Row]) -> list[Cell]:
    """Every group by constants fitted on other numbers of nodes: two folds, every second size in
    each.
    """
    sizes = sorted({row["nodes"] for row in rows}, key=int)
    cells = []
    for fold in (sizes[::2], sizes[1::2]):
        constants = fit(rows=[row for row in rows if row["nodes"] not in fold])
        cells += [
            predicted(group, constants)
            for group in groups(row for row in rows if row["nodes"] in fold)
        ]
    return cells


def summary(cells: list[Cell]) -> dict[str, Any]:
    """Counts and shares over all cells."""
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
    """Predictions of every group by the shipped constants, leaving one model out, and leaving one
    number of nodes out.
    """
    rows = grid_rows(folder)
    shipped = efficiency(gpu=gpu(GPU), framework="nanotron").framework
    return {
        "shipped": [predicted(group, shipped) for group in groups(rows)],
        "model_left_out": held_out(rows),
        "nodes_left_out": held_out_nodes(rows),
    }


def evaluate(folder: Path) -> dict[str, Any] | None:
    """Return errors by the shipped constants, leaving out one model or one number of nodes; None
    without the file.
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
