"""Reserved memory of FSDP runs as cases."""

from __future__ import annotations

import dataclasses
from pathlib import Path

from benchmarks.accuracy.data import Row, read
from benchmarks.accuracy.fsdp_runs import MODELS_TITAN
from benchmarks.accuracy.heldout import Case, layout
from hp_tool.catalog import gpu
from hp_tool.domain.hardware import ClusterQuery
from hp_tool.domain.query import Query
from hp_tool.domain.units import GIB
from hp_tool.domain.workload import TrainingWorkload

H100_96GB = dataclasses.replace(
    gpu("h100-sxm-80gb"),
    memory_bytes=round(94.99 * GIB),
    memory_bandwidth_bytes_per_second=2.4e12,
    power_w=500.0,
)
"""torchtitan's H100 of December 2024: 96 GB of HBM2e; 95 GiB as torch reports it."""


def reserved_cases(folder: Path) -> list[Case]:
    """Llama 3.1 of 8B and 70B with every layer recomputed, float8 matmuls (compilation changes none
    of it). Runs near capacity show the allocator more than the model.
    """
    rows = [
        row
        for row in read(folder, "training_torchtitan.csv")
        if row["ac"] == "full" and row["mem_gib"]
    ]
    return [_case(row) for row in rows]


def _case(row: Row) -> Case:
    query = Query(
        kind="training",
        model=MODELS_TITAN[row["model"]],
        cluster=ClusterQuery(gpu=H100_96GB, num_gpus=int(row["gpus"])),
        training=TrainingWorkload(
            sequence_length=int(row["seq"]),
            global_batch_size=int(row["gbs"]),
            framework="torch-fsdp",
            precision="fp8",
        ),
        parallel=layout(row, "tp", "cp", micro_batch_size=int(row["local_bs"]), recompute="full"),
    )
    what = (
        f"H100 x{row['gpus']}, s {row['seq']}, mbs {row['local_bs']}, TP {row['tp']}, CP "
        f"{row['cp']}"
    )
    what += ", async TP" if row["async_tp"] == "1" else ""
    return Case(
        name=row["model"],
        what=what,
        query=query,
        reserved_bytes=float(row["mem_gib"]) * GIB,
        source="torchtitan",
    )
