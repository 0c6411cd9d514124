"""Add models to the catalogue from their published config.json.

`python scripts/published_models.py FILE.jsonl` reads one line `{name, config, source?}` per
checkpoint. Checkpoints of one shape become one entry with the precision of each, without keys that
do not affect the result. Entries with other names remain. If another file of the catalogue contains
the shape, the names to add to its entry are printed.
"""

import argparse
import json
import re
from collections.abc import Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import yaml

from hp_tool import catalog
from hp_tool.catalog import library
from hp_tool.catalog.huggingface.quantization import weight_precision
from hp_tool.cost.parameters import active_parameters, total_parameters
from hp_tool.domain.model import ModelSpec
from hp_tool.errors import HpToolError

FILE = Path("hp_tool/catalog/data/models/published.yaml")
STATED_KEYS = {"moonshotai/Kimi-K2.5": "int4", "XiaomiMiMo/MiMo-V2-Flash": "fp8"}
"""Precision of checkpoints whose config.json lacks it, according to vllm-project/recipes."""
MAX_CHARACTERS = 8_000
"""Maximum number of characters of an entry; longer entries are skipped."""
HEAD = "# Written by scripts/published_models.py from each checkpoint's config.json.\n"
SOURCE = "config.json of {id}"
"""Source of the file's entries without one; {id} is the entry's first id."""


def signature(spec: ModelSpec) -> tuple[float, ...]:
    """Return sizes that two models share only if they have the same shape."""
    heads = spec.num_key_value_heads or spec.num_attention_heads
    window = (spec.sliding_window or 0, spec.sliding_window_layers or 0)
    sizes = (spec.num_hidden_layers, spec.hidden_size, spec.num_attention_heads, spec.vocab_size)
    latent = spec.kv_lora_rank or 0
    towers = spec.tower_parameters
    return (
        towers,
        total_parameters(spec),
        active_parameters(spec),
        *sizes,
        0 if latent else heads,
        *window,
    )


def reduce_configuration(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the config.json without keys that do not change the result."""
    reduced = {key: value for key, value in config.items() if value is not None}
    full = replace(catalog.model_from_mapping(reduced), name="")
    kinds = reduced.get("mlp_layer_types", [])
    counted = {**reduced, "first_k_dense_replace": kinds.count("dense")}
    counted.pop("mlp_layer_types", None)
    if kinds and _has_same_shape(counted, full):
        reduced = counted
    for key in sorted(reduced, key=lambda name: (not isinstance(reduced[name], Mapping), name)):
        fewer = {name: value for name, value in reduced.items() if name != key}
        if isinstance(reduced[key], Mapping) and key != "quantization_config":
            smaller = {**reduced, key: _shrink(reduced, key, full)}
            fewer = smaller if not _has_same_shape(fewer, full) else fewer
        if key != "model_type" and _has_same_shape(fewer, full):
            reduced = fewer
    return reduced


def _shrink(config: Mapping[str, Any], section: str, whole: ModelSpec) -> dict[str, Any]:
    inner = {key: value for key, value in config[section].items() if value is not None}
    for key in list(inner):
        fewer = {name: value for name, value in inner.items() if name != key}
        if _has_same_shape({**config, section: fewer}, whole):
            inner = fewer
    return inner


def _has_same_shape(config: Mapping[str, Any], whole: ModelSpec) -> bool:
    try:
        return replace(catalog.model_from_mapping(config), name="") == whole
    except (HpToolError, KeyError, TypeError):
        return False


def _named_size(name: str, counted: float) -> float | None:
    sizes = re.findall(r"(?<![A-Za-z\d])(\d+(?:\.\d+)?)[Bb](?![a-z])", name)
    named_sizes = (float(size) * 1e9 for size in sizes)
    return next((size for size in named_sizes if abs(counted / size - 1.0) < 0.02), None)


def entries(rows: Iterable[Mapping[str, Any]]) -> dict[str, dict[str, Any]]:
    """Return an entry for each new shape, by name; print the others."""
    elsewhere = {
        signature(catalog.model(each.name)): each
        for each in library.entries("models")
        if each.path.name != FILE.name
    }
    listed_ids = {
        name.casefold()
        for each in elsewhere.values()
        for name in (*each.aliases, *(name for ids in each.checkpoints.values() for name in ids))
    }
    shapes: dict[tuple[float, ...], dict[str, Any]] = {}
    for row in sorted(
        rows, key=lambda row: (library.stored_precision(row["name"]) or "", row["name"])
    ):
        name, config = row["name"], row["config"]
        try:
            spec = catalog.model_from_mapping(config)
            stated_precision = STATED_KEYS.get(name) or library.stored_precision(name)
            precision = stated_precision or weight_precision(config)
        except HpToolError as error:
            print(f"{name}: {error.message[:100]}")
            continue
        if name.casefold() in listed_ids:
            continue
        if (known := elsewhere.get(signature(spec))) is not None:
            print(f"{known.name}: add {name} ({precision})")
            continue
        entry = shapes.setdefault(
            signature(spec),
            {
                "aliases": [],
                "checkpoints": {},
                "source": row.get("source"),
                "parameters": _named_size(name, total_parameters(spec)),
                **reduce_configuration(config),
            },
        )
        if precision == "bf16":
            entry["aliases"].append(name)
        else:
            entry["checkpoints"].setdefault(precision, []).append(name)
    by_name: dict[str, dict[str, Any]] = {}
    for entry in shapes.values():
        quantized_ids = (each for several in entry["checkpoints"].values() for each in several)
        ids = [*entry["aliases"], *quantized_ids]
        short = library.base_model(ids[0].rpartition("/")[2]).removesuffix("-bf16")
        if len(str(entry)) < MAX_CHARACTERS:
            given = entry.items()
            by_name[short] = {key: value for key, value in given if value not in ([], {}, None)}
    return dict(sorted(by_name.items()))


def main() -> None:
    """Write the file."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("rows", type=Path)
    rows = [json.loads(line) for line in parser.parse_args().rows.read_text().splitlines()]
    written = yaml.safe_load(FILE.read_text(encoding="utf-8"))["entries"]
    merged = {"source": SOURCE, "entries": dict(sorted((written | entries(rows)).items()))}
    text = yaml.safe_dump(merged, sort_keys=False, width=150, default_flow_style=None)
    FILE.write_text(HEAD + text)


if __name__ == "__main__":
    main()
