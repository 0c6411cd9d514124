"""Norm and flash attention in plain torch, where Transformer Engine is not installed.

Megatron's own local norms refuse sequence parallelism, and its local attention always builds the s x s scores.
"""

from __future__ import annotations

from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.models.common.embeddings.rope_utils import apply_rotary_pos_emb
from megatron.core.tensor_parallel import gather_from_sequence_parallel_region
from megatron.core.transformer import MegatronModule, TransformerConfig
from megatron.core.transformer.attention import SelfAttention
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
        if parallel_state.get_context_parallel_world_size() > 1:
            return self._context_parallel(query, key, value)
        # Otherwise there is one new token, which sees all cached ones.
        return self._attend(query, key, value, causal=len(query) == len(key))

    def _attend(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        *,
        causal: bool = False,
        mask: torch.Tensor | None = None,
    ) -> torch.Tensor:
        sequence, batch, heads, _head_dim = query.shape
        context = functional.scaled_dot_product_attention(
            *(x.permute(1, 2, 0, 3) for x in (query, key, value)),
            attn_mask=mask,
            dropout_p=self.dropout if self.training else 0.0,
            is_causal=causal,
            enable_gqa=heads != key.shape[2],
        )
        return context.permute(2, 0, 1, 3).reshape(sequence, batch, -1)

    def _context_parallel(self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        """Keys and values gathered from all context ranks; each of this rank's two pieces attends to all before its end."""
        group = parallel_state.get_context_parallel_group()
        size, rank = parallel_state.get_context_parallel_world_size(), parallel_state.get_context_parallel_rank()
        order = [piece for r in range(size) for piece in (r, 2 * size - 1 - r)]  # as ranks hold them

        def whole(x: torch.Tensor) -> list[torch.Tensor]:
            pieces = gather_from_sequence_parallel_region(x, group=group).chunk(2 * size)
            return [pieces[order.index(number)] for number in range(2 * size)]

        keys, values = whole(key), whole(value)
        found = []
        for piece, queries in zip((rank, 2 * size - 1 - rank), query.chunk(2), strict=True):
            seen = slice(0, piece + 1)
            mask = torch.ones(len(queries), (piece + 1) * len(queries), dtype=torch.bool, device=query.device)
            mask = mask.tril(piece * len(queries))
            found.append(self._attend(queries, torch.cat(keys[seen]), torch.cat(values[seen]), mask=mask))
        return torch.cat(found)


class CachedSelfAttention(SelfAttention):
    """Megatron's self attention with a KV cache of rotated keys, as inference engines keep it.

    Without flash-attn's kernels Megatron caches keys as they were and rotates all of them again for every new token.
    """

    def _adjust_key_value_for_inference(
        self, inference_context: Any, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, rotary_pos_emb: Any, *_: Any
    ) -> tuple[Any, ...]:
        """(query, keys and values so far, no more rotation, kind of mask, no block table)."""
        if inference_context is None:
            return query, key, value, rotary_pos_emb, self.attn_mask_type, None
        start = inference_context.sequence_len_offset
        end = start + len(key)
        if rotary_pos_emb is not None:
            query, key = (
                apply_rotary_pos_emb(x, table[start:end], config=self.config, cp_group=self.pg_collection.cp)
                for x, table in zip((query, key), rotary_pos_emb, strict=True)
            )
        cache = inference_context.key_value_memory_dict
        if self.layer_number not in cache:
            shape = (inference_context.max_sequence_length, inference_context.max_batch_size)
            cache[self.layer_number] = tuple(x.new_empty(*shape, *x.shape[2:]) for x in (key, value))
        first = inference_context.batch_size_offset
        rows = slice(first, first + key.shape[1])
        for held, new in zip(cache[self.layer_number], (key, value), strict=True):
            held[start:end, rows] = new
        keys, values = (held[:end, rows] for held in cache[self.layer_number])
        return query, keys, values, None, self.attn_mask_type, None
