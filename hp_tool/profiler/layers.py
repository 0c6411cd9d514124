"""Norm and flash attention in plain torch, where Transformer Engine is not installed.

Megatron's own local norms refuse sequence parallelism, and its local attention always builds the s x s scores.
"""

from __future__ import annotations

from typing import Any

import torch
from megatron.core.transformer import MegatronModule, TransformerConfig
from torch.nn import functional


class Norm:
    """LayerNorm or RMSNorm as the config says, marked for the gradient all-reduce that sequence parallelism needs."""

    def __new__(cls, config: TransformerConfig, hidden_size: int, eps: float = 1e-5, **_: Any) -> torch.nn.Module:
        kind = torch.nn.RMSNorm if config.normalization == "RMSNorm" else torch.nn.LayerNorm
        norm = kind(hidden_size, eps=eps, device=torch.cuda.current_device(), dtype=config.params_dtype)
        for parameter in norm.parameters():
            # Each rank of a sequence-parallel group sees its share of the tokens, so these gradients are partial sums.
            parameter.sequence_parallel = config.sequence_parallel
        return norm


class FlashAttention(MegatronModule):
    """Causal attention through torch's fused kernel: nothing of size s x s is kept for the backward pass."""

    def __init__(self, config: TransformerConfig, *, attention_dropout: float | None = None, **_: Any) -> None:
        super().__init__(config=config)
        self.dropout = config.attention_dropout if attention_dropout is None else attention_dropout

    def forward(self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *_: Any, **__: Any) -> torch.Tensor:
        """query [s, b, heads, head_dim], key and value [s, b, groups, head_dim] -> [s, b, heads x head_dim]."""
        sequence, batch, heads, _head_dim = query.shape
        grouped = heads != key.shape[2]
        context = functional.scaled_dot_product_attention(
            *(x.permute(1, 2, 0, 3) for x in (query, key, value)),
            dropout_p=self.dropout if self.training else 0.0,
            is_causal=True,
            enable_gqa=grouped,
        )
        return context.permute(2, 0, 1, 3).reshape(sequence, batch, -1)
