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
from benchmarks.accuracy.fitting import Fit, Floats, Prior, framework_file, with_constants
from benchmarks.accuracy.grid_rows import Group, grid_rows, groups
from evidence.fitted_file import FittedFile
from hp_tool.cost.memory import NEARLY_FULL
from hp_tool.domain.efficiency import FrameworkEfficiency, Link

COMMAND = "python -m evidence.fit --only nanotron"

TIME_PRIORS = {
    "matmul_slowdown": Prior(1.0, 0.15, 0.8, 2.0),  # at sustained clocks
    "elementwise_traffic_factor": Prior(
        2.0, 0.8, 0.5, 6.0
    ),  # nothing is fused but the norms and the attention core
    "tensor_parallel_overlap": Prior(0.3, 0.3, 0.0, 1.0),
    "data_parallel_overlap": Prior(0.3, 0.3, 0.0, 1.0),
    "all_reduce_overlap": Prior(0.3, 0.3, 0.0, 1.0),
    "network_bandwidth_fraction": Prior(0.7, 0.3, 0.02, 1.0),
    "attention_slowdown": Prior(
        1.5, 0.5, 0.8, 4.0
    ),  # FlashAttention-2; kernels timed alone were newer
    "optimizer_traffic_factor": Prior(1.4, 0.5, 0.5, 6.0),
    "step_overhead_s": Prior(0.03, 0.05, 0.0, 1.0),
    "host_launch_s": Prior(1e-4, 7e-5, 3e-6, 7e-4),
    "host_tensor_stall_s": Prior(1e-4, 5e-4, 0.0, 1e-2),
    "host_pipeline_stall_s": Prior(1e-4, 2e-3, 0.0, 1e-2),
    "message_stall_s": Prior(0.1, 0.2, 0.0, 2.0),
}
MEMORY_PRIORS = {
    "temporaries_fraction": Prior(0.1, 0.2, 0.0, 1.0),
    "workspace_bytes": Prior(3e8, 3e8, 0.0, 2e9),
    "queued_inputs": Prior(
        50.0, 20.0, 0.0, 200.0
    ),  # CUDA queues 1,024 kernels, a layer's forward pass is some forty
}
NOISE = 0.1
"""Relative scatter between like runs; beyond it a run counts less and less."""

RETRY_BYTES_PER_SECOND = 2.0**21 / 1e-4
"""Before any run: some 100 us for a page of 2 MiB. CUDA's calls that map one, make it accessible
and unmap it took 63 us on an A100, beside its creation (github.com/magnate3/linux-riscv-dev,
nccl/gpu/shm/bench_vmm).
"""
FIXED = FrameworkEfficiency(
    framework="nanotron",
    matmul_slowdown=1.2,
    fp32_accumulation={"h100": 1.0},
    attention_kernel="fa2",
    elementwise_traffic_factor=2.0,
    # FlashAttention-2 reaches 1.2 to 1.3 times its backward FLOP/s forward
    attention_backward_slowdown=1.25,
    tensor_parallel_overlap=0.0,
    tensor_parallel_forward_overlap=0.0,  # one of t pieces runs beside the gathering of the others
    context_parallel_overlap=0.0,
    expert_parallel_overlap=0.0,
    data_parallel_overlap=0.0,
    # sends and receives block, and each is preceded by two messages of metadata
    pipeline_overlap=0.0,
    network=Link(bandwidth_fraction=0.7, latency_s=1e-5, latency_per_peer_s=2e-6, ramp_bytes=1.4e7),
    optimizer_traffic_factor=1.4,
    step_overhead_s=0.0,
    # Held out, 90 % of the runs are within 1.645 of these; half are within a tenth, and some ran
    # twenty times slower.
    time_log_sd=0.8,
    memory_log_sd=0.125,
    # of the grid's pipelines 79 % are held up on 64 nodes, 46 % on 32, 8 to 17 % on fewer
    message_stall_nodes=32,
    fragmentation_fraction=0.0,  # `temporaries_fraction` was fitted with the holes between blocks
    fitted_on="",
)
"""What the runs do not tell, and where the values come from."""


def fit(*, rows: Sequence[Row], clocks_known: bool = False) -> FrameworkEfficiency:
    """The constants that these rows of the grid give; rows that failed, or whose sizes contradict
    each other, teach nothing.

    `clocks_known`: matmuls run at the shipped clocks.
    """
    ran = [row for row in rows if row["status"] == "ok"]
    grouped = groups(ran)
    priors = {
        name: prior
        for name, prior in TIME_PRIORS.items()
        if not (clocks_known and name == "matmul_slowdown")
    }
    start = dataclasses.replace(FIXED, matmul_slowdown=1.0) if clocks_known else FIXED
    timed = _fitted(start, priors, grouped, measured="step_s", predicted="step_s")
    timed = dataclasses.replace(timed, retry_bytes_per_second=_retry_rate(grouped, timed))
    constants = _fitted(
        timed, MEMORY_PRIORS, grouped, measured="used_bytes", predicted="first_stage_bytes"
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
    priors: Mapping[str, Prior],
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
        priors=priors,
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
