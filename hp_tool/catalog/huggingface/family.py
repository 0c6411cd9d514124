"""Describe how the config.json of each model_type maps to a ModelSpec."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

from hp_tool.errors import UnsupportedError

Config = Mapping[str, Any]
"""Content of a config.json without null values."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Family:
    """One model_type: the keys of its config.json, and the constants in its modelling code."""

    keys: Mapping[str, str] = dataclasses.field(default_factory=dict)
    """Keys of config.json, by ModelSpec field. Alternative keys are separated by spaces. Fields
    with the same name in both need no entry.
    """
    fixed: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    """ModelSpec fields whose values are fixed in the architecture's code."""
    defaults: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    """Values of missing keys, as in the configuration class."""
    required: Mapping[str, tuple[Any, str]] = dataclasses.field(default_factory=dict)
    """Keys of config.json that have only one supported value: the value, and the reason why others
    are not supported. A key may be missing.
    """
    derive: Callable[[Config], dict[str, Any]] = lambda config: {}
    """Function that derives values from several keys, or raises UnsupportedError."""
    describes_layers: bool = False
    """True if `derive` describes each layer, including its sliding window."""
    full_attention_every: int | None = None
    """Period of layers with full attention, for files that have a sliding window but no
    layer_types.
    """

    def but(self, **changes: Any) -> Family:
        """Return a copy of this family with changed fields. Mappings are merged."""
        return dataclasses.replace(
            self, **{name: _merged(getattr(self, name), new) for name, new in changes.items()}
        )


def _merged(old: Any, new: Any) -> Any:
    return {**old, **new} if isinstance(new, Mapping) else new


def same(names: str) -> dict[str, str]:
    """Return a mapping for keys that have the same name in config.json and ModelSpec. `names`
    separates them with spaces.
    """
    return {name: name for name in names.split()}


def reject(config: Config, key: str, *, unless: Any, why: str) -> None:
    """Check that `key` is missing or has the value `unless`.

    Raises:
        UnsupportedError: The key has another value.
    """
    if key in config and config[key] != unless:
        raise UnsupportedError(f"{key} {config[key]!r}: {why}", field=f"model.{key}")


_KINDS = {"full_attention", "sliding_attention", "chunked_attention"}
"""Supported kinds of attention layers. Chunked attention (Llama 4) is treated as a sliding window
of one chunk. This is exact for sequences of up to one chunk; for longer ones, it counts at most
twice the keys.
"""


def sliding_window(
    config: Config, *, layers: int, full_attention_every: int | None
) -> dict[str, Any]:
    """Return sliding_window and sliding_window_layers; empty if all layers have full attention.

    `layer_types` lists the kind of each layer (transformers 4.54 and later). Older files set a
    pattern, or rely on the pattern of their model class.

    Raises:
        UnsupportedError: A layer is of another kind.
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
