"""MLPerf Training's audited runs as cases: GPT-3 175B, Llama 3.1 405B, and LoRA on Llama 2 70B."""

from __future__ import annotations

from pathlib import Path

from benchmarks.accuracy.data import Row, read
from benchmarks.accuracy.heldout import Case, layout
from hp_tool.domain.hardware import ClusterQuery
from hp_tool.domain.query import Query
from hp_tool.domain.units import GIB
from hp_tool.domain.workload import LoraSpec, OverlapSpec, TrainingWorkload

MODELS = {
    "gpt3": "gpt3-175b",
    "llama31_405b": "llama-3.1-405b",
    "llama31_8b": "llama-3.1-8b",
    "llama2_70b_lora": "llama-2-70b",
}
GPUS = {
    "H100": "h100-sxm-80gb",
    "H200": "h200-sxm-141gb",
    "H200-NVL": "h200-nvl-141gb",
    "B200": "b200-sxm-180gb",
    "GB200": "gb200-nvl72",
    "L40S": "l40s-48gb",
    "MI300X": "mi300x-192gb",
    "MI325X": "mi325x-256gb",
    "MI355X": "mi355x-288gb",
}
ROUNDS = {
    "v3.0": "2023-06",
    "v3.1": "2023-11",
    "v4.0": "2024-06",
    "v4.1": "2024-11",
    "v5.0": "2025-06",
    "v5.1": "2025-11",
}
"""When MLCommons published them, and so the release that their software counts as: submissions add
to the container that they name, which is one to five months older. AMD's run other software.
"""
ADAPTERS = LoraSpec(rank=16, target_modules=("linear_qkv", "linear_proj"))
"""As the table says, which does not tell of dropout: peaks of memory lie between those without it
and with it.
"""


def mlperf_cases(folder: Path) -> list[Case]:
    """A case for each result; several submitters of one setting are several cases."""
    return [_case(row) for row in read(folder, "training_mlperf.csv")]


def cdna4_cases(folder: Path) -> list[Case]:
    """Llama 3.1 8B on 8 MI355X: four submitters of one recipe, whom no constant saw."""
    return [_case(row) for row in read(folder, "training_mlperf_2.csv")]


def _case(row: Row) -> Case:
    lora, date = row["model"] == "llama2_70b_lora", ROUNDS[row["round"]]
    gpus, quantised = int(row["gpus"]), row["fp8_params"] == "1"
    query = Query(
        kind="training",
        model=MODELS[row["model"]],
        cluster=ClusterQuery(
            gpu=GPUS[row["gpu"]], num_gpus=gpus, gpus_per_node=min(int(row["gpus_per_node"]), gpus)
        ),
        training=TrainingWorkload(
            sequence_length=int(row["seq_tokens"]),
            global_batch_size=int(row["gbs"]),
            precision="fp8",
            task="lora" if lora else "pretrain",
            lora=ADAPTERS if lora else None,
            cross_entropy="fused",
            gradient_precision="bf16",
            parameter_precision="fp8" if quantised and not lora else None,
            frozen_precision="fp8" if quantised and lora else None,
            cuda_graphs=row["cuda_graphs"] == "1",
            framework_version=None if row["gpu"].startswith("MI") else date[2:].replace("-", "."),
            overlap=None if row["tp_overlap"] == "1" else OverlapSpec(tensor_parallel=False),
        ),
        parallel=layout(
            row,
            "tp",
            "pp",
            "vp",
            "cp",
            "mbs",
            sequence_parallel=row["sp"] == "1",
            recompute=row["recompute"] or "none",
        ),
    )
    sizes = f"TP {row['tp']}, PP {row['pp']}, CP {row['cp']}, GBS {row['gbs']}"
    return Case(
        name=f"{MODELS[row['model']]}{' lora' if lora else ''}",
        what=f"{row['gpu']} x{gpus}, {row['round']} {row['submitter']}, {sizes}",
        query=query,
        step_s=float(row["step_s"]),
        allocated_bytes=float(row["peak_allocated_gib"]) * GIB
        if row.get("peak_allocated_gib")
        else None,
        source="MLPerf Training",
        date=date,
    )
