"""Layer modules: Transformer Engine's if installed, else Megatron's with custom norm and attention.

Megatron's local norms do not support sequence parallelism, and its local attention stores the s x s
scores.
"""

import contextlib
from importlib import util
from types import SimpleNamespace
from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.models.backends import LocalSpecProvider
from megatron.core.models.common.embeddings.rope_utils import apply_rotary_pos_emb
from megatron.core.models.gpt.gpt_layer_specs import (
    get_gpt_layer_local_spec,
    get_gpt_layer_with_transformer_engine_spec,
    get_gpt_mtp_block_spec,
)
from megatron.core.tensor_parallel import gather_from_sequence_parallel_region, random
from megatron.core.transformer import MegatronModule, TransformerConfig, multi_latent_attention
from megatron.core.transformer.attention import SelfAttention
from megatron.core.transformer.moe import moe_utils
from megatron.core.transformer.multi_token_prediction import MultiTokenPredictionBlockSubmodules
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_block import (
    TransformerBlockSubmodules,
    get_num_layers_to_build,
)
from megatron.core.transformer.transformer_layer import get_transformer_layer_offset
from torch.nn import functional

from hp_tool.domain.measurement import ProfileRequest


class Norm:
    """LayerNorm or RMSNorm whose gradients are summed over TP ranks with sequence parallelism."""

    def __new__(
        cls, config: TransformerConfig, hidden_size: int, eps: float = 1e-5, **_: Any
    ) -> torch.nn.Module:
        kind = torch.nn.RMSNorm if config.normalization == "RMSNorm" else torch.nn.LayerNorm
        norm = kind(
            hidden_size, eps=eps, device=torch.cuda.current_device(), dtype=config.params_dtype
        )
        for parameter in norm.parameters():
            # With sequence parallelism, each TP rank has different tokens, so gradients are partial
            # sums.
            parameter.sequence_parallel = config.sequence_parallel
        return norm


class FlashAttention(MegatronModule):
    """Causal attention with torch's fused kernel, which stores no s x s matrix."""

    def __init__(
        self, config: TransformerConfig, *, attention_dropout: float | None = None, **_: Any
    ) -> None:
        super().__init__(config=config)
        self.dropout = config.attention_dropout if attention_dropout is None else attention_dropout

    def forward(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *_: Any, **__: Any
    ) -> torch.Tensor:
        """Return the attention output, shape [s, b, heads x head_dim].

        Args:
            query: [s, b, heads, head_dim].
            key: [s, b, groups, head_dim].
            value: [s, b, groups, head_dim].
        """
        if parallel_state.get_context_parallel_world_size() > 1:
            return self._context_parallel(query, key, value)
        # Otherwise, there is a single new token, which attends to all cached tokens.
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

    def _context_parallel(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor
    ) -> torch.Tensor:
        """Attend to keys and values gathered from all context-parallel ranks.

        Each rank holds two chunks of the sequence. Each chunk attends to all earlier tokens.
        """
        group = parallel_state.get_context_parallel_group()
        size, rank = (
            parallel_state.get_context_parallel_world_size(),
            parallel_state.get_context_parallel_rank(),
        )
        # Chunk numbers in the order in which the ranks hold them.
        order = [piece for r in range(size) for piece in (r, 2 * size - 1 - r)]

        def whole(x: torch.Tensor) -> list[torch.Tensor]:
            pieces = gather_from_sequence_parallel_region(x, group=group).chunk(2 * size)
            return [pieces[order.index(number)] for number in range(2 * size)]

        keys, values = whole(key), whole(value)
        contexts = []
        for piece, queries in zip((rank, 2 * size - 1 - rank), query.chunk(2), strict=True):
            visible = slice(0, piece + 1)
            mask = torch.ones(
                len(queries), (piece + 1) * len(queries), dtype=torch.bool, device=query.device
            )
            mask = mask.tril(piece * len(queries))
            contexts.append(
                self._attend(
                    queries, torch.cat(keys[visible]), torch.cat(values[visible]), mask=mask
                )
            )
        return torch.cat(contexts)


class CachedSelfAttention(SelfAttention):
    """Megatron's self-attention with a KV cache of rotated keys, as in inference engines.

    Without flash-attn's kernels, Megatron caches keys before rotation and rotates the entire cache
    again for every new token.
    """

    def _adjust_key_value_for_inference(
        self,
        inference_context: Any,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        rotary_pos_emb: Any,
        *_: Any,
    ) -> tuple[Any, ...]:
        """Return the arguments of the attention, with the cache's keys and values.

        They are (query, keys, values, no rotary embedding, mask type, no block table). The keys are
        already rotated.
        """
        if inference_context is None:
            return query, key, value, rotary_pos_emb, self.attn_mask_type, None
        start = inference_context.sequence_len_offset
        end = start + len(key)
        if rotary_pos_emb is not None:
            query, key = (
                apply_rotary_pos_emb(
                    x, table[start:end], config=self.config, cp_group=self.pg_collection.cp
                )
                for x, table in zip((query, key), rotary_pos_emb, strict=True)
            )
        cache = inference_context.key_value_memory_dict
        if self.layer_number not in cache:
            shape = (inference_context.max_sequence_length, inference_context.max_batch_size)
            cache[self.layer_number] = tuple(
                x.new_empty(*shape, *x.shape[2:]) for x in (key, value)
            )
        first = inference_context.batch_size_offset
        rows = slice(first, first + key.shape[1])
        for cached, new in zip(cache[self.layer_number], (key, value), strict=True):
            cached[start:end, rows] = new
        keys, values = (cached[:end, rows] for cached in cache[self.layer_number])
        return query, keys, values, None, self.attn_mask_type, None


def has_transformer_engine() -> bool:
    """Return True if this host can run Transformer Engine's layers."""
    return torch.cuda.is_available() and util.find_spec("transformer_engine") is not None


def layer_specs(
    request: ProfileRequest, config: TransformerConfig, *, vp_stage: int | None
) -> TransformerBlockSubmodules | ModuleSpec:
    """Return the layer specs of a model chunk; the first `first_k_dense_replace` are dense."""
    if has_transformer_engine() and not request.model.first_k_dense_replace:
        return _layer(request, config, experts=config.num_moe_experts)
    _without_transformer_engine()
    dense, sparse = (
        _layer(request, config, experts=experts) for experts in (None, config.num_moe_experts)
    )
    first = get_transformer_layer_offset(config, vp_stage=vp_stage)
    numbers = range(first, first + get_num_layers_to_build(config, vp_stage=vp_stage))
    layers = [
        dense if number < request.model.first_k_dense_replace else sparse for number in numbers
    ]
    return TransformerBlockSubmodules(layer_specs=layers, layer_norm=Norm)


def mtp_specs(
    config: TransformerConfig,
    layers: TransformerBlockSubmodules | ModuleSpec,
    *,
    vp_stage: int | None,
) -> MultiTokenPredictionBlockSubmodules | None:
    """Return the specs of this chunk's multi-token-prediction layers, like its last layer's."""
    if config.mtp_num_layers is None:
        return None
    specs = get_gpt_mtp_block_spec(config, layers, has_transformer_engine(), vp_stage=vp_stage)
    if specs is not None and not has_transformer_engine():
        for each in specs.layer_specs:
            each.submodules.enorm = each.submodules.hnorm = each.submodules.layer_norm = Norm
    return specs


def _layer(
    request: ProfileRequest, config: TransformerConfig, *, experts: int | None
) -> ModuleSpec:
    latent = request.model.kv_lora_rank is not None
    kind = {
        "num_experts": experts,
        "qk_layernorm": config.qk_layernorm,
        "multi_latent_attention": latent,
    }
    if has_transformer_engine():
        return get_gpt_layer_with_transformer_engine_spec(**kind, moe_grouped_gemm=True)
    layer = get_gpt_layer_local_spec(**kind, normalization=config.normalization)
    layer.submodules.input_layernorm = layer.submodules.pre_mlp_layernorm = Norm
    attention = layer.submodules.self_attention
    flash = request.training.attention == "flash"
    attention.submodules.core_attention = (
        FlashAttention if flash else LocalSpecProvider().core_attention()
    )
    norms = ("q_layernorm", "kv_layernorm") if latent else ("q_layernorm", "k_layernorm")
    if config.qk_layernorm:
        for name in norms:
            setattr(attention.submodules, name, Norm)
    if not latent:
        attention.module = CachedSelfAttention
    return layer


def _without_transformer_engine() -> None:
    """Define names that Megatron Core 0.16 uses, but defines only with Transformer Engine."""
    if has_transformer_engine():
        return
    multi_latent_attention.TELinear = type("TELinear", (), {})
    moe_utils.te_general_gemm = None
    random.FP8GlobalStateManager = SimpleNamespace(
        is_fp8_enabled=lambda: False, get_fp8_recipe=lambda: None
    )
    random.activation_recompute_forward = random.fp8_autocast = lambda **_: contextlib.nullcontext()
