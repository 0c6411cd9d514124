"""Fit the time that InternEvo adds to isolated kernels: `python -m evidence.fit --only
internevo`.

Writes hp_tool/catalog/data/efficiency/frameworks/internevo/default.yaml from 26 step times of
InternLM-7B on 8 to 128 A100 and 16 memory figures on A800. Runs of one model cannot determine all
constants; priors set the rest. `leave_one_out` predicts every run by constants fitted without its
number of GPUs, or without its layout.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import numpy as np

from benchmarks.accuracy.comparison import Comparison
from benchmarks.accuracy.fitting import (
    SCATTER,
    Fit,
    Values,
    compare_left_out,
    fit_settings,
    fixed_constants,
    framework_file,
    priors,
    with_constants,
)
from benchmarks.accuracy.prepared import Prepared, with_fitted_release
from benchmarks.accuracy.runs import internevo_cases, memory_cases
from evidence.cases import Case
from evidence.fitted_file import FittedFile
from hp_tool.domain.efficiency import FrameworkEfficiency
from hp_tool.domain.units import GIB
from hp_tool.questions.training import estimate

COMMAND = "python -m evidence.fit --only internevo"
NOISE = fit_settings("internevo")["noise"]
START = fixed_constants("internevo")
"""Constants that the runs do not determine."""


def constants(values: Values) -> FrameworkEfficiency:
    """Return the profile with these values of the free constants."""
    values = dict(values)
    ramp = float(f"{math.exp(values.pop('log_broadcast_ramp')):.4g}")
    return with_constants(START, {**values, "broadcast_ramp_bytes": ramp})


FIT = Fit[Prepared, FrameworkEfficiency](
    priors=priors("internevo"),
    constants=constants,
    errors=lambda runs: lambda trial: np.log([one.ratio(trial) for one in runs]) / NOISE,
    in_deviations=False,
    near=0.0,
    options={"diff_step": 1e-3, "xtol": 1e-5, "ftol": 1e-5},
)


def by_gpus(run: Prepared) -> str:
    return str(run.problem.cluster.num_gpus)


def by_layout(run: Prepared) -> str:
    """Return a description of tensor parallelism, micro-batch, recomputation and the ranks that
    share the optimizer states.
    """
    parallel = run.case.query.parallel
    shard = "all" if parallel.data_parallel_shard_size == 0 else "node"
    return (
        f"{parallel.tensor_parallel_size} {parallel.micro_batch_size} {parallel.recompute} {shard}"
    )


LEFT_OUT: dict[str, Callable[[Prepared], str]] = {"number of GPUs": by_gpus, "layout": by_layout}


def leave_one_out(runs: Sequence[Prepared], key: Callable[[Prepared], str]) -> list[Comparison]:
    """Return every run, predicted by constants fitted without the runs that share its `key`."""

    def fit(others: list[Prepared]) -> Callable[[Prepared], Comparison]:
        constants = with_fitted_release(FIT(others), others)
        return lambda one: one.compare(constants, saw=others)

    return compare_left_out(runs, key, fit)


def used_memory(cases: Sequence[Case]) -> list[Comparison]:
    """Return the memory in GiB that the GPU used in addition to the peak of allocated memory."""
    rows = []
    for case in cases:
        memory = estimate(query=case.query, with_fixes=False).memory
        assert memory is not None and case.used_bytes is not None
        rows.append(
            Comparison(
                source="InternEvo",
                model=case.name,
                what=case.what,
                gpu=case.card,
                part=case.card,
                published=case.used_bytes / GIB,
                predicted=memory.allocated_bytes / GIB,
            )
        )
    return rows


def cached_share(rows: Sequence[Comparison]) -> float:
    """Return the typical ratio of reserved to allocated memory, minus 1."""
    return float(np.median([1.0 / (1.0 + row.error) for row in rows])) - 1.0


def memory_left_out(folder: Path) -> list[Comparison]:
    """Return reserved memory, predicted with the cached share fitted to the remaining rows."""
    rows = used_memory(memory_cases(folder))
    return [
        dataclasses.replace(
            row,
            predicted=row.predicted
            * (1.0 + cached_share([other for other in rows if other is not row])),
        )
        for row in rows
    ]


def log_sd(rows: Sequence[Comparison]) -> float:
    """Return the root mean square of ln(published / predicted), with two digits."""
    return float(f"{math.sqrt(np.mean([math.log1p(row.error) ** 2 for row in rows])):.2g}")


def fitted(folder: Path) -> Iterator[FittedFile]:
    runs = [Prepared.from_case(case) for case in internevo_cases(folder)]
    used, cached = used_memory(memory_cases(folder)), memory_left_out(folder)
    profile = dataclasses.replace(
        with_fitted_release(FIT(runs), runs),
        memory_log_sd=log_sd(cached),
        reserved_log_sd=log_sd(used),
        fragmentation_fraction=float(f"{cached_share(used):.2g}"),
        fitted_on=f"{len(runs)} step times of InternLM-7B on 8 to 128 A100 and {len(used)} figures "
        "of memory on A800, by "
        f"{COMMAND}; see START there for what those rows do not tell",
    )
    yield framework_file("default", profile, keeps=SCATTER)
