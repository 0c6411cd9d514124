"""How the config.json of one model_type is read."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

from hp_tool.errors import UnsupportedError

Config = Mapping[str, Any]
"""A config.json without its nulls."""


def nothing(config: Config) -> dict[str, Any]:
    return {}


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Family:
    """A model_type: how its file calls things, and what its code fixes."""

    keys: Mapping[str, str] = dataclasses.field(default_factory=dict)
    """ModelSpec field -> config keys, alternatives separated by spaces, beside the fields that have the same name."""
    fixed: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    """What the architecture's code decides."""
    defaults: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    """What its configuration class assumes for keys the file leaves out."""
    derive: Callable[[Config], dict[str, Any]] = nothing
    """What follows from several keys; raises UnsupportedError for layouts that ModelSpec cannot hold."""
    full_attention_every: int | None = None
    """Every how many layers one sees all keys, where a sliding window is given and the file names no layer_types."""

    def but(
        self,
        *,
        keys: Mapping[str, str] | None = None,
        fixed: Mapping[str, Any] | None = None,
        defaults: Mapping[str, Any] | None = None,
        derive: Callable[[Config], dict[str, Any]] | None = None,
        full_attention_every: int | None = None,
    ) -> Family:
        """The same family with some entries added or replaced."""
        return Family(
            keys={**self.keys, **(keys or {})},
            fixed={**self.fixed, **(fixed or {})},
            defaults={**self.defaults, **(defaults or {})},
            derive=derive or self.derive,
            full_attention_every=full_attention_every or self.full_attention_every,
        )


def same(*names: str) -> dict[str, str]:
    """Keys that ModelSpec calls as config.json does."""
    return {name: name for name in names}


def refuse(config: Config, key: str, *, unless: Any, why: str) -> None:
    """Raise UnsupportedError where the file says something else of `key`."""
    if key in config and config[key] != unless:
        raise UnsupportedError(f"{key} {config[key]!r}: {why}", field=f"model.{key}")


def equal_sides(config: Config, *keys: tuple[str, str]) -> None:
    """Raise UnsupportedError where encoder and decoder differ in what ModelSpec has one field for."""
    for ours, theirs in keys:
        refuse(config, theirs, unless=config.get(ours), why=f"another size than {ours} {config.get(ours)!r} is not modelled")


_KINDS = {"full_attention", "sliding_attention"}


def sliding_window(config: Config, *, layers: int, full_attention_every: int | None) -> dict[str, Any]:
    """ModelSpec's sliding_window and sliding_window_layers; nothing where all layers see all keys.

    `layer_types` says it layer by layer (transformers 4.54 and later write it); older files give a pattern, or rely on the
    class's. UnsupportedError for layers of other kinds.
    """
    kinds = config.get("layer_types") or []
    if foreign := set(kinds) - _KINDS:
        raise UnsupportedError(f"layer_types {', '.join(sorted(foreign))} are not modelled", field="model.layer_types")
    window = config.get("sliding_window")
    if not window or not config.get("use_sliding_window", True):
        return {}
    every = config.get("sliding_window_pattern", full_attention_every)
    if kinds:
        windowed = kinds[:layers].count("sliding_attention")
    elif config.get("use_sliding_window"):  # Qwen: the first max_window_layers see all keys
        windowed = max(layers - config.get("max_window_layers", 0), 0)
    else:
        windowed = layers - layers // every if isinstance(every, int) else layers
    if not windowed:
        return {}
    return {"sliding_window": window} | ({"sliding_window_layers": windowed} if windowed < layers else {})
