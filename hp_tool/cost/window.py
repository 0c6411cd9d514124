"""Sliding-window attention: a query of a windowed layer sees the last w keys alone (arXiv 2004.05150)."""

from __future__ import annotations

from hp_tool.domain.model import ModelSpec


def windowed_length(model: ModelSpec, length: float) -> float:
    """Keys that fused attention computes for a token of a sequence of `length`, mean over layers, before the causal half.

    A causal layer's query at place i sees min(i, w) keys: s w - w^2 / 2 scores a sequence, so w (2 - w / s) a token where full
    attention has s. A bidirectional one sees w. With `sliding_window_layers` of L the mean is weighted. Ring exchange of
    keys and values between context-parallel ranks, and unfused attention, which computes the scores it masks, stay whole.
    """
    window = model.sliding_window
    if window is None or window >= length:
        return length
    seen = window * (2.0 - window / length) if model.architecture == "decoder" else float(window)
    layers = model.num_hidden_layers
    share = 1.0 if model.sliding_window_layers is None else model.sliding_window_layers / layers
    return share * seen + (1.0 - share) * length
