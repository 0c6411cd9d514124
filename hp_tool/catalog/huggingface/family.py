"""How the config.json of one model_type is read."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

from hp_tool.errors import UnsupportedError

Config = Mapping[str, Any]
"""A config.json without its nulls."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Family:
    """A model_type: how its file calls things, and what its code fixes."""

    keys: Mapping[str, str] = dataclasses.field(default_factory=dict)
    """ModelSpec field -> config keys, alternatives separated by spaces, beside the fields that have
    the same name.
    """
    fixed: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    """What the architecture's code decides."""
    defaults: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    """What its configuration class assumes for keys the file leaves out."""
    required: Mapping[str, tuple[Any, str]] = dataclasses.field(default_factory=dict)
    """Config key -> the only value that ModelSpec can hold, and why no other; the file may leave
    the key out.
    """
    derive: Callable[[Config], dict[str, Any]] = lambda config: {}
    """What follows from several keys; raises UnsupportedError for layouts that ModelSpec cannot
    hold.
    """
    says_layers: bool = False
    """Whether `derive` says of each layer what it is, windows included."""
    full_attention_every: int | None = None
    """Every how many layers one sees all keys, where a sliding window is given and the file names
    no layer_types.
    """

    def but(self, **changes: Any) -> Family:
        """Return this family with other fields; of mappings the entries given are added or
        replaced.
        """
        return dataclasses.replace(
            self, **{name: _merged(getattr(self, name), new) for name, new in changes.items()}
        )


def _merged(old: Any, new: Any) -> Any:
    return {**old, **new} if isinstance(new, Mapping) else new


def same(names: str) -> dict[str, str]:
    """Keys that ModelSpec calls as config.json does, separated by spaces."""
    return {name: name for name in names.split()}


def refuse(config: Config, key: str, *, unless: Any, why: str) -> None:
    """Raise UnsupportedError if the file has `key` with another value than `unless`."""
    if key in config and config[key] != unless:
        raise UnsupportedError(f"{key} {config[key]!r}: {why}", field=f"model.{key}")


_KINDS = {"full_attention", "sliding_attention", "chunked_attention"}
"""Chunks (Llama 4) count as a window as wide as a chunk, which sees up to twice the keys; the same
up to one chunk.
"""


def sliding_window(
    config: Config, *, layers: int, full_attention_every: int | None
) -> dict[str, Any]:
    """ModelSpec's sliding_window and sliding_window_layers; empty if all layers see all keys.

    `layer_types` names the kind of each layer (transformers 4.54 and later write it); older files
    give a pattern, or rely on the class's. Raises UnsupportedError for layers of other kinds.
    """
    kinds = config.get("layer_types") or []
    if foreign := set(kinds) - _KINDS:
        raise UnsupportedError(
            f"layer_types {', '.join(sorted(foreign))} are not modelled", field="model.layer_types"
        )
    window = config.get("sliding_window") or config.get("attention_chunk_size")
    if not window or not config.get("use_sliding_window", True):
        return {}
    every = config.get("sliding_window_pattern", full_attention_every)
    if kinds:
        windowed = layers - kinds[:layers].count("full_attention")
    elif config.get("use_sliding_window"):  # Qwen: the first max_window_layers see all keys
        windowed = max(layers - config.get("max_window_layers", 0), 0)
    else:
        windowed = layers - layers // every if isinstance(every, int) else layers
    if not windowed:
        return {}
    return {"sliding_window": window} | (
        {"sliding_window_layers": windowed} if windowed < layers else {}
    )
