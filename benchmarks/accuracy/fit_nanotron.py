"""Fit what nanotron adds to isolated kernels: `python -m benchmarks.accuracy.fit_nanotron --data DIR`.

Writes hp_tool/catalog/data/efficiency/frameworks/nanotron/*.yaml from the published grid of runs on 1 to 64 nodes of 8 H100:
thirteen constants of time and three of memory on some thousand runs, robustly, because some of them ran many times slower than
others like them. Priors keep them physical. `fit(rows=...)` fits any of the rows, so that others stay unseen.
"""

from __future__ import annotations

import argparse
import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import least_squares

from benchmarks.accuracy.data import Row, add_data_argument, data_folder, read
from benchmarks.accuracy.fit_frameworks import write
from benchmarks.accuracy.grid_rows import FILE, groups
from hp_tool.domain.efficiency import FrameworkEfficiency, Link

Floats = NDArray[np.float64]
Prior = tuple[float, float, float, float]

TIME_PRIORS: dict[str, Prior] = {
    # name: (mean, standard deviation, lowest, highest)
    "matmul_slowdown": (1.0, 0.15, 0.8, 2.0),  # at sustained clocks
    "elementwise_traffic_factor": (2.0, 0.8, 0.5, 6.0),  # nothing is fused but the norms and the attention core
    "tensor_parallel_overlap": (0.3, 0.3, 0.0, 1.0),
    "data_parallel_overlap": (0.3, 0.3, 0.0, 1.0),
    "all_reduce_overlap": (0.3, 0.3, 0.0, 1.0),
    "bandwidth_fraction": (0.7, 0.3, 0.02, 1.0),
    "attention_slowdown": (1.5, 0.5, 0.8, 4.0),  # FlashAttention-2; kernels timed alone were newer
    "optimizer_traffic_factor": (1.4, 0.5, 0.5, 6.0),
    "step_overhead_s": (0.03, 0.05, 0.0, 1.0),
    "host_launch_s": (1e-4, 7e-5, 3e-6, 7e-4),
    "host_tensor_stall_s": (1e-4, 5e-4, 0.0, 1e-2),
    "host_pipeline_stall_s": (1e-4, 2e-3, 0.0, 1e-2),
    "message_stall_s": (0.1, 0.2, 0.0, 2.0),
}
MEMORY_PRIORS: dict[str, Prior] = {
    "temporaries_fraction": (0.1, 0.2, 0.0, 1.0),
    "workspace_bytes": (3e8, 3e8, 0.0, 2e9),
    "queued_inputs": (50.0, 20.0, 0.0, 200.0),  # CUDA queues 1,024 kernels, a layer's forward pass is some forty
}
NOISE = 0.1
"""Relative scatter between like runs; beyond it a run counts less and less."""

FIXED = FrameworkEfficiency(
    framework="nanotron",
    matmul_slowdown=1.2,
    fp32_accumulation={"h100": 1.0},
    attention_kernel="fa2",
    elementwise_traffic_factor=2.0,
    attention_backward_slowdown=1.25,  # FlashAttention-2 reaches 1.2 to 1.3 times its backward FLOP/s forward
    tensor_parallel_overlap=0.0,
    tensor_parallel_forward_overlap=0.0,  # one of t pieces runs beside the gathering of the others
    context_parallel_overlap=0.0,
    expert_parallel_overlap=0.0,
    data_parallel_overlap=0.0,
    pipeline_overlap=0.0,  # sends and receives block, and each is preceded by two messages of metadata
    network=Link(bandwidth_fraction=0.7, latency_s=1e-5, latency_per_peer_s=2e-6, ramp_bytes=1.4e7),
    optimizer_traffic_factor=1.4,
    step_overhead_s=0.0,
    # Held out, 90 % of the runs are within 1.645 of these; half are within a tenth, and some ran twenty times slower.
    time_log_sd=0.8,
    fitted_gpus=("h100-sxm-80gb",),
    fitted_silicon=("h100",),
    memory_log_sd=0.125,
    message_stall_nodes=32,  # of the grid's pipelines 79 % are held up on 64 nodes, 46 % on 32, 8 to 17 % on fewer
    fragmentation_fraction=0.0,  # `temporaries_fraction` was fitted with the holes between blocks
    fitted_on="",
)
"""What the runs do not tell, and where the values come from."""


def fit(*, rows: Sequence[Row], clocks_known: bool = False) -> FrameworkEfficiency:
    """The constants that these rows of the grid give; rows that failed, or whose sizes contradict each other, teach nothing.

    `clocks_known`: matmuls run at the shipped clocks.
    """
    ran = [row for row in rows if row["status"] == "ok"]
    grouped = groups(ran)
    step_s, used = (np.log(np.concatenate([getattr(g, name) for g in grouped])) for name in ("step_s", "used_bytes"))

    def step_errors(constants: FrameworkEfficiency) -> Floats:
        return np.log(np.concatenate([group.predict(constants).step_s for group in grouped])) - step_s

    def memory_errors(constants: FrameworkEfficiency) -> Floats:
        return np.log(np.concatenate([group.predict(constants).first_stage_bytes for group in grouped])) - used

    priors = {name: prior for name, prior in TIME_PRIORS.items() if not (clocks_known and name == "matmul_slowdown")}
    start = dataclasses.replace(FIXED, matmul_slowdown=1.0) if clocks_known else FIXED
    timed = _fitted(start, priors, step_errors)
    found = _fitted(timed, MEMORY_PRIORS, memory_errors)
    models = " and ".join(sorted({row["model"] for row in ran}))
    return dataclasses.replace(
        found,
        fitted_on=f"{len(used)} runs of nanotron ({models}) on 1 to 64 nodes of 8 H100 by "
        "python -m benchmarks.accuracy.fit_nanotron; see FIXED there for what they do not tell",
    )


def with_constants(start: FrameworkEfficiency, values: dict[str, float]) -> FrameworkEfficiency:
    """`start` with these constants; bandwidth_fraction is the network's."""
    own = {name: value for name, value in values.items() if name != "bandwidth_fraction"}
    share = values.get("bandwidth_fraction", start.network.bandwidth_fraction)
    return dataclasses.replace(start, network=dataclasses.replace(start.network, bandwidth_fraction=share), **own)


def _fitted(
    start: FrameworkEfficiency, priors: dict[str, Prior], errors: Callable[[FrameworkEfficiency], Floats]
) -> FrameworkEfficiency:
    """Maximum a posteriori with Cauchy-like tails: a run ten times slower than predicted pulls no harder than one that is
    twice as slow.
    """
    mean, sd, low, high = (np.array(column) for column in zip(*priors.values(), strict=True))

    def constants(z: Floats, *, digits: int = 16) -> FrameworkEfficiency:
        values = {name: float(f"{value:.{digits}g}") for name, value in zip(priors, mean + z * sd, strict=True)}
        return with_constants(start, values)

    def residuals(z: Floats) -> Floats:
        # The robust loss goes on the runs alone; the priors stay quadratic.
        scaled = errors(constants(z)) / NOISE
        return np.concatenate([np.sqrt(np.log1p(scaled**2)), z])

    bounds = ((low - mean) / sd, (high - mean) / sd)
    found: Any = least_squares(residuals, np.full(len(mean), 0.1), bounds=bounds, diff_step=1e-2, xtol=1e-4, ftol=1e-4)
    return constants(found.x, digits=4)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_data_argument(parser)
    parser.add_argument("--keep-clocks", action="store_true", help="leave the clocks, which frameworks share, as they are")
    arguments = parser.parse_args()
    folder = data_folder(arguments)
    if folder is None:
        return
    if arguments.keep_clocks:
        write("default", fit(rows=read(folder, FILE), clocks_known=True), command="benchmarks.accuracy.fit_nanotron")
        return
    found = fit(rows=read(folder, FILE))
    # Forward matmuls, input gradients and weight gradients take equally long, and only the last accumulate in fp32: they get
    # the slowdown of all.
    slowdown = (2.0 + FIXED.fp32_accumulation["h100"]) * found.matmul_slowdown - 2.0
    found = dataclasses.replace(found, matmul_slowdown=1.0, fp32_accumulation={"h100": float(f"{slowdown:.4g}")})
    write("default", found, command="benchmarks.accuracy.fit_nanotron")
    print(found)


if __name__ == "__main__":
    main()
