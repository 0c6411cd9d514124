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
    """One model_type: the keys of its file and the constants of its code."""

    keys: Mapping[str, str] = dataclasses.field(default_factory=dict)
    """Config keys by ModelSpec field, alternatives separated by spaces; fields with the same name
    are implied.
    """
    fixed: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    """Constants in the architecture's code."""
    defaults: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    """Defaults of its configuration class for missing keys."""
    required: Mapping[str, tuple[Any, str]] = dataclasses.field(default_factory=dict)
    """Config keys with a single supported value, and the reason why others are not supported; a key
    may be missing.
    """
    derive: Callable[[Config], dict[str, Any]] = lambda config: {}
    """Function that returns values derived from several keys; raises UnsupportedError for
    unsupported layouts.
    """
    says_layers: bool = False
    """Whether `derive` describes each layer, including windows."""
    full_attention_every: int | None = None
    """Period of layers with full attention, if there is a sliding window without layer_types."""

    def but(self, **changes: Any) -> Family:
        """Return this family with some fields changed; entries of mappings are added or
        replaced.
        """
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
        UnsupportedError: The key has another value.
    """
    if key in config and config[key] != unless:
        raise UnsupportedError(f"{key} {config[key]!r}: {why}", field=f"model.{key}")


_KINDS = {"full_attention", "sliding_attention", "chunked_attention"}
"""Kinds of attention layers. Chunked attention (Llama 4) counts as a window of the chunk's width.

The window is exact up to one chunk; beyond, it counts at most twice the keys.
"""


def sliding_window(
    config: Config, *, layers: int, full_attention_every: int | None
) -> dict[str, Any]:
    """Return sliding_window and sliding_window_layers; empty if all layers have full attention.

    `layer_types` gives the kind of each layer (transformers 4.54 and later). Older files give a
    pattern, or rely on that of the class.

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
    elif config.get("use_sliding_window"):  # The first max_window_layers have full attention.
        windowed = max(layers - config.get("max_window_layers", 0), 0)
    else:
        windowed = layers - layers // every if isinstance(every, int) else layers
    if not windowed:
        return {}
    return {"sliding_window": window} | (
        {"sliding_window_layers": windowed} if windowed < layers else {}
    )
