"""Fit what InternEvo adds to isolated kernels: `python -m evidence.fit --only internevo`.

Writes hp_tool/catalog/data/efficiency/frameworks/internevo/default.yaml from 26 step times of
InternLM-7B on 8 to 128 A100 and 16 figures of memory on A800. One model tells few constants apart:
priors hold those that it does not. `leave_one_out` predicts every run by constants that never saw
its number of GPUs, or its layout.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import numpy as np

from benchmarks.accuracy.comparison import Comparison
from benchmarks.accuracy.fit_frameworks import FIXED
from benchmarks.accuracy.fitting import (
    SCATTER,
    Fit,
    Prior,
    Values,
    framework_file,
    left_out,
    with_constants,
)
from benchmarks.accuracy.prepared import Prepared, seen
from benchmarks.accuracy.runs import internevo_cases, memory_cases
from evidence.cases import Case
from evidence.fitted_file import FittedFile
from hp_tool.domain.efficiency import FrameworkEfficiency
from hp_tool.domain.units import GIB
from hp_tool.questions.training import estimate

COMMAND = "python -m evidence.fit --only internevo"
NOISE = 0.03
"""Relative scatter taken for one published run: the same step stands twice in the table, 1.6 %
apart.
"""
START = dataclasses.replace(
    FIXED, framework="internevo", attention_kernel="fa2", context_parallel_overlap=0.0
)
"""What the runs do not tell: pipelines and links inside a node are as elsewhere."""


def constants(values: Values) -> FrameworkEfficiency:
    """Return the profile with the free constants."""
    values = dict(values)
    ramp = float(f"{math.exp(values.pop('log_broadcast_ramp')):.4g}")
    return with_constants(START, {**values, "broadcast_ramp_bytes": ramp})


FIT = Fit[Prepared, FrameworkEfficiency](
    priors={
        "elementwise_traffic_factor": Prior(1.6, 0.4, 0.5, 6.0),
        "attention_slowdown": Prior(1.3, 0.3, 0.7, 4.0),  # FlashAttention of 2023
        "tensor_parallel_overlap": Prior(0.5, 0.3, 0.0, 1.0),
        "data_parallel_overlap": Prior(0.7, 0.2, 0.0, 1.0),
        "network_bandwidth_fraction": Prior(0.6, 0.2, 0.1, 1.0),
        "log_broadcast_ramp": Prior(math.log(1e9), 1.5, math.log(1e6), math.log(1e11)),
        # AdamW's kernels one by one, and the copies before and after it
        "optimizer_traffic_factor": Prior(4.0, 1.0, 1.0, 8.0),
    },
    constants=constants,
    errors=lambda runs: lambda trial: np.log([one.ratio(trial) for one in runs]) / NOISE,
    in_deviations=False,
    near=0.0,
    options={"diff_step": 1e-3, "xtol": 1e-5, "ftol": 1e-5},
)


def by_gpus(run: Prepared) -> str:
    return str(run.problem.cluster.num_gpus)


def by_layout(run: Prepared) -> str:
    """Return tensor parallelism, micro-batch, recomputation and what the optimizer is sharded over,
    in words.
    """
    parallel = run.case.query.parallel
    shard = "all" if parallel.data_parallel_shard_size == 0 else "node"
    return (
        f"{parallel.tensor_parallel_size} {parallel.micro_batch_size} {parallel.recompute} {shard}"
    )


LEFT_OUT: dict[str, Callable[[Prepared], str]] = {"number of GPUs": by_gpus, "layout": by_layout}


def leave_one_out(runs: Sequence[Prepared], key: Callable[[Prepared], str]) -> list[Comparison]:
    """Every run, predicted by constants that never saw one of its key."""
    return [
        one.compare(fitted, saw=others)
        for _, unseen, others in left_out(runs, key)
        for fitted in [seen(FIT(others), others)]
        for one in unseen
    ]


def used_memory(cases: Sequence[Case]) -> list[Comparison]:
    """What the GPU was seen to use beside what is allocated at the peak, in GiB."""
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
    """How much more than is allocated the allocator holds, typically."""
    return float(np.median([1.0 / (1.0 + row.error) for row in rows])) - 1.0


def memory_left_out(folder: Path) -> list[Comparison]:
    """Memory that the allocator holds, by what the other rows say of how much it caches."""
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
    """Root mean square of log(published / predicted), to two digits."""
    return float(f"{math.sqrt(np.mean([math.log1p(row.error) ** 2 for row in rows])):.2g}")


def fitted(folder: Path) -> Iterator[FittedFile]:
    runs = [Prepared.of(case) for case in internevo_cases(folder)]
    used, cached = used_memory(memory_cases(folder)), memory_left_out(folder)
    profile = dataclasses.replace(
        seen(FIT(runs), runs),
        memory_log_sd=log_sd(cached),
        reserved_log_sd=log_sd(used),
        fragmentation_fraction=float(f"{cached_share(used):.2g}"),
        fitted_on=f"{len(runs)} step times of InternLM-7B on 8 to 128 A100 and {len(used)} figures "
        "of memory on A800, by "
        f"{COMMAND}; see START there for what those rows do not tell",
    )
    yield framework_file("default", profile, keeps=SCATTER)
