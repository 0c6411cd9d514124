"""A release's presets as the knobs that a query has."""

from __future__ import annotations

import csv
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.accuracy.recipe_runs import DISPATCHERS, GPUS, HYBRIDS, MODELS, PRECISIONS, SCALING, TASKS
from hp_tool.catalog import model
from hp_tool.domain.hardware import Precision

FILE = "recipe_settings_by_release.csv"
Setting = dict[str, Any]
"""Values of keys by their dotted names (`training.cuda_graphs`)."""
GROUPS: dict[str, tuple[str, ...]] = {
    "graphs": ("training.cuda_graphs", "training.cuda_graph_modules"),
    "overlap": ("training.overlap",),
    "dispatcher": ("parallel.moe_token_dispatcher_type",),
    "recompute": ("parallel.recompute",),
    "offload": ("training.offload", "training.offload_fraction"),
    "sharding": ("parallel.zero_stage",),
    "experts": ("parallel.expert_tensor_parallel_size",),
}
"""Keys that are set together."""
WHOLE_LAYER = ["attn", "mlp"]
"""What Transformer Engine's graphs hold of a dense layer where a preset names no module."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Preset:
    """What one preset sets, and for which training."""

    release: str
    model: str
    gpu: str
    precision: Precision
    scaling: str | None
    task: str
    num_gpus: int
    global_batch_size: int | None
    kind: str
    """`dense`, `experts`, or `latent` for experts with latent attention."""
    settings: dict[str, Setting]
    """Of each group; a key that the preset leaves to the library is None."""

    @property
    def cell(self) -> tuple[object, ...]:
        """What a query says that a preset is chosen by."""
        sizes = (self.num_gpus, self.global_batch_size)
        return (self.release, self.model, self.gpu, self.precision, self.scaling, self.task, *sizes)


def presets(path: Path) -> list[Preset]:
    """Return the presets of models and GPUs that the catalogue has, those of one cell once."""
    with path.open(newline="") as file:
        known = MODELS.keys() - set(HYBRIDS)
        rows = [row for row in csv.DictReader(file) if row["model"] in known and row["system"].upper() in GPUS]
    return list({preset.cell: preset for preset in map(_preset, rows)}.values())


def _preset(row: dict[str, str]) -> Preset:
    return Preset(
        release=row["release"],
        model=MODELS[row["model"]],
        gpu=GPUS[row["system"].upper()],
        precision=PRECISIONS.get(row["precision"], "fp8"),
        scaling=SCALING.get(row["precision"], "delayed" if row["precision"] == "fp8_ds" else None),
        task=TASKS[row["task"]],
        num_gpus=int(row["gpus"]),
        global_batch_size=int(row["gbs"]) if row["gbs"].isdigit() else None,
        kind=_kind(row),
        settings=_settings(row),
    )


def _kind(row: dict[str, str]) -> str:
    spec = model(MODELS[row["model"]])
    return "dense" if not spec.num_experts else "latent" if spec.kv_lora_rank else "experts"


def _settings(row: dict[str, str]) -> dict[str, Setting]:
    values: Setting = {key: None for keys in GROUPS.values() for key in keys}
    if row["cuda_graph_impl"] not in ("", "none"):
        modules = _modules(row["cuda_graph_modules"])
        whole = row["cuda_graph_impl"] != "transformer_engine" or modules == ["full_iteration"]
        values["training.cuda_graphs"] = True
        values["training.cuda_graph_modules"] = None if whole else modules or WHOLE_LAYER
    if row["ep_overlap"] == "True":
        values["training.overlap"] = {"expert_parallel": True}
    if _kind(row) != "dense":
        values["parallel.moe_token_dispatcher_type"] = DISPATCHERS[row["dispatcher"]] or "alltoall"
        values["parallel.expert_tensor_parallel_size"] = int(row["etp"] or 1)
    if row["offload_layers"]:
        spec = model(MODELS[row["model"]])
        values["training.offload"] = "activations"
        values["training.offload_fraction"] = round(min(int(row["offload_layers"]) / spec.num_hidden_layers, 1.0), 4)
    if row["fsdp"] == "True":
        values["parallel.zero_stage"] = 3
    if row["recompute_num_layers"]:
        layers = int(row["recompute_num_layers"])
        values["parallel.recompute"] = {"granularity": "full", "method": "block", "num_layers": layers}
    elif row["recompute_modules"]:
        values["parallel.recompute"] = {"granularity": "selective", "modules": sorted(_modules(row["recompute_modules"]))}
    return {group: {key: values[key] for key in keys} for group, keys in GROUPS.items()}


def _modules(text: str) -> list[str]:
    return [name for name in text.split("+") if name]
