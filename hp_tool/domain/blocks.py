"""Group the layers of hybrid models into runs of identical layers (same token mixer and same
FFN).
"""

from dataclasses import dataclass, fields
from typing import Annotated, Literal

from annotated_types import Interval

from hp_tool.domain.fields import Strict

Mixer = Literal["attention", "gated_delta", "kimi_delta", "mamba", "mamba2", "none"]
"""attention: softmax over keys, configured by the model's attention fields; gated_delta: gated
delta rule (arXiv 2412.06464); kimi_delta: its variant with one gate per channel (arXiv 2510.26692);
mamba: selective state space (arXiv 2312.00752); mamba2: state-space duality (arXiv 2405.21060).
"""
FeedForward = Literal["dense", "experts", "none"]
RECURRENT_MIXERS: tuple[Mixer, ...] = ("gated_delta", "kimi_delta", "mamba", "mamba2")
"""Mixers with a state of constant size per sequence instead of keys and values."""

_Size = Annotated[int, Interval(ge=1, le=1 << 26)]


@dataclass(frozen=True, slots=True, kw_only=True)
class Block(Strict):
    """A run of identical layers. Sizes that are None have the model's value."""

    count: Annotated[int, Interval(ge=1, le=10_000)] = 1
    """Number of consecutive layers."""
    mixer: Mixer = "attention"
    """Token mixer of the layer; none: the layer is only an FFN."""
    feed_forward: FeedForward | None = None
    """Feed-forward of the layer; None: experts if the model has them, else dense."""
    windowed: bool = False
    """Whether attention is limited to the last `sliding_window` keys."""
    indexed: bool = True
    """Whether attention is limited to the keys that the indexer selects, in a model with an
    indexer.
    """
    shares_index: bool = False
    """Whether attention uses the keys selected by the indexer of an earlier layer (GLM-5.2)."""
    num_attention_heads: _Size | None = None
    num_key_value_heads: _Size | None = None
    head_dim: _Size | None = None
    v_head_dim: _Size | None = None
    values_are_keys: bool | None = None
    attention_sinks: bool | None = None
    intermediate_size: _Size | None = None
    """Width of the dense MLP."""

    def __str__(self) -> str:
        """Return the differences from the model's default layer, such as `3 x attention, windowed,
        head_dim 512`.
        """
        own = {
            field.name: value
            for field in fields(self)
            if (value := getattr(self, field.name)) != field.default
        }
        words = (
            name if value is True else f"{name} {value}"
            for name, value in own.items()
            if name not in ("count", "mixer")
        )
        return f"{self.count} x {', '.join((self.mixer, *words))}"
