"""Read the presets of a release as settings of a query."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.accuracy.data import rows
from evidence.cases import is_known
from evidence.megatron_bridge import DISPATCHERS, FP8
from evidence.table import Row
from hp_tool.catalog import model
from hp_tool.domain.hardware import Precision

TABLE = "recipe_settings_by_release"
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
"""Modules of a dense layer in Transformer Engine's graphs, for presets that name none."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Preset:
    """The settings of one preset, and the training to which it applies."""

    release: str
    model: str
    gpu: str
    precision: Precision
    scaling: str | None
    task: str
    num_gpus: int
    global_batch_size: int | None
    kind: str
    """`dense`, `experts`, or `latent` for an MoE model with latent attention."""
    is_hybrid: bool = False
    """True if some layers are recurrent. Such presets do not apply to other models."""
    settings: dict[str, Setting]
    """Settings of each group. A key that the preset leaves to the library is None."""

    @property
    def cell(self) -> tuple[object, ...]:
        """Fields of a query by which a preset is chosen."""
        sizes = (self.num_gpus, self.global_batch_size)
        return (self.release, self.model, self.gpu, self.precision, self.scaling, self.task, *sizes)


def read_presets(folder: Path) -> list[Preset]:
    """Return the presets of models and GPUs in the catalogue, one per training."""
    known = [row for row in rows(folder, TABLE) if is_known(row)]
    known.sort(key=lambda row: str(row["framework_version"]))
    return list({preset.cell: preset for preset in map(_preset, _with_modules(known))}.values())


def _with_modules(rows: Iterable[Row]) -> Iterator[Row]:
    """Yield the rows, oldest release first.

    A hybrid's row that names no recorded modules gets those of an earlier release. Since 26.08,
    presets name them by set_cuda_graph_modules, which the table lacks (perf_recipes/nemotronh: the
    modules are those of 26.06).
    """
    before: dict[tuple[str, ...], str | None] = {}
    for row in rows:
        cell = tuple(row[name] for name in ("model", "gpu", "precision", "task"))
        if _is_hybrid(row) and row["cuda_graph_impl"] == "transformer_engine":
            before[cell] = row["cuda_graph_modules"] or before.get(cell)
            row = {**row, "cuda_graph_modules": before[cell]}
        yield row


def _is_hybrid(row: Row) -> bool:
    return any(kind.is_recurrent for _, kind in model(row["model"]).kinds)


def _preset(row: Row) -> Preset:
    precision, scaling = FP8.get(row["precision"], (row["precision"], None))
    return Preset(
        release=row["framework_version"],
        model=row["model"],
        gpu=row["gpu"],
        precision=precision,  # type: ignore[arg-type]
        scaling=scaling,
        task=row["task"],
        num_gpus=row["num_gpus"],
        global_batch_size=row["global_batch_size"],
        kind=_kind(row),
        is_hybrid=_is_hybrid(row),
        settings=_settings(row),
    )


def _kind(row: Row) -> str:
    spec = model(row["model"])
    return "dense" if not spec.num_experts else "latent" if spec.kv_lora_rank else "experts"


def _settings(row: Row) -> dict[str, Setting]:
    values: Setting = {key: None for keys in GROUPS.values() for key in keys}
    if row["cuda_graph_impl"] not in (None, "none"):
        # An older name of the complete layer.
        modules = [name for name in _modules(row["cuda_graph_modules"]) if name != "full"]
        whole = row["cuda_graph_impl"] != "transformer_engine" or modules == ["full_iteration"]
        values["training.cuda_graphs"] = True
        values["training.cuda_graph_modules"] = None if whole else modules or WHOLE_LAYER
    overlap = {"expert_parallel": True} if row["overlap_moe_expert_parallel_comm"] else {}
    if {row["overlap_grad_reduce"], row["overlap_param_gather"]} == {False}:
        overlap["data_parallel"] = False
    values["training.overlap"] = overlap or None
    if _kind(row) != "dense":
        dispatcher = row["moe_token_dispatcher_type"] or "alltoall"
        values["parallel.moe_token_dispatcher_type"] = DISPATCHERS.get(dispatcher, dispatcher)
        values["parallel.expert_tensor_parallel_size"] = row["expert_tensor_parallel_size"] or 1
    layers = model(row["model"]).num_hidden_layers
    offloaded = row["cpu_offloading_num_layers"]
    # Megatron Core rejects a number of all layers, so the switch is off
    # (perf_recipes/gpt_oss/common.py).
    if offloaded and offloaded < layers:
        values["training.offload"] = "activations"
        values["training.offload_fraction"] = round(offloaded / layers, 4)
    if row["use_megatron_fsdp"]:
        values["parallel.zero_stage"] = 3
    if row["recompute_num_layers"]:
        values["parallel.recompute"] = {
            "granularity": "full",
            "method": "block",
            "num_layers": row["recompute_num_layers"],
        }
    elif row["recompute_modules"]:
        values["parallel.recompute"] = {
            "granularity": "selective",
            "modules": sorted(_modules(row["recompute_modules"])),
        }
    return {group: {key: values[key] for key in keys} for group, keys in GROUPS.items()}


def _modules(text: str | None) -> list[str]:
    return [name for name in (text or "").split("+") if name]
