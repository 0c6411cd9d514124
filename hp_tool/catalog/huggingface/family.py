"""The description of a model_type's config.json."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

from hp_tool.errors import UnsupportedError

Config = Mapping[str, Any]
"""A config.json without null values."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Family:
    """A model_type: the keys of its file and the constants of its code."""

    keys: Mapping[str, str] = dataclasses.field(default_factory=dict)
    """ModelSpec field -> config keys, alternatives separated by spaces; fields of the same name are
    implied.
    """
    fixed: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    """Constants of the architecture's code."""
    defaults: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    """Defaults of its configuration class for missing keys."""
    required: Mapping[str, tuple[Any, str]] = dataclasses.field(default_factory=dict)
    """Config key -> the only supported value, and why others are not; the key may be missing."""
    derive: Callable[[Config], dict[str, Any]] = lambda config: {}
    """Returns values derived from several keys; raises UnsupportedError for unsupported layouts."""
    says_layers: bool = False
    """Whether `derive` describes each layer, including windows."""
    full_attention_every: int | None = None
    """Period of layers with full attention, if there is a sliding window without layer_types."""

    def but(self, **changes: Any) -> Family:
        """Return this family with other fields; given entries of mappings are added or replaced."""
        return dataclasses.replace(
            self, **{name: _merged(getattr(self, name), new) for name, new in changes.items()}
        )


def _merged(old: Any, new: Any) -> Any:
    return {**old, **new} if isinstance(new, Mapping) else new


def same(names: str) -> dict[str, str]:
    """Return keys that have the same name in ModelSpec, separated by spaces."""
    return {name: name for name in names.split()}


def reject(config: Config, key: str, *, unless: Any, why: str) -> None:
    """Check that `key` is absent or has the value `unless`.

    Raises:
        UnsupportedError: It has another value.
    """
    if key in config and config[key] != unless:
        raise UnsupportedError(f"{key} {config[key]!r}: {why}", field=f"model.{key}")


_KINDS = {"full_attention", "sliding_attention", "chunked_attention"}
"""Kinds of layers; chunked attention (Llama 4) counts as a window as wide as a chunk.

The window is exact up to one chunk and at most twice the keys beyond.
"""


def sliding_window(
    config: Config, *, layers: int, full_attention_every: int | None
) -> dict[str, Any]:
    """Return sliding_window and sliding_window_layers; empty if all layers have full attention.

    `layer_types` gives the kind of each layer (transformers 4.54 and later). Older files give a
    pattern, or rely on the class's.

    Raises:
        UnsupportedError: There are layers of other kinds.
    """
    kinds = config.get("layer_types") or []
    if foreign := set(kinds) - _KINDS:
        raise UnsupportedError(
            f"layer_types {', '.join(sorted(foreign))} are not supported", field="model.layer_types"
        )
    window = config.get("sliding_window") or config.get("attention_chunk_size")
    if not window or not config.get("use_sliding_window", True):
        return {}
    every = config.get("sliding_window_pattern", full_attention_every)
    if kinds:
        windowed = layers - kinds[:layers].count("full_attention")
    elif config.get("use_sliding_window"):  # Qwen: the first max_window_layers have full attention
        windowed = max(layers - config.get("max_window_layers", 0), 0)
    else:
        windowed = layers - layers // every if isinstance(every, int) else layers
    if not windowed:
        return {}
    return {"sliding_window": window} | (
        {"sliding_window_layers": windowed} if windowed < layers else {}
    )
