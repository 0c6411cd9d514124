"""Look up Megatron Bridge's recipes and presets by name."""

import csv
import difflib
import functools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from hp_tool.catalog import documents
from hp_tool.formats.reading import read_table_file

PRECISIONS: dict[str, dict[str, str]] = {
    "bf16": {"precision": "bf16"},
    "fp8_cs": {"precision": "fp8", "fp8_recipe": "tensorwise"},
    "fp8_ds": {"precision": "fp8", "fp8_recipe": "delayed"},
    "fp8_sc": {"precision": "fp8", "fp8_recipe": "blockwise"},
    "fp8_mx": {"precision": "mxfp8"},
    "nvfp4": {"precision": "nvfp4"},
}
"""Fields of `training`, by value of --compute_dtype."""
_SIZE_KEYS = {
    "micro_batch_size": "train.micro_batch_size",
    "tensor_parallel_size": "model.tensor_model_parallel_size",
    "pipeline_parallel_size": "model.pipeline_model_parallel_size",
    "virtual_pipeline_parallel_size": "model.virtual_pipeline_model_parallel_size",
    "context_parallel_size": "model.context_parallel_size",
    "expert_parallel_size": "model.expert_model_parallel_size",
    "expert_tensor_parallel_size": "model.expert_tensor_parallel_size",
    "pipeline_layout": "model.pipeline_model_parallel_layout",
}
_REQUIRED_SIZES = ("micro_batch_size", "tensor_parallel_size", "pipeline_parallel_size")


@dataclass(frozen=True, slots=True, kw_only=True)
class Library:
    """A recipe of Bridge's library: all keys that affect time or memory."""

    model: str
    keys: Mapping[str, Any]
    task: str
    packed: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Preset:
    """The layout of a preset in Bridge's scripts/performance."""

    releases: tuple[str, ...]
    function: str
    recipe: str
    chip: str
    variant: str
    gpu: str
    precision: str
    task: str
    model: str
    num_gpus: int
    global_batch_size: int
    sequence_length: int | None
    keys: Mapping[str, Any]


@functools.cache
def _library_file() -> dict[str, Any]:
    content: dict[str, Any] = documents.load_yaml(read_table_file("bridge-recipes.yaml"))
    return content


@functools.cache
def presets() -> tuple[Preset, ...]:
    """Return the presets of all known releases."""
    rows = list(csv.DictReader(read_table_file("bridge-presets.csv").splitlines()))
    lengths: dict[tuple[str, str], set[int]] = {}
    for row in rows:
        if row["sequence_length"]:
            of_recipe = lengths.setdefault((row["recipe"], row["task"]), set())
            of_recipe.add(int(row["sequence_length"]))
    return tuple(
        _preset_of_row(row, lengths.get((row["recipe"], row["task"]), set())) for row in rows
    )


def _preset_of_row(row: Mapping[str, str], lengths: set[int]) -> Preset:
    possible = {int(row["sequence_length"])} if row["sequence_length"] else lengths
    keys: dict[str, Any] = {}
    for name, key in _SIZE_KEYS.items():
        text = row[name]
        if text:
            keys[key] = text if name == "pipeline_layout" else int(text)
        elif name in _REQUIRED_SIZES:
            keys[key] = 1
    tensor = keys["model.tensor_model_parallel_size"]
    keys.setdefault("model.context_parallel_size", 1)
    keys["model.sequence_parallel"] = tensor > 1
    return Preset(
        releases=tuple(row["releases"].split()),
        function=row["function"],
        recipe=row["recipe"],
        chip=row["chip"],
        variant=row["variant"],
        gpu=row["gpu"],
        precision=row["precision"],
        task=row["task"],
        model=row["model"],
        num_gpus=int(row["num_gpus"]),
        global_batch_size=int(row["global_batch_size"] or 0),
        sequence_length=next(iter(possible)) if len(possible) == 1 else None,
        keys=keys,
    )


def preset_of(function: str) -> Preset | None:
    """Return the preset that a function of the newest release defines; None if there is none."""
    return next((preset for preset in presets() if preset.function == function), None)


def library_recipe(name: str) -> Library | None:
    """Return a library recipe by function name or alias; None if unknown."""
    table = _library_file()
    entry = table["recipes"].get(table["aliases"].get(name, name))
    if entry is None:
        return None
    keys = dict(entry)
    task = next((task for task in ("sft", "peft") if f"_{task}_" in name), "pretrain")
    return Library(
        model=str(keys.pop("model")),
        packed=bool(keys.pop("packed", False)),
        task="lora" if task == "peft" else task,
        keys=keys,
    )


def nearest_names(name: str, *, among: Sequence[str] | None = None) -> str:
    """Return the names most similar to an unknown name, for an error."""
    table = _library_file()
    names = among
    if names is None:
        functions = [preset.function for preset in presets() if preset.function]
        names = [*table["recipes"], *table["aliases"], *functions]
    close = difflib.get_close_matches(name, sorted(set(names)), n=3, cutoff=0.4)
    return ", ".join(close)
