"""Layers that are not all alike: what mixes tokens in each, and what follows it."""

from dataclasses import dataclass, fields
from typing import Annotated, Literal

from annotated_types import Interval

from hp_tool.domain.fields import Strict

Mixer = Literal["attention", "gated_delta", "kimi_delta", "mamba", "mamba2", "none"]
"""attention: softmax over keys, with all that the model's fields say of it; gated_delta: gated
delta rule (arXiv 2412.06464); kimi_delta: its form with a gate for each channel (arXiv 2510.26692);
mamba: selective state space (arXiv 2312.00752); mamba2: state-space duality (arXiv 2405.21060).
"""
FeedForward = Literal["dense", "experts", "none"]
RECURRENT_MIXERS: tuple[Mixer, ...] = ("gated_delta", "kimi_delta", "mamba", "mamba2")
"""Mixers with a state of constant size per sequence instead of keys and values."""

_Size = Annotated[int, Interval(ge=1, le=1 << 26)]


@dataclass(frozen=True, slots=True, kw_only=True)
class Block(Strict):
    """Layers in a row that are alike. A size of None is the model's own."""

    count: Annotated[int, Interval(ge=1, le=10_000)] = 1
    """How many of them follow each other."""
    mixer: Mixer = "attention"
    """Token mixer of the layer; none: the layer is only a feed-forward."""
    feed_forward: FeedForward | None = None
    """Feed-forward of the layer; None: experts if the model has them, else dense."""
    windowed: bool = False
    """Whether attention is limited to the last `sliding_window` keys."""
    indexed: bool = True
    """Whether attention is limited to the keys that the indexer selects, in a model with an
    indexer.
    """
    shares_index: bool = False
    """Whether these are the keys that an indexer before it chose (GLM-5.2)."""
    num_attention_heads: _Size | None = None
    num_key_value_heads: _Size | None = None
    head_dim: _Size | None = None
    v_head_dim: _Size | None = None
    values_are_keys: bool | None = None
    attention_sinks: bool | None = None
    intermediate_size: _Size | None = None
    """Width of its dense MLP."""

    def __str__(self) -> str:
        """`3 x attention, windowed, head_dim 512`: what differs from the model's own layers."""
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
