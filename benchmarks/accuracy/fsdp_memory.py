"""Reserved memory of FSDP runs, beside what is predicted."""

from __future__ import annotations

import dataclasses
import math
from pathlib import Path
from statistics import mean

from benchmarks.accuracy.comparison import Comparison
from benchmarks.accuracy.data import Row, read
from benchmarks.accuracy.fsdp_runs import MODELS_TITAN
from hp_tool.catalog import gpu
from hp_tool.domain.hardware import ClusterQuery
from hp_tool.domain.parallel import ParallelQuery
from hp_tool.domain.query import Query
from hp_tool.domain.workload import TrainingWorkload
from hp_tool.training import estimate
from hp_tool.units import GIB

H100_96GB = dataclasses.replace(
    gpu("h100-sxm-80gb"), memory_bytes=round(94.99 * GIB), memory_bandwidth_bytes_per_second=2.4e12, power_w=500.0
)
"""torchtitan's H100 of December 2024: 96 GB of HBM2e; 95 GiB as torch reports it."""


def reserved(folder: Path) -> list[Comparison]:
    """Llama 3.1 of 8B and 70B with every layer recomputed, float8 matmuls (compilation changes none of it). Runs near
    capacity show the allocator more than the model.
    """
    rows = [row for row in read(folder, "training_torchtitan.csv") if row["ac"] == "full" and row["mem_gib"]]
    return [_compare(row) for row in rows]


def _compare(row: Row) -> Comparison:
    query = Query(
        kind="training", model=MODELS_TITAN[row["model"]],
        cluster=ClusterQuery(gpu=H100_96GB, num_gpus=int(row["gpus"])),
        training=TrainingWorkload(
            sequence_length=int(row["seq"]), global_batch_size=int(row["gbs"]), framework="torch-fsdp", precision="fp8"
        ),
        parallel=ParallelQuery(
            tensor_parallel_size=int(row["tp"]), context_parallel_size=int(row["cp"]), micro_batch_size=int(row["local_bs"]),
            recompute="full",
        ),
    )  # fmt: skip
    answer = estimate(query=query, with_fixes=False)
    memory, intervals = answer.memory, answer.intervals
    assert memory is not None and intervals is not None and intervals.memory_reserved_bytes is not None
    low, high = (bound / memory.total_bytes * memory.reserved_bytes / GIB for bound in intervals.memory_reserved_bytes)
    what = f"H100 x{row['gpus']}, s {row['seq']}, mbs {row['local_bs']}, TP {row['tp']}, CP {row['cp']}"
    return Comparison(
        source="reserved", model=row["model"], what=f"{what}{', async TP' if row['async_tp'] == '1' else ''}",
        published=float(row["mem_gib"]), predicted=memory.reserved_bytes / GIB, low=low, high=high,
    )  # fmt: skip


def scatter_above(folder: Path) -> float:
    """Root mean square of log(published / predicted) of the runs that reserved more than predicted, to two digits: how far
    the allocator's own needs reach. Nobody published reserved memory of Megatron's runs beside what was allocated; the
    allocator is PyTorch's for all.
    """
    logs = [-math.log1p(row.error) for row in reserved(folder)]
    return float(f"{math.sqrt(mean(x * x for x in logs if x > 0.0)):.2g}")
