"""Megatron Bridge's measured recipes with the knobs of their release, as cases: one a row, dense
models and experts.
"""

from __future__ import annotations

import dataclasses
from pathlib import Path

from benchmarks.accuracy.data import Row, read
from benchmarks.accuracy.heldout import (
    MODELS_BRIDGE,
    SYSTEMS_BRIDGE,
    Case,
    bridge_case,
    bridge_date,
    bridge_precision,
    layout,
)
from benchmarks.accuracy.mlperf_runs import mlperf_cases
from benchmarks.accuracy.moe_runs import moe_cases
from hp_tool.catalog import model
from hp_tool.domain.hardware import ClusterQuery, Precision
from hp_tool.domain.model import ModelSpec
from hp_tool.domain.parallel import Recompute, RecomputeName
from hp_tool.domain.query import Query
from hp_tool.domain.workload import LoraSpec, OverlapSpec, TrainingWorkload

FILE = "training_megatron_bridge_recipes.csv"
FILE_GB300 = "training_megatron_bridge_recipes_2.csv"
FILE_PRESETS = "recipe_settings_by_release.csv"
PRESET = ("release", "model", "system", "precision", "task")
KNOBS = (
    "dispatcher",
    "ep_overlap",
    "recompute_modules",
    "cuda_graph_impl",
    "cuda_graph_modules",
    "offload_layers",
)
SOURCE = "Megatron Bridge and NeMo"
MODELS = {
    "llama3_8b": "llama-3-8b",
    "llama3_70b": "llama-3-70b",
    "qwen3_30b_a3b": "qwen3-30b-a3b",
    "deepseek_v3": "deepseek-v3",
    "gpt_oss_120b": "gpt-oss-120b",
    "gpt_oss_20b": "gpt-oss-20b",
    "kimi_k2": "kimi-k2",
    "llama31_405b": "llama-3.1-405b",
    "nemotron_3_nano": "nemotron-3-nano-30b-a3b",
    "qwen3_235b_a22b": "qwen3-235b-a22b",
}
"""Those of other names are left out."""
HYBRIDS = ("nemotron_3_nano",)
ABSENT = dict.fromkeys(("mtp", "token_drop", "layout"), "")
"""Columns of the first table alone."""
GPUS = {
    "H100": "h100-sxm-80gb",
    "H200": "h200-sxm-141gb",
    "B200": "b200-sxm-180gb",
    "B300": "b300-sxm-288gb",
    "GB200": "gb200-nvl72",
    "GB300": "gb300-nvl72",
}
PRECISIONS: dict[str, Precision] = {
    "fp8_cs": "fp8",
    "fp8_sc": "fp8",
    "fp8_mx": "mxfp8",
    "nvfp4": "nvfp4",
    "bf16": "bf16",
}
SCALING = {"fp8_cs": "tensorwise", "fp8_sc": "blockwise"}
ADAPTERS = LoraSpec(rank=16, target_modules=("linear_qkv",))
"""Megatron Bridge, scripts/performance, llama3_llm_finetune.py (cfg.peft.target_modules)."""
TASKS = {"Pre-Training": "pretrain", "SFT": "sft", "LoRA": "lora"}
DISPATCHERS = {
    "": None,
    "allgather": "allgather",
    "alltoall": "alltoall",
    "flex_deepep": "flex",
    "flex_hybridep": "flex",
}


def pretraining(folder: Path) -> list[Case]:
    """Every release and every audited round of pre-training that is published with its layout."""
    return [
        case for case in (*release_cases(folder), *mlperf_cases(folder)) if case.task == "pretrain"
    ]


def release_cases(folder: Path) -> list[Case]:
    """Every release of every configuration, those printed in two tables once: the one that gives
    the knobs.
    """
    rows = _known_rows(folder)
    known = {(row["gpus"], float(row["tokens_s_gpu"])) for row in rows}
    cases = [recipe_case(row) for row in rows]
    for row in read(folder, "training_megatron_bridge.csv"):
        if (row["gpus"], float(row["tokens_per_s_gpu"])) in known or row[
            "model"
        ] not in MODELS_BRIDGE:
            continue
        if row["system"] in SYSTEMS_BRIDGE and bridge_precision(row) is not None:
            case = bridge_case([row], name=MODELS_BRIDGE[row["model"]])
            version = row["release"].removeprefix("NeMo")
            training = dataclasses.replace(case.query.training, framework_version=version)  # type: ignore[type-var]
            query = dataclasses.replace(case.query, training=training)
            cases.append(dataclasses.replace(case, what=f"{case.what}, {version}", query=query))
    rates = {(gpus, round(rate)) for gpus, rate in known}
    return cases + [case for case in moe_cases(folder) if _rate(case) not in rates]


def _rate(case: Case) -> tuple[str, int]:
    """GPUs, and tokens a second of each."""
    training, gpus = case.query.training, case.cluster.num_gpus
    assert training is not None and gpus is not None
    return str(gpus), round(
        training.global_batch_size * training.sequence_length / case.step_s / gpus
    )


def gb300_cases(folder: Path) -> list[Case]:
    """Recipes on GB300 with their knobs, of models that other cards ran too; a row that does not
    give them has those of its release's preset.
    """
    presets = {tuple(row[name] for name in PRESET): row for row in read(folder, FILE_PRESETS)}
    cases = []
    for row in read(folder, FILE_GB300):
        if row["model"] in MODELS and row["gpu"] == "GB300" and row["model"] not in HYBRIDS:
            cell = (row["release"], row["model"], "gb300", row["precision"], row["task"])
            known = (
                {}
                if row["knobs_from"]
                else {name: presets.get(cell, {}).get(name, "") for name in KNOBS}
            )
            narrow = (
                {}
                if row["knobs_from"]
                else {"fp8_params": str(int(row["precision"].startswith("fp8")))}
            )
            cases.append(recipe_case(ABSENT | row | known | narrow))
    return cases


def hybrid_cases(folder: Path) -> list[Case]:
    """Recipes of models whose layers differ, on all cards."""
    return [
        recipe_case(ABSENT | row) for row in read(folder, FILE_GB300) if row["model"] in HYBRIDS
    ]


def recipe_cases(folder: Path) -> list[Case]:
    """The rows that give their knobs."""
    return [recipe_case(row) for row in _known_rows(folder)]


def _known_rows(folder: Path) -> list[Row]:
    return [row for row in read(folder, FILE) if row["model"] in MODELS and row["gpu"] in GPUS]


def recipe_case(row: Row) -> Case:
    """The row as a case."""
    precision, task = PRECISIONS[row["precision"]], TASKS[row["task"]]
    adapters, quantised = task == "lora", row["fp8_params"] == "1" and precision in ("fp8", "mxfp8")
    query = Query(
        kind="training",
        model=_model(row),
        cluster=ClusterQuery(gpu=GPUS[row["gpu"]], num_gpus=int(row["gpus"])),
        training=TrainingWorkload(
            sequence_length=int(row["seq_tokens"]),
            global_batch_size=int(row["gbs"]),
            precision=precision,
            fp8_recipe=SCALING.get(row["precision"]),
            task=task,
            lora=ADAPTERS if adapters else None,  # type: ignore[arg-type]
            cross_entropy="in_place",
            gradient_precision="bf16",
            framework_version=row["release"],
            parameter_precision="fp8" if quantised and not adapters else None,
            frozen_precision="fp8" if quantised and adapters else None,
            expert_capacity_factor=1.0 if row["token_drop"] == "tokendrop" else None,
            optimizer_precision="bf16"
            if row["model"] == "deepseek_v3"
            else None,  # as its recipe's source says
            overlap=OverlapSpec(expert_parallel=True) if row["ep_overlap"] == "True" else None,
            cuda_graphs=_records_graphs(row) or None,
            cuda_graph_modules=_recorded(row),  # type: ignore[arg-type]
            offload="activations" if row["offload_layers"] else None,
            offload_fraction=min(int(row["offload_layers"]) / 80, 1.0)
            if row["offload_layers"]
            else None,  # Llama 3 70B's
        ),
        parallel=layout(
            row,
            "tp",
            "pp",
            "vp",
            "cp",
            "ep",
            "etp",
            "mbs",
            zero_stage=3 if row["fsdp"] == "1" else 1,
            recompute=_recompute(row),
            pipeline_layout=row["layout"] or None,
            moe_token_dispatcher_type=DISPATCHERS[row["dispatcher"]],
        ),
    )
    sizes = (
        f"TP {row['tp']}, PP {row['pp']}, VP {row['vp']}, EP "
        f"{row['ep']}{', FSDP' if row['fsdp'] == '1' else ''}"
    )
    return Case(
        name=MODELS[row["model"]] + ("" if task == "pretrain" else f" {task}"),
        what=f"{row['gpu']} x{row['gpus']}, {row['precision']}, {sizes}, GBS {row['gbs']}, "
        f"{row['release']}",
        query=query,
        step_s=float(row["step_s"]),
        source=SOURCE,
        date=bridge_date(row["release"]),
    )


def _model(row: Row) -> str | ModelSpec:
    name = MODELS[row["model"]]
    return (
        dataclasses.replace(model(name), num_nextn_predict_layers=0)
        if row["mtp"] == "w/o MTP"
        else name
    )


def _recompute(row: Row) -> RecomputeName | Recompute:
    modules = tuple(row["recompute_modules"].split("+")) if row["recompute_modules"] else ()
    return Recompute(granularity="selective", modules=modules) if modules else "none"  # type: ignore[arg-type]


def _records_graphs(row: Row) -> bool:
    """Whether graphs are recorded: modules alone, with the implementation `none`, record
    nothing.
    """
    implementation = row["cuda_graph_impl"]
    return implementation in ("local", "full_iteration") or (
        implementation != "none" and bool(row["cuda_graph_modules"])
    )


def _recorded(row: Row) -> tuple[str, ...] | None:
    """The modules recorded; None: the whole iteration, or nothing."""
    modules = tuple(row["cuda_graph_modules"].split("+")) if row["cuda_graph_modules"] else None
    return None if modules == ("full_iteration",) else modules
