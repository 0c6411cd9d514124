"""A release's presets as the knobs that a query has."""

from __future__ import annotations

import csv
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.accuracy.recipe_runs import DISPATCHERS, GPUS, MODELS, PRECISIONS, SCALING, TASKS
from hp_tool.catalog import model
from hp_tool.domain.hardware import Precision

FILE = "recipe_settings_by_release.csv"
NAMES = {**MODELS, "nemotron_3_super": "nemotron-3-super-120b-a12b"}
"""Names of the catalogue by the table's; others are left out."""
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
    is_hybrid: bool = False
    """Some layers are recurrent: its presets say nothing of other models."""
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
        rows = [
            row
            for row in csv.DictReader(file)
            if row["model"] in NAMES and row["system"].upper() in GPUS
        ]
    rows.sort(key=lambda row: row["release"])
    return list({preset.cell: preset for preset in map(_preset, _with_modules(rows))}.values())


def _with_modules(rows: Iterable[dict[str, str]]) -> Iterator[dict[str, str]]:
    """Yield the rows, oldest release first; a hybrid's row that names no recorded modules gets
    those of an earlier release.

    From 26.08 on presets name them by set_cuda_graph_modules, which the table does not follow
    (perf_recipes/nemotronh: the modules are those of 26.06).
    """
    before: dict[tuple[str, ...], str] = {}
    for row in rows:
        cell = tuple(row[name] for name in ("model", "system", "precision", "task"))
        if _is_hybrid(row) and row["cuda_graph_impl"] == "transformer_engine":
            before[cell] = row["cuda_graph_modules"] or before.get(cell, "")
            row = {**row, "cuda_graph_modules": before[cell]}
        yield row


def _is_hybrid(row: dict[str, str]) -> bool:
    return any(kind.is_recurrent for _, kind in model(NAMES[row["model"]]).kinds)


def _preset(row: dict[str, str]) -> Preset:
    return Preset(
        release=row["release"],
        model=NAMES[row["model"]],
        gpu=GPUS[row["system"].upper()],
        precision=PRECISIONS.get(row["precision"], "fp8"),
        scaling=SCALING.get(row["precision"], "delayed" if row["precision"] == "fp8_ds" else None),
        task=TASKS[row["task"]],
        num_gpus=int(row["gpus"]),
        global_batch_size=int(row["gbs"]) if row["gbs"].isdigit() else None,
        kind=_kind(row),
        is_hybrid=_is_hybrid(row),
        settings=_settings(row),
    )


def _kind(row: dict[str, str]) -> str:
    spec = model(NAMES[row["model"]])
    return "dense" if not spec.num_experts else "latent" if spec.kv_lora_rank else "experts"


def _settings(row: dict[str, str]) -> dict[str, Setting]:
    values: Setting = {key: None for keys in GROUPS.values() for key in keys}
    if row["cuda_graph_impl"] not in ("", "none"):
        modules = [
            name for name in _modules(row["cuda_graph_modules"]) if name != "full"
        ]  # an older name of the whole layer
        whole = row["cuda_graph_impl"] != "transformer_engine" or modules == ["full_iteration"]
        values["training.cuda_graphs"] = True
        values["training.cuda_graph_modules"] = None if whole else modules or WHOLE_LAYER
    overlap = {"expert_parallel": True} if row["ep_overlap"] == "True" else {}
    if {row.get("overlap_grad_reduce"), row.get("overlap_param_gather")} == {"False"}:
        overlap["data_parallel"] = False
    values["training.overlap"] = overlap or None
    if _kind(row) != "dense":
        values["parallel.moe_token_dispatcher_type"] = DISPATCHERS[row["dispatcher"]] or "alltoall"
        values["parallel.expert_tensor_parallel_size"] = int(row["etp"] or 1)
    layers = model(NAMES[row["model"]]).num_hidden_layers
    # A count of all layers, which Megatron Core refuses, stands beside a switch that is off
    # (perf_recipes/gpt_oss/common.py).
    if row["offload_layers"] and int(row["offload_layers"]) < layers:
        values["training.offload"] = "activations"
        values["training.offload_fraction"] = round(int(row["offload_layers"]) / layers, 4)
    if row["fsdp"] == "True":
        values["parallel.zero_stage"] = 3
    if row["recompute_num_layers"]:
        recomputed = int(row["recompute_num_layers"])
        values["parallel.recompute"] = {
            "granularity": "full",
            "method": "block",
            "num_layers": recomputed,
        }
    elif row["recompute_modules"]:
        values["parallel.recompute"] = {
            "granularity": "selective",
            "modules": sorted(_modules(row["recompute_modules"])),
        }
    return {group: {key: values[key] for key in keys} for group, keys in GROUPS.items()}


def _modules(text: str) -> list[str]:
    return [name for name in text.split("+") if name]
