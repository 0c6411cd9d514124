"""Fit what InternEvo adds to isolated kernels: `python -m benchmarks.accuracy.fit_internevo --data DIR`.

Writes hp_tool/catalog/data/efficiency/frameworks/internevo/default.yaml from 26 step times of InternLM-7B on 8 to 128 A100 and
16 figures of memory on A800. One model tells few constants apart: priors hold those that it does not. `leave_one_out` predicts
every run by constants that never saw its number of GPUs, or its layout.
"""

from __future__ import annotations

import argparse
import dataclasses
import math
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
from scipy.optimize import least_squares

from benchmarks.accuracy.comparison import Comparison
from benchmarks.accuracy.data import add_data_argument, data_folder
from benchmarks.accuracy.fit_frameworks import FIXED, Floats, write
from benchmarks.accuracy.heldout import Case
from benchmarks.accuracy.internevo_runs import internevo_cases, memory_cases
from benchmarks.accuracy.prepared import Prepared, seen
from hp_tool.domain.efficiency import FrameworkEfficiency
from hp_tool.training import estimate
from hp_tool.units import GIB

PRIORS = {
    # name: (mean, standard deviation, lowest, highest)
    "elementwise_traffic_factor": (1.6, 0.4, 0.5, 6.0),
    "attention_slowdown": (1.3, 0.3, 0.7, 4.0),  # FlashAttention of 2023
    "tensor_parallel_overlap": (0.5, 0.3, 0.0, 1.0),
    "data_parallel_overlap": (0.7, 0.2, 0.0, 1.0),
    "network_bandwidth_fraction": (0.6, 0.2, 0.1, 1.0),
    "log_broadcast_ramp": (math.log(1e9), 1.5, math.log(1e6), math.log(1e11)),
    "optimizer_traffic_factor": (4.0, 1.0, 1.0, 8.0),  # AdamW's kernels one by one, and the copies before and after it
}
NOISE = 0.03
"""Relative scatter taken for one published run: the same step stands twice in the table, 1.6 % apart."""
START = dataclasses.replace(
    FIXED,
    framework="internevo",
    attention_kernel="fa2",
    context_parallel_overlap=0.0,
)
"""What the runs do not tell: pipelines and links inside a node are as elsewhere."""


def constants(x: Floats) -> FrameworkEfficiency:
    """The profile with the fitted constants in the order of PRIORS."""
    values = dict(zip(PRIORS, (float(f"{v:.4g}") for v in x), strict=True))
    link = dataclasses.replace(START.network, bandwidth_fraction=values.pop("network_bandwidth_fraction"))
    ramp = float(f"{math.exp(values.pop('log_broadcast_ramp')):.4g}")
    return dataclasses.replace(START, network=link, broadcast_ramp_bytes=ramp, **values)  # type: ignore[arg-type]


def fit(runs: Sequence[Prepared]) -> Floats:
    """Maximum a posteriori."""
    mean, sd, low, high = (np.array(column) for column in zip(*PRIORS.values(), strict=True))

    def residuals(x: Floats) -> Floats:
        found = constants(x)
        return np.concatenate([[np.log(run.ratio(found)) / NOISE for run in runs], (x - mean) / sd])

    return least_squares(residuals, mean, bounds=(low, high), diff_step=1e-3, xtol=1e-5, ftol=1e-5).x


def by_gpus(run: Prepared) -> str:
    return str(run.problem.cluster.num_gpus)


def by_layout(run: Prepared) -> str:
    """Tensor parallelism, micro-batch, recomputation and what the optimizer is sharded over."""
    parallel = run.case.query.parallel
    shard = "all" if parallel.data_parallel_shard_size == 0 else "node"
    return f"{parallel.tensor_parallel_size} {parallel.micro_batch_size} {parallel.recompute} {shard}"


LEFT_OUT: dict[str, Callable[[Prepared], str]] = {"number of GPUs": by_gpus, "layout": by_layout}


def leave_one_out(runs: Sequence[Prepared], key: Callable[[Prepared], str]) -> list[Comparison]:
    """Every run, predicted by constants that never saw one of its key."""
    found = []
    for group in dict.fromkeys(map(key, runs)):
        others = [run for run in runs if key(run) != group]
        fitted = seen(constants(fit(others)), others)
        found += [run.compare(fitted) for run in runs if key(run) == group]
    return found


def used_memory(cases: Sequence[Case]) -> list[Comparison]:
    """What the GPU was seen to use beside what is allocated at the peak, in GiB."""
    found = []
    for case in cases:
        memory = estimate(query=case.query, with_fixes=False).memory
        assert memory is not None and case.used_bytes is not None
        found.append(
            Comparison(
                source="InternEvo", model=case.name, what=case.what, gpu=case.card, part=case.card,
                published=case.used_bytes / GIB, predicted=memory.allocated_bytes / GIB,
            )
        )  # fmt: skip
    return found


def cached_share(found: Sequence[Comparison]) -> float:
    """How much more than is allocated the allocator holds, typically."""
    return float(np.median([1.0 / (1.0 + one.error) for one in found])) - 1.0


def memory_left_out(folder: Path) -> list[Comparison]:
    """Memory that the allocator holds, by what the other rows say of how much it caches."""
    found = used_memory(memory_cases(folder))
    return [
        dataclasses.replace(one, predicted=one.predicted * (1.0 + cached_share([row for row in found if row is not one])))
        for one in found
    ]


def log_sd(found: Sequence[Comparison]) -> float:
    """Root mean square of log(published / predicted), to two digits."""
    return float(f"{math.sqrt(np.mean([math.log1p(one.error) ** 2 for one in found])):.2g}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_data_argument(parser)
    folder = data_folder(parser.parse_args())
    if folder is None:
        return
    runs = [Prepared.of(case) for case in internevo_cases(folder)]
    left_out = {name: leave_one_out(runs, key) for name, key in LEFT_OUT.items()}
    used, held = used_memory(memory_cases(folder)), memory_left_out(folder)
    found = dataclasses.replace(
        seen(constants(fit(runs)), runs),
        memory_log_sd=log_sd(held),
        reserved_log_sd=log_sd(used),
        fragmentation_fraction=float(f"{cached_share(used):.2g}"),
        fitted_on=f"{len(runs)} step times of InternLM-7B on 8 to 128 A100 and {len(used)} figures of memory on A800, by "
        "python -m benchmarks.accuracy.fit_internevo; see START there for what those rows do not tell",
    )
    write("default", found, command="benchmarks.accuracy.fit_internevo")
    for name, rows in [*left_out.items(), ("row of memory", held)]:
        errors = np.array([abs(one.error) for one in rows])
        print(f"InternEvo leaving one {name} out: mean {errors.mean():.2%}, worst {errors.max():.2%}")


if __name__ == "__main__":
    main()
