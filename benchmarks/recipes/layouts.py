"""Write the layouts of presets as the table with which `import` reads a launch command that names a
preset.
"""

from __future__ import annotations

import csv
import io
import re
from pathlib import Path
from typing import Any

from benchmarks.accuracy.data import rows
from benchmarks.recipes.presets import TABLE
from evidence.cases import is_known
from evidence.table import Row

OLDEST = "26.02"
"""First release in which presets have their current names."""
NAMES = (
    re.compile(
        r"(?P<recipe>.+?)_(?P<task>PRETRAIN|SFT|LORA)_CONFIG_(?P<gpu>[A-Z0-9]+)"
        r"_(?P<precision>BF16|FP8_CS|FP8_MX|FP8_SC|FP8_DS|NVFP4)(_(?P<variant>V\d))?"
    ),
    re.compile(
        r"(?P<recipe>.+?)_(?P<task>pretrain|sft|peft)_\d+gpu_(?P<gpu>[a-z0-9]+)"
        r"_(?P<precision>bf16|fp8cs|fp8mx|fp8sc|fp8ds|nvfp4)(_(?P<variant>\w+))?_config"
    ),
)
"""Patterns of the names of presets and, since 26.08, of their functions."""
SIZES = (
    "sequence_length",
    "global_batch_size",
    "micro_batch_size",
    "tensor_parallel_size",
    "pipeline_parallel_size",
    "virtual_pipeline_parallel_size",
    "context_parallel_size",
    "expert_parallel_size",
    "expert_tensor_parallel_size",
    "pipeline_layout",
)
COLUMNS = (
    *("releases", "function", "recipe", "chip", "variant"),
    *("gpu", "precision", "task", "model", "num_gpus"),
    *SIZES,
)


def render_layouts(folder: Path) -> str:
    """Return the table: a row for each different preset, with the releases that contain it.

    Rows whose name or layout is missing from the table of presets are omitted.
    """
    known = [row for row in rows(folder, TABLE) if row["framework_version"] >= OLDEST]
    merged: dict[tuple[Any, ...], list[str]] = {}
    for row in filter(is_known, known):
        name = _name(row["preset"])
        if name is not None and row["tensor_parallel_size"] is not None:
            key = (*name, *_settings(row))
            merged.setdefault(key, []).append(row["framework_version"])
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(COLUMNS)
    for key, releases in sorted(merged.items(), key=lambda item: tuple(map(str, item[0]))):
        writer.writerow((" ".join(sorted(set(releases))), *key))
    return text.getvalue()


def _name(preset: str) -> tuple[str, ...] | None:
    match = next(filter(None, (each.fullmatch(preset or "") for each in NAMES)), None)
    if match is None:
        return None
    function = preset if preset.endswith("_config") else ""
    variant = (match["variant"] or "").lower()
    return (function, match["recipe"].lower(), match["gpu"].lower(), variant)


def _settings(row: Row) -> tuple[Any, ...]:
    names = ("gpu", "precision", "task", "model", "num_gpus", *SIZES)
    return tuple("" if row[name] is None else row[name] for name in names)
