"""Measured cells: several layouts of one training, and whether group 1 holds the fastest of them."""

from __future__ import annotations

import dataclasses
import math
from collections import defaultdict
from collections.abc import Hashable, Sequence
from pathlib import Path
from statistics import median

import numpy as np

from benchmarks.accuracy.heldout import Case
from benchmarks.accuracy.internevo_runs import internevo_cases
from benchmarks.accuracy.mlperf_runs import mlperf_cases
from benchmarks.accuracy.pairs import Floats, regular_scatter
from benchmarks.accuracy.recipe_runs import release_cases
from benchmarks.search.grid import read_grid
from benchmarks.search.profiles import profiles_without
from benchmarks.search.replaying import legal_rows, table_of
from hp_tool.cost.uncertainty import NORMAL_QUANTILE, ratio_log_sd
from hp_tool.training.evaluate import resolve_configuration

WITHIN = 1.1
"""Times the fastest measured row that the slowest of group 1 may take."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class MeasuredCell:
    """n layouts of one training on one cluster."""

    source: str
    predicted_s: tuple[float, ...]
    measured_s: tuple[float, ...]
    log_sd: float
    """Of the ratio of two steps."""

    @property
    def group(self) -> list[int]:
        """The rows that cannot be told apart from the predicted fastest."""
        best_s = min(self.predicted_s)
        bound = math.exp(NORMAL_QUANTILE * self.log_sd)
        return [row for row, step_s in enumerate(self.predicted_s) if step_s <= bound * best_s]


def cell_rows(folder: Path) -> list[MeasuredCell]:
    """Cells of at least two layouts: nanotron's grid by constants and a scatter without the cell's model, published runs by the
    shipped ones, which saw them.
    """
    return [*_nanotron(folder), *_published(folder)]


def judged_cells(cells: Sequence[MeasuredCell]) -> dict[str, dict[str, float]]:
    """By source: how many cells, how often group 1 holds the fastest row, and its slowest takes at most WITHIN times as long,
    its median, and the median number of rows in group 1 and in the cell.
    """
    found: dict[str, dict[str, float]] = {}
    for source in dict.fromkeys(cell.source for cell in cells):
        mine = [cell for cell in cells if cell.source == source]
        fastest = [min(cell.measured_s) for cell in mine]
        groups = [[cell.measured_s[row] for row in cell.group] for cell in mine]
        found[source] = {
            "cells": len(mine),
            "fastest in group 1": _share([best == min(group) for best, group in zip(fastest, groups, strict=True)]),
            f"slowest within {WITHIN}": _share([max(g) <= WITHIN * best for best, g in zip(fastest, groups, strict=True)]),
            "median slowest": median(max(g) / best for best, g in zip(fastest, groups, strict=True)),
            "median group": median(map(len, groups)),
            "median cell": median(len(cell.measured_s) for cell in mine),
        }
    return found


def _share(holds: Sequence[bool]) -> float:
    return sum(holds) / len(holds)


def _nanotron(folder: Path) -> list[MeasuredCell]:
    path, gpu = folder / "grid_h100_nanotron.csv", "h100-sxm-80gb"
    if not path.is_file():
        return []
    profiles = profiles_without(grid=path, gpu=gpu, framework="nanotron")
    steps: dict[str, list[tuple[Floats, Floats]]] = defaultdict(list)
    for cell in read_grid(path, shapes={}, gpu=gpu, sequence_length=4096, framework="nanotron")[0]:
        parts_s = table_of(cell, profiles.of(cell.model.name)).parts_s
        rows = np.intersect1d(legal_rows(cell), np.flatnonzero(np.isfinite(cell.step_s)))
        if len(rows) > 1:
            steps[cell.model.name].append((sum(parts_s.values(), np.zeros(len(cell.step_s)))[rows], cell.step_s[rows]))
    found = []
    for model, cells in steps.items():
        others = [np.log(measured / predicted) for name, each in steps.items() if name != model for predicted, measured in each]
        halves = [(logs[: len(logs) // 2], logs[len(logs) // 2 :]) for logs in others]
        log_sd = regular_scatter(np.concatenate([one - other[: len(one)] for one, other in halves]))
        found += [_cell("nanotron", predicted, measured, log_sd) for predicted, measured in cells]
    return found


def _published(folder: Path) -> list[MeasuredCell]:
    cells: dict[Hashable, dict[str, list[Case]]] = defaultdict(lambda: defaultdict(list))
    for case in (*release_cases(folder), *mlperf_cases(folder), *internevo_cases(folder)):
        training = case.query.training
        assert training is not None
        size = (training.sequence_length, training.global_batch_size, training.precision)
        key = (case.source, case.name, case.date, str(case.query.cluster), *size)
        cells[key][str(case.query.parallel)].append(case)
    found = []
    for layouts in cells.values():
        known = [resolve_configuration(cases[0].query) for cases in layouts.values()]
        estimates = [one.estimate(with_fixes=False) for one in known]
        rows = [row for row, each in enumerate(estimates) if each.time is not None]
        if len(rows) < 2:
            continue
        members = list(layouts.values())
        measured = [median(case.step_s for case in members[row]) for row in rows]
        predicted = [each.time.step_s for each in estimates if each.time is not None]
        found.append(_cell(members[0][0].source, predicted, measured, float(ratio_log_sd(known[0].problem.profile))))
    return found


def _cell(
    source: str, predicted: Sequence[float] | np.ndarray, measured: Sequence[float] | np.ndarray, log_sd: float
) -> MeasuredCell:
    return MeasuredCell(
        source=source, predicted_s=tuple(map(float, predicted)), measured_s=tuple(map(float, measured)), log_sd=log_sd
    )
