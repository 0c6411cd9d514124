"""Ratios of two runs of one model on the same devices. Errors of the model, the kernels and the
devices cancel in them.
"""

from __future__ import annotations

import dataclasses
import math
from collections import defaultdict
from collections.abc import Callable, Hashable, Iterable
from pathlib import Path
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from benchmarks.accuracy.comparison import Comparison
from benchmarks.accuracy.fit_fsdp import mpt_runs
from benchmarks.accuracy.prepared import Prepared
from benchmarks.accuracy.runs import b200_cases, internevo_cases, mlperf_cases, pretraining
from evidence.cases import Case, with_training
from hp_tool.catalog import gpu
from hp_tool.catalog.efficiency import efficiency_profile
from hp_tool.cost.uncertainty import NORMAL_QUANTILE, ratio_log_sd, with_pairs
from hp_tool.domain.releases import release_numbers
from hp_tool.loop.assumptions import assumed

Floats = NDArray[np.float64]
Cell = Callable[[Comparison], Hashable]


def cells(folder: Path) -> dict[tuple[str, str], tuple[Hashable, ...]]:
    """Return the cell of each published run: model, GPU, devices and precision. Each release has
    separate cells.
    """
    cases = [
        *(run.case for run in mpt_runs(folder)),
        *internevo_cases(folder),
        *pretraining(folder),
        *b200_cases(folder),
    ]
    cases += [case for case in mlperf_cases(folder) if case.task == "lora"]
    return {(case.name, case.what): _cell(case) for case in cases}


def _cell(case: Case) -> tuple[Hashable, ...]:
    problem = Prepared.from_case(case).problem
    workload, cluster = problem.workload, problem.cluster
    return case.source, case.name, case.date, cluster.gpu.name, cluster.num_gpus, workload.precision


def pairs(
    rows: Iterable[Comparison],
    cell: Cell,
    *,
    framework: str,
    kind: Literal["dense", "experts", "adapters"] = "dense",
) -> list[Comparison]:
    """Return ratios of two runs of a cell, with the interval that a ranking has for this framework.
    Each run is in at most one pair.
    """
    ratios = []
    for one, other in _paired(rows, cell):
        profile = efficiency_profile(gpu=gpu(one.gpu), framework=framework)
        log_sd = float(
            ratio_log_sd(
                with_pairs(profile, experts=kind == "experts", adapters=kind == "adapters")
            )
        )
        ratios.append(_ratio(one, other, bound=math.exp(NORMAL_QUANTILE * log_sd)))
    return ratios


def log_ratios(rows: Iterable[Comparison], cell: Cell) -> Floats:
    """Return ln(measured / predicted) of the ratios that `pairs` returns."""
    return np.array([other.log_ratio - one.log_ratio for one, other in _paired(rows, cell)])


def across_releases(cases: Iterable[Case]) -> list[Comparison]:
    """Return the ratio of each run to the run of the newest release with the same model, devices,
    batch and precision, predicted without naming a release. Differences of layouts and other
    settings cancel; the effect of the release remains. Two releases of a model on a card in a
    precision are one setting for any number of devices.
    """
    grouped: dict[tuple[Hashable, ...], list[Case]] = defaultdict(list)
    for case in cases:
        training, cluster = case.training, case.cluster
        if case.release:
            key = (
                case.name,
                case.card,
                cluster.num_gpus,
                training.global_batch_size,
                training.precision,
            )
            grouped[key].append(case)
    ratios = []
    for key, members in grouped.items():
        newest = max(members, key=lambda case: release_numbers(case.release))
        earlier = [case for case in members if case.release != newest.release]
        unnamed = (
            with_training(case, framework_version=None, what=f"{case.what}, no release named")
            for case in (newest, *earlier)
        )
        first, *rows = (Prepared.from_case(case).shipped() for case in unnamed)
        for case, row in zip(earlier, rows, strict=True):
            if math.isfinite(row.predicted / first.predicted):
                setting = (
                    f"{case.source}, {case.name}, {case.card}, {key[-1]}, {case.release} to "
                    f"{newest.release}"
                )
                ratios.append(dataclasses.replace(_ratio(first, row, bound=1.0), setting=setting))
    return ratios


def regular_scatter(logs: Floats) -> float:
    """Return the standard deviation of ln(measured / predicted) of ratios of runs that did not
    stall: the normal part of the most likely mixture of a normal distribution and exponential
    tails, which represent stalls as in calibrations.
    """
    log_sd, stalled, mean = 0.3, 0.3, assumed().stalls.mean_log_excess
    for _ in range(200):
        regular = (
            (1.0 - stalled)
            * np.exp(-0.5 * (logs / log_sd) ** 2)
            / (math.sqrt(2.0 * math.pi) * log_sd)
        )
        share = regular / (regular + stalled * np.exp(-np.abs(logs) / mean) / (2.0 * mean))
        log_sd, stalled = math.sqrt(float(share @ logs**2 / share.sum())), 1.0 - float(share.mean())
    return log_sd


def _paired(rows: Iterable[Comparison], cell: Cell) -> list[tuple[Comparison, Comparison]]:
    grouped: dict[Hashable, list[Comparison]] = defaultdict(list)
    for row in rows:
        if math.isfinite(row.predicted):
            grouped[cell(row)].append(row)
    paired = []
    for members in grouped.values():
        ordered = sorted(members, key=lambda row: row.what)
        half = (
            len(ordered) // 2
        )  # the first half with the second: neighbours differ in one size alone
        paired += list(zip(ordered[:half], ordered[half:], strict=False))
    return paired


def _ratio(one: Comparison, other: Comparison, *, bound: float) -> Comparison:
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
