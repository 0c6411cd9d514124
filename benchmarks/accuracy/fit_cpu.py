"""Measure the `cpu` constants of this machine with one process of one thread: `python -m
benchmarks.accuracy.fit_cpu` (requires torch).

Writes hp_tool/catalog/data/efficiency/silicon/cpu.yaml. The constants come from operations that
`hp-tool calibrate` times on two processes: matmuls, attention, elementwise kernels, and gloo
collectives over loopback. Fractions are relative to the catalogue's `cpu` entry. A search
calibrates the differences of another host.
"""

from __future__ import annotations

import dataclasses
import datetime

from evidence.fitted_file import FittedFile
from hp_tool.catalog import cluster
from hp_tool.cluster.launchers.local import LocalLauncher
from hp_tool.domain.hardware import ClusterQuery
from hp_tool.loop.learning.machine import benchmark_machine

COMMAND = "python -m benchmarks.accuracy.fit_cpu"
MEASURED = (
    "matmul",
    "attention",
    "memory_fraction",
    "kernel_overhead_s",
    "nvlink",
    "all_to_all",
)


def measure_constants() -> FittedFile:
    """Time the operations and return the catalog file with their constants."""
    machine = cluster(ClusterQuery(gpu="cpu", num_gpus=2))
    report, _ = benchmark_machine(
        cluster=machine, launcher=LocalLauncher(), precisions=("bf16", "fp32")
    )
    for name, (count, error) in report.errors.items():
        print(f"{name}: {count} operations, median error {error:.1%}")
    constants = dataclasses.asdict(report.profile.gpu)
    today = datetime.datetime.now(datetime.UTC).date()
    return FittedFile(
        file="silicon/cpu.yaml",
        fields={
            "gpu": "cpu",
            **{name: constants[name] for name in MEASURED},
            "context_bytes": 0.0,
            "fitted_on": f"{constants['fitted_on']}, {today}",
        },
    )


if __name__ == "__main__":
    measure_constants().write(command=COMMAND)
