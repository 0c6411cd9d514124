"""Which modules a layer is made of: Transformer Engine's where it is installed, else Megatron's own with those of `layers`."""

from __future__ import annotations

import contextlib
from importlib import util
from types import SimpleNamespace

import torch
from megatron.core.models.backends import LocalSpecProvider
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec, get_gpt_layer_with_transformer_engine_spec
from megatron.core.tensor_parallel import random
from megatron.core.transformer import TransformerConfig, multi_latent_attention
from megatron.core.transformer.moe import moe_utils
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules, get_num_layers_to_build
from megatron.core.transformer.transformer_layer import get_transformer_layer_offset

from hp_tool.domain.measurement import ProfileRequest
from hp_tool.profiler.layers import CachedSelfAttention, FlashAttention, Norm


def has_transformer_engine() -> bool:
    """Whether its layers can run here."""
    return torch.cuda.is_available() and util.find_spec("transformer_engine") is not None


def layer_specs(
    request: ProfileRequest, config: TransformerConfig, *, vp_stage: int | None
) -> TransformerBlockSubmodules | ModuleSpec:
    """The layers of one model chunk; the first `first_k_dense_replace` of a model with experts are dense."""
    if has_transformer_engine() and not request.model.first_k_dense_replace:
        return _layer(request, config, experts=config.num_moe_experts)
    _without_transformer_engine()
    dense, sparse = (_layer(request, config, experts=experts) for experts in (None, config.num_moe_experts))
    first = get_transformer_layer_offset(config, vp_stage=vp_stage)
    numbers = range(first, first + get_num_layers_to_build(config, vp_stage=vp_stage))
    layers = [dense if number < request.model.first_k_dense_replace else sparse for number in numbers]
    return TransformerBlockSubmodules(layer_specs=layers, layer_norm=Norm)


def _layer(request: ProfileRequest, config: TransformerConfig, *, experts: int | None) -> ModuleSpec:
    latent = request.model.kv_lora_rank is not None
    kind = {"num_experts": experts, "qk_layernorm": config.qk_layernorm, "multi_latent_attention": latent}
    if has_transformer_engine():
        return get_gpt_layer_with_transformer_engine_spec(**kind, moe_grouped_gemm=True)
    layer = get_gpt_layer_local_spec(**kind, normalization=config.normalization)
    layer.submodules.input_layernorm = layer.submodules.pre_mlp_layernorm = Norm
    attention = layer.submodules.self_attention
    flash = request.training.attention == "flash"
    attention.submodules.core_attention = FlashAttention if flash else LocalSpecProvider().core_attention()
    norms = ("q_layernorm", "kv_layernorm") if latent else ("q_layernorm", "k_layernorm")
    if config.qk_layernorm:
        for name in norms:
            setattr(attention.submodules, name, Norm)
    if not latent:
        attention.module = CachedSelfAttention
    return layer


def _without_transformer_engine() -> None:
    """Names that Megatron Core 0.16 asks for, and leaves undefined where Transformer Engine is missing; fp8 is off here."""
    if has_transformer_engine():
        return
    multi_latent_attention.TELinear = type("TELinear", (), {})
    moe_utils.te_general_gemm = None
    random.FP8GlobalStateManager = SimpleNamespace(is_fp8_enabled=lambda: False, get_fp8_recipe=lambda: None)
    random.activation_recompute_forward = random.fp8_autocast = lambda **_: contextlib.nullcontext()
