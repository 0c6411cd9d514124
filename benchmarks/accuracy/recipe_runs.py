"""Megatron Bridge's measured recipes with the knobs of the same release, as cases; dense models."""

from __future__ import annotations

from collections import defaultdict
from pathlib import Path
from statistics import median
from typing import cast

from benchmarks.accuracy.data import Row, read
from benchmarks.accuracy.heldout import Case
from hp_tool.domain.hardware import ClusterQuery, Precision
from hp_tool.domain.parallel import ParallelQuery
from hp_tool.domain.query import Query
from hp_tool.domain.workload import LoraSpec, TrainingWorkload

MODELS = {"llama3_8b": "llama-3-8b", "llama3_70b": "llama-3-70b"}
GPUS = {"H100": "h100-sxm-80gb", "B200": "b200-sxm-180gb", "GB200": "gb200-nvl72"}
PRECISIONS: dict[str, Precision] = {"fp8_cs": "fp8", "fp8_mx": "mxfp8", "nvfp4": "nvfp4", "bf16": "bf16"}
KEYS = ("task", "model", "gpu", "gpus", "precision", "seq_tokens", "gbs", "mbs", "tp", "pp", "vp", "cp", "fsdp")


def recipe_cases(folder: Path) -> list[Case]:
    """Releases of one configuration answer with their median."""
    grouped: dict[tuple[str, ...], list[Row]] = defaultdict(list)
    for row in read(folder, "training_megatron_bridge_recipes.csv"):
        if row["model"] in MODELS:
            grouped[tuple(row[key] for key in KEYS)].append(row)
    return [_case(rows) for rows in grouped.values()]


def _case(rows: list[Row]) -> Case:
    row, lora = rows[-1], rows[-1]["task"] == "LoRA"
    precision = PRECISIONS[row["precision"]]
    query = Query(
        kind="training", model=MODELS[row["model"]],
        cluster=ClusterQuery(gpu=GPUS[row["gpu"]], num_gpus=int(row["gpus"])),
        training=TrainingWorkload(
            sequence_length=int(row["seq_tokens"]), global_batch_size=int(row["gbs"]), precision=precision,
            fp8_recipe="tensorwise" if precision == "fp8" else None, task="lora" if lora else "pretrain",
            lora=LoraSpec(rank=16) if lora else None, cross_entropy="fused", gradient_precision="bf16",
            parameter_precision="fp8" if row["fp8_params"] == "1" and not lora and precision == "fp8" else None,
            cuda_graphs=row["cuda_graph_impl"] in ("local", "transformer_engine") or bool(row["cuda_graph_modules"]),
        ),
        parallel=ParallelQuery(
            tensor_parallel_size=int(row["tp"]), pipeline_parallel_size=int(row["pp"]),
            virtual_pipeline_parallel_size=int(row["vp"] or 1), context_parallel_size=int(row["cp"]),
            micro_batch_size=int(row["mbs"]), recompute="none", zero_stage=3 if row["fsdp"] == "1" else 1,
        ),
    )  # fmt: skip
    sizes = f"TP {row['tp']}, PP {row['pp']}, VP {row['vp']}{', FSDP' if row['fsdp'] == '1' else ''}, GBS {row['gbs']}"
    return Case(
        name=f"{MODELS[row['model']]} {row['task'].lower()}",
        what=f"{row['gpu']} x{row['gpus']}, {cast(str, row['precision'])}, {sizes}",
        query=query,
        step_s=median(float(one["step_s"]) for one in rows),
    )
