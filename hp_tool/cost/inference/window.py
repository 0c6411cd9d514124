"""Layers that attend to, and cache, the last w tokens alone, beside layers that see all: means over the layers of a model.

Engines keep no keys and values that a windowed layer will not look at again (vLLM's hybrid cache manager, TensorRT-LLM's
variable windows, SGLang's separate pools).
"""

from __future__ import annotations

from hp_tool.domain.model import ModelSpec


def seen_tokens(model: ModelSpec, tokens: float) -> float:
    """Of a context of `tokens`, those that a layer attends to and caches, mean over layers: (F n + W min(n, w)) / L."""
    windowed = _windowed(model)
    if not windowed or model.sliding_window is None:
        return tokens
    layers = model.num_hidden_layers
    return ((layers - windowed) * tokens + windowed * min(tokens, float(model.sliding_window))) / layers


def prefill_keys(model: ModelSpec, *, length: float, cached: float) -> float:
    """Keys that a prompt's computed token sees, mean over tokens and layers: those at places from `cached` to `length`
    (causal), (cached + length) / 2 without a window.
    """
    full = 0.5 * (cached + length)
    windowed = _windowed(model)
    if not windowed or model.sliding_window is None:
        return full
    w, layers = float(model.sliding_window), model.num_hidden_layers
    if length <= w:
        inside = full
    elif cached >= w:
        inside = w
    else:
        inside = (0.5 * (w**2 - cached**2) + w * (length - w)) / (length - cached)
    return ((layers - windowed) * full + windowed * inside) / layers


def _windowed(model: ModelSpec) -> int:
    """Layers with a window."""
    if model.sliding_window is None:
        return 0
    return model.num_hidden_layers if model.sliding_window_layers is None else model.sliding_window_layers
