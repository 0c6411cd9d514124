"""Which layers of a config.json have a sliding window."""

from __future__ import annotations

from typing import Any

from hp_tool.catalog.huggingface.family import Config
from hp_tool.errors import UnsupportedError

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
