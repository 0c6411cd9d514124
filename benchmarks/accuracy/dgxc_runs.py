"""NVIDIA's DGX Cloud benchmarks of NeMo on H100: Llama 3 in 16 bits and fp8, 8 to 2,048 GPUs, as
cases.
"""

from __future__ import annotations

from pathlib import Path

from benchmarks.accuracy.data import Row, read
from benchmarks.accuracy.heldout import Case, layout
from hp_tool.domain.hardware import ClusterQuery
from hp_tool.domain.query import Query
from hp_tool.domain.workload import TrainingWorkload

FILE = "training_dgxc.csv"
SOURCE = "DGX Cloud benchmarks"
MODELS = {"llama3-8b": "llama-3-8b", "llama3-70b": "llama-3-70b"}
DATES = {"v24.11.1": "2024-11", "v25.02": "2025-02", "v25.04": "2025-04"}


def dgxc_cases(folder: Path) -> list[Case]:
    """Return the rows of pre-training, one case each."""
    return [
        _case(row)
        for row in read(folder, FILE)
        if row["task"] == "pretrain" and row["model"] in MODELS
    ]


def _case(row: Row) -> Case:
    precision = "fp8" if row["precision"] == "FP8" else "bf16"
    query = Query(
        kind="training",
        model=MODELS[row["model"]],
        cluster=ClusterQuery(gpu="h100-sxm-80gb", num_gpus=int(row["gpus"])),
        training=TrainingWorkload(
            sequence_length=int(row["seq"]),
            global_batch_size=int(row["gbs"]),
            precision=precision,
            cross_entropy="fused",  # type: ignore[arg-type]
            # NeMo's performance recipes set grad_reduce_in_fp32 to False
            gradient_precision="bf16",
            framework_version=row["release"].removeprefix("v"),
        ),
        parallel=layout(row, "tp", "pp", "vp", "cp", "mbs"),
    )
    sizes = f"TP {row['tp']}, PP {row['pp']}, VP {row['vp'] or 1}, CP {row['cp']}, GBS {row['gbs']}"
    return Case(
        name=MODELS[row["model"]],
        what=f"H100 x{row['gpus']}, {precision}, {sizes}, {row['release'].removeprefix('v')}",
        query=query,
        step_s=float(row["step_time_s"]),
        source=SOURCE,
        date=DATES[row["release"]],
    )
