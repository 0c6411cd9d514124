"""Pairs of runs of one model on the same devices: what is wrong with the model, the kernels or the devices cancels."""

from __future__ import annotations

import dataclasses
import math
from collections import defaultdict
from collections.abc import Hashable, Iterable, Mapping
from pathlib import Path

from benchmarks.accuracy.comparison import Comparison
from benchmarks.accuracy.fit_fsdp import mpt_runs
from benchmarks.accuracy.heldout import Case, b200_cases
from benchmarks.accuracy.internevo_runs import internevo_cases
from benchmarks.accuracy.prepared import Prepared
from benchmarks.accuracy.recipe_runs import pretraining
from hp_tool.catalog import gpu
from hp_tool.catalog.efficiency import efficiency
from hp_tool.cost.uncertainty import NORMAL_QUANTILE, ratio_log_sd


def cells(folder: Path) -> dict[tuple[str, str], Hashable]:
    """The cell of each published run by its model and description: model, card, devices and precision; releases apart."""
    cases = [*(run.case for run in mpt_runs(folder)), *internevo_cases(folder), *pretraining(folder), *b200_cases(folder)]
    return {(case.name, case.what): _cell(case) for case in cases}


def _cell(case: Case) -> Hashable:
    problem = Prepared.of(case).problem
    workload, cluster = problem.workload, problem.cluster
    return case.source, case.name, case.date, cluster.gpu.name, cluster.num_gpus, workload.precision


def pairs(rows: Iterable[Comparison], known: Mapping[tuple[str, str], Hashable], *, framework: str) -> list[Comparison]:
    """Ratios of two runs of a cell, each run in one pair at most, in the interval that a ranking by this framework states."""
    grouped: dict[Hashable, list[Comparison]] = defaultdict(list)
    for row in rows:
        if math.isfinite(row.predicted):
            grouped[known[(row.model, row.what)]].append(row)
    found = []
    for members in grouped.values():
        ordered = sorted(members, key=lambda row: row.what)
        half = len(ordered) // 2  # the first half with the second: neighbours differ in one size alone
        found += [_ratio(one, other, framework=framework) for one, other in zip(ordered[:half], ordered[half:], strict=False)]
    return found


def _ratio(one: Comparison, other: Comparison, *, framework: str) -> Comparison:
    bound = math.exp(NORMAL_QUANTILE * ratio_log_sd(efficiency(gpu=gpu(one.gpu), framework=framework)))
    published, predicted = other.published / one.published, other.predicted / one.predicted
    return dataclasses.replace(
        other,
        what=f"{other.what} over {one.what}",
        published=published,
        predicted=predicted,
        low=predicted / bound,
        high=predicted * bound,
        setting="",
        refused=None,
    )
