"""Fit what nanotron adds to isolated kernels: `python -m evidence.fit --only nanotron`.

Writes hp_tool/catalog/data/efficiency/frameworks/nanotron/*.yaml from the published grid of runs on
1 to 64 nodes of 8 H100: thirteen constants of time and three of memory on some thousand runs,
robustly, because some of them ran many times slower than others like them. Priors keep them
physical. `fit(rows=...)` fits any of the rows, so that others stay unseen.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

import numpy as np

from benchmarks.accuracy.data import Row
from benchmarks.accuracy.fitting import (
    Fit,
    Floats,
    Prior,
    fixed,
    framework_file,
    given,
    priors,
    with_constants,
)
from benchmarks.accuracy.grid_rows import Group, grid_rows, groups
from evidence.fitted_file import FittedFile
from hp_tool.cost.memory import NEARLY_FULL
from hp_tool.domain.efficiency import FrameworkEfficiency

COMMAND = "python -m evidence.fit --only nanotron"

NOISE = given("nanotron")["noise"]
RETRY_BYTES_PER_SECOND = 2.0**21 / 1e-4
"""Before any run: some 100 us for a page of 2 MiB. CUDA's calls that map one, make it accessible
and unmap it took 63 us on an A100, beside its creation (github.com/magnate3/linux-riscv-dev,
nccl/gpu/shm/bench_vmm).
"""
FIXED = fixed("nanotron")
"""What the runs do not tell."""


def fit(*, rows: Sequence[Row], clocks_known: bool = False) -> FrameworkEfficiency:
    """The constants that these rows of the grid give; rows that failed, or whose sizes contradict
    each other, teach nothing.

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
    """The geometric mean of the bytes per second at which pipelines that held NEARLY_FULL of their
    device or more would have got their activations anew in the time they lost; the prior is one of
    them.
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
    """Maximum a posteriori with Cauchy-like tails: a run ten times slower than predicted pulls no
    harder than one that is twice as slow. The robust loss goes on the runs alone; the priors stay
    quadratic.
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
    long, and only the last accumulate in fp32: they get the slowdown of all.
    """
    constants = fit(rows=grid_rows(folder), clocks_known=False)
    slowdown = (2.0 + FIXED.fp32_accumulation["h100"]) * constants.matmul_slowdown - 2.0
    added = {"h100": float(f"{slowdown:.4g}")}
    yield framework_file(
        "default", dataclasses.replace(constants, matmul_slowdown=1.0, fp32_accumulation=added)
    )
