"""Check whether group 1 of a ranking contains the fastest of several measured layouts."""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections import defaultdict
from collections.abc import Hashable, Sequence
from pathlib import Path
from statistics import median

import numpy as np

from benchmarks.accuracy.grid_rows import TABLE
from benchmarks.accuracy.pairs import Floats, regular_scatter
from benchmarks.accuracy.runs import internevo_cases, mlperf_cases, release_cases
from benchmarks.search.grid import read_grid
from benchmarks.search.profiles import profiles_without
from benchmarks.search.replaying import case_of, legal_rows, table_of
from evidence.cases import Case
from hp_tool.cost.uncertainty import NORMAL_QUANTILE, out_of_memory_probability, ratio_log_sd
from hp_tool.questions.training.evaluate import resolve_configuration

WITHIN = 1.1
"""Tolerance: how many times the fastest row's measured time the slowest row of group 1 may take."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class MeasuredCell:
    """n layouts of one training on one cluster."""

    source: str
    predicted_s: tuple[float, ...]
    measured_s: tuple[float, ...]
    expected_s: tuple[float, ...]
    """Predicted step times divided by the probability that the row does not run out of memory;
    infinity for rows that do not fit.
    """
    log_sd: float
    """Standard deviation of the logarithm of the ratio of two step times."""

    @property
    def group(self) -> list[int]:
        """Rows of group 1: by expected time, up to the first that differs from rank 1."""
        ordered = sorted(range(len(self.expected_s)), key=lambda row: self.expected_s[row])
        first_s, bound = self.predicted_s[ordered[0]], NORMAL_QUANTILE * self.log_sd
        alike = (
            math.isfinite(self.expected_s[r])
            and abs(math.log(self.predicted_s[r] / first_s)) <= bound
            for r in ordered
        )
        return [
            row
            for row, _ in itertools.takewhile(
                lambda each: each[1], zip(ordered, alike, strict=True)
            )
        ]


def cell_rows(folder: Path) -> list[MeasuredCell]:
    """Return the cells with at least two layouts. Cells of nanotron's grid use constants fitted
    without their model; published runs use the shipped constants, which were fitted to them.
    """
    return [*_nanotron_cells(folder), *_published_cells(folder)]


def judged_cells(cells: Sequence[MeasuredCell]) -> dict[str, dict[str, float]]:
    """Return statistics by source.

    They are the number of cells; how often group 1 contains the fastest row; how often rank 1, and
    how often the slowest row of group 1, takes at most WITHIN times the fastest; the median of the
    slowest; and the median numbers of rows in group 1 and in the cell.
    """
    by_source: dict[str, dict[str, float]] = {}
    for source in dict.fromkeys(cell.source for cell in cells):
        mine = [cell for cell in cells if cell.source == source]
        fastest = [min(cell.measured_s) for cell in mine]
        groups = [[cell.measured_s[row] for row in cell.group] for cell in mine]
        by_source[source] = {
            "cells": len(mine),
            "fastest in group 1": _share(
                [best == min(group) for best, group in zip(fastest, groups, strict=True)]
            ),
            f"first within {WITHIN}": _share(
                [
                    cell.measured_s[cell.group[0]] <= WITHIN * b
                    for b, cell in zip(fastest, mine, strict=True)
                ]
            ),
            f"slowest within {WITHIN}": _share(
                [max(g) <= WITHIN * best for best, g in zip(fastest, groups, strict=True)]
            ),
            "median slowest": median(
                max(g) / best for best, g in zip(fastest, groups, strict=True)
            ),
            "median group": median(map(len, groups)),
            "median cell": median(len(cell.measured_s) for cell in mine),
        }
    return by_source


def _share(holds: Sequence[bool]) -> float:
    return sum(holds) / len(holds)


def _nanotron_cells(folder: Path) -> list[MeasuredCell]:
    gpu = "h100-sxm-80gb"
    places = (folder / f"{TABLE}.csv", folder / "training" / "nanotron.csv")
    path = next((place for place in places if place.is_file()), None)
    if path is None:
        return []
    profiles = profiles_without(grid=path, gpu=gpu, framework="nanotron")
    steps: dict[str, list[tuple[Floats, Floats, Floats]]] = defaultdict(list)
    for cell in read_grid(path, shapes={}, gpu=gpu, sequence_length=4096, framework="nanotron")[0]:
        profile = profiles.of(cell.model.name)
        table, rows = (
            table_of(cell, profile),
            np.intersect1d(legal_rows(cell), np.flatnonzero(np.isfinite(cell.step_s))),
        )
        if len(rows) < 2:
            continue
        predicted_s = sum(table.parts_s.values(), np.zeros(len(cell.step_s)))
        total_bytes = table.memory_bytes / table.device_bytes * cell.cluster.gpu.memory_bytes
        fails = out_of_memory_probability(
            case=case_of(cell, profile),
            candidates=cell.candidates,
            total_bytes=total_bytes,
            device_bytes=case_of(cell, profile).cluster.gpu.memory_bytes,
        )
        expected_s = np.where(
            table.memory_bytes <= table.usable_bytes,
            predicted_s / np.maximum(1.0 - fails, 1e-9),
            np.inf,
        )
        steps[cell.model.name].append((predicted_s[rows], cell.step_s[rows], expected_s[rows]))
    judged = []
    for model, cells in steps.items():
        others = [
            np.log(measured / predicted)
            for name, each in steps.items()
            if name != model
            for predicted, measured, _ in each
        ]
        halves = [(logs[: len(logs) // 2], logs[len(logs) // 2 :]) for logs in others]
        log_sd = regular_scatter(np.concatenate([one - other[: len(one)] for one, other in halves]))
        judged += [_make_cell("nanotron", *columns, log_sd=log_sd) for columns in cells]
    return judged


def _published_cells(folder: Path) -> list[MeasuredCell]:
    cells: dict[Hashable, dict[str, list[Case]]] = defaultdict(lambda: defaultdict(list))
    for case in (*release_cases(folder), *mlperf_cases(folder), *internevo_cases(folder)):
        training = case.query.training
        assert training is not None
        size = (training.sequence_length, training.global_batch_size, training.precision)
        key = (case.source, case.name, case.date, str(case.query.cluster), *size)
        cells[key][str(case.query.parallel)].append(case)
    judged = []
    for layouts in cells.values():
        known = [resolve_configuration(cases[0].query) for cases in layouts.values()]
        estimates = [one.estimate(with_fixes=False) for one in known]
        rows = [
            row
            for row, each in enumerate(estimates)
            if each.time is not None and each.memory is not None
        ]
        if len(rows) < 2:
            continue
        members = list(layouts.values())
        measured = [median(case.step_s for case in members[row]) for row in rows]
        predicted = [each.time.step_s for each in estimates if each.time is not None]
        judged.append(
            _make_cell(
                members[0][0].source,
                predicted,
                measured,
                predicted,
                log_sd=float(ratio_log_sd(known[0].problem.profile)),
            )
        )
    return judged


def _make_cell(
    source: str,
    predicted: Sequence[float] | Floats,
    measured: Sequence[float] | Floats,
    expected: Sequence[float] | Floats,
    *,
    log_sd: float,
) -> MeasuredCell:
    return MeasuredCell(
        source=source,
        predicted_s=tuple(map(float, predicted)),
        measured_s=tuple(map(float, measured)),
        expected_s=tuple(map(float, expected)),
        log_sd=log_sd,
    )
