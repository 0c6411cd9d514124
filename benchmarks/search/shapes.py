"""Find the models of a grid by name, by the shape columns of its rows, or in a file of shapes."""

from __future__ import annotations

import csv
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

from benchmarks.accuracy.data import Row
from benchmarks.accuracy.grid_rows import SHAPES
from hp_tool.catalog import model as catalogue_model
from hp_tool.catalog import model_from_mapping
from hp_tool.domain.model import ModelSpec
from hp_tool.errors import InputError, NotFoundError

Shapes = Mapping[str, Mapping[str, Any]]
COLUMNS = {
    "layers": "num_hidden_layers",
    "hidden": "hidden_size",
    "heads": "num_attention_heads",
    "kv_heads": "num_key_value_heads",
    "head_dim": "head_dim",
    "ffn": "intermediate_size",
    "vocab": "vocab_size",
    "experts": "num_experts",
    "topk": "num_experts_per_tok",
    "moe_ffn": "moe_intermediate_size",
    "shared_experts": "num_shared_experts",
    "first_dense_layers": "first_k_dense_replace",
}
"""Short column names, which are accepted in addition to the fields of Hugging Face's config.json.
"""
_FLAGS = ("gated_mlp", "tie_word_embeddings")
_LLAMA = {
    "num_attention_heads": 32,
    "vocab_size": 131072,
    "gated_mlp": True,
    "normalization": "rmsnorm",
}


def read_shapes(path: Path) -> Shapes:
    """Read shapes by model name from a CSV file with a `model` column, or a YAML or JSON mapping of
    names to fields.
    """
    if path.suffix.lower() == ".csv":
        with path.open(newline="", encoding="utf-8") as stream:
            return {row["model"]: row for row in csv.DictReader(stream)}
    shapes = yaml.safe_load(path.read_text(encoding="utf-8"))
    if not isinstance(shapes, dict):
        raise InputError(f"{path} holds no mapping of model names to shapes", field="--shapes")
    return shapes


def model_of(row: Row, shapes: Shapes) -> ModelSpec:
    """Return a row's model from `--shapes`, else from the row's columns, the Llama shapes of
    published grids, or the catalogue.
    """
    name = row["model"]
    fields = _fields(shapes[name]) if name in shapes else _fields(row)
    if "num_hidden_layers" not in fields and name in SHAPES:
        fields = _LLAMA | SHAPES[name]
    variant = row.get("variant") or ""
    if variant.startswith("gqa"):
        fields["num_key_value_heads"] = int(variant.removeprefix("gqa").split("_")[0])
    if "num_hidden_layers" in fields:
        return model_from_mapping({"name": name, **fields})
    try:
        return catalogue_model(name)
    except NotFoundError as unknown:
        raise InputError(
            f"no shape for model {name!r}: give shape columns or --shapes", field="--shapes"
        ) from unknown


def _fields(columns: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields of config.json from columns with short or full names; empty cells are
    ignored.
    """
    known = {**{name: name for name in COLUMNS.values()}, **COLUMNS}
    fields: dict[str, Any] = {
        known[c]: int(float(v)) for c, v in columns.items() if c in known and v not in ("", None)
    }
    fields |= {c: _flag(columns[c]) for c in _FLAGS if columns.get(c) not in ("", None)}
    if columns.get("normalization"):
        fields["normalization"] = columns["normalization"]
    return fields


def _flag(value: object) -> bool:
    return str(value).lower() in ("1", "true", "yes")
