"""The request's model in Megatron Core: configuration, layers, data-parallel wrapper."""

from __future__ import annotations

from importlib import util
from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
from megatron.core.models.backends import LocalSpecProvider
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec, get_gpt_layer_with_transformer_engine_spec
from megatron.core.tensor_parallel import model_parallel_cuda_manual_seed
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.enums import AttnBackend
from megatron.core.transformer.module import Float16Module
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules, get_num_layers_to_build
from megatron.core.utils import get_model_config
from torch.nn import functional

from hp_tool.domain.measurement import ProfileRequest
from hp_tool.domain.parallel import Recompute
from hp_tool.profiler.layers import CachedSelfAttention, FlashAttention, Norm
from hp_tool.profiler.weights import initialise

_POSITIONS = {"learned": "learned_absolute", "rotary": "rope", "none": "none"}
_DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}


def build(request: ProfileRequest, *, device: torch.device) -> list[DistributedDataParallel]:
    """This rank's model chunks (one unless pipelining is interleaved), ready to train. Needs the process group."""
    chunks = build_chunks(request, device=device)
    config = get_model_config(chunks[0])
    return [_data_parallel(request, config, chunk, first=index == 0) for index, chunk in enumerate(chunks)]


def build_chunks(request: ProfileRequest, *, device: torch.device) -> list[torch.nn.Module]:
    """The same without what gradients need."""
    parallel = request.parallel
    parallel_state.initialize_model_parallel(
        parallel.tensor_parallel_size,
        parallel.pipeline_parallel_size,
        _interleaving(request),
        create_gloo_process_groups=False,
    )
    model_parallel_cuda_manual_seed(request.seed)
    config = transformer_config(request, cuda=device.type == "cuda")
    return [_chunk(request, config, vp_stage=stage, device=device) for stage in range(parallel.virtual_pipeline_parallel_size)]


def transformer_config(request: ProfileRequest, *, cuda: bool) -> TransformerConfig:
    """Megatron Core's configuration of the request."""
    model, training, parallel = request.model, request.training, request.parallel
    dtype = _DTYPES[training.precision]
    interleaved = _interleaving(request) is not None
    return TransformerConfig(
        num_layers=model.num_hidden_layers,
        hidden_size=model.hidden_size,
        num_attention_heads=model.num_attention_heads,
        num_query_groups=model.kv_heads,
        kv_channels=model.head_size,
        ffn_hidden_size=model.ffn_size,
        gated_linear_unit=model.gated_mlp,
        activation_func=functional.silu if model.gated_mlp else functional.gelu,
        normalization="RMSNorm" if model.normalization == "rmsnorm" else "LayerNorm",
        add_bias_linear=model.has_mlp_bias,
        add_qkv_bias=model.has_attention_bias,
        qk_layernorm=model.query_key_norm is not None,
        hidden_dropout=training.dropout,
        attention_dropout=training.dropout,
        bf16=training.precision == "bf16",
        fp16=training.precision == "fp16",
        params_dtype=dtype,
        tensor_model_parallel_size=parallel.tensor_parallel_size,
        pipeline_model_parallel_size=parallel.pipeline_parallel_size,
        virtual_pipeline_model_parallel_size=_interleaving(request),
        sequence_parallel=parallel.sequence_parallel and parallel.tensor_parallel_size > 1,
        pipeline_dtype=dtype,
        # Megatron frees an output once its send is posted: NCCL's streams keep that memory alive, gloo sends what came next.
        deallocate_pipeline_outputs=cuda,
        # Batched sends and receives are matched by order alone. Interleaved over two stages, the same peer is both the
        # previous and the next one, and activations would arrive as gradients: overlapped mode posts them one by one.
        overlap_p2p_comm=interleaved,
        batch_p2p_comm=not interleaved,
        attention_backend=AttnBackend.flash if training.attention == "flash" else AttnBackend.unfused,
        cross_entropy_loss_fusion=training.cross_entropy == "fused",
        # Compiled fusions as Megatron's launcher has them by default; those that need Apex's kernels stay off.
        bias_activation_fusion=cuda and (model.gated_mlp or model.has_mlp_bias),
        bias_dropout_fusion=cuda,
        masked_softmax_fusion=False,
        gradient_accumulation_fusion=False,
        **_recompute(request),
    )


def _interleaving(request: ProfileRequest) -> int | None:
    chunks = request.parallel.virtual_pipeline_parallel_size
    return chunks if chunks > 1 else None


def _recompute(request: ProfileRequest) -> dict[str, Any]:
    """Megatron's recompute_* arguments, with the defaults that Recompute's docstrings promise."""
    recompute = request.parallel.recompute
    if isinstance(recompute, str):
        recompute = Recompute(granularity=recompute)
    if recompute.granularity == "none":
        return {}
    if recompute.granularity == "selective":
        return {"recompute_granularity": "selective", "recompute_modules": list(recompute.modules or ("core_attn",))}
    method = recompute.method or "uniform"
    parallel = request.parallel
    per_chunk = request.model.num_hidden_layers // (parallel.pipeline_parallel_size * parallel.virtual_pipeline_parallel_size)
    default = 1 if method == "uniform" else per_chunk
    return {
        "recompute_granularity": "full",
        "recompute_method": method,
        "recompute_num_layers": recompute.num_layers if recompute.num_layers is not None else default,
    }


def _layers(
    request: ProfileRequest, config: TransformerConfig, *, vp_stage: int | None
) -> ModuleSpec | TransformerBlockSubmodules:
    """Transformer Engine's layers where it is installed, else Megatron's own with the norms and attention of `layers`."""
    if torch.cuda.is_available() and util.find_spec("transformer_engine"):
        return get_gpt_layer_with_transformer_engine_spec(qk_layernorm=config.qk_layernorm)
    layer = get_gpt_layer_local_spec(normalization=config.normalization, qk_layernorm=config.qk_layernorm)
    layer.submodules.input_layernorm = layer.submodules.pre_mlp_layernorm = Norm
    attention = FlashAttention if request.training.attention == "flash" else LocalSpecProvider().core_attention()
    layer.submodules.self_attention.submodules.core_attention = attention
    layer.submodules.self_attention.module = CachedSelfAttention
    if config.qk_layernorm:
        layer.submodules.self_attention.submodules.q_layernorm = Norm
        layer.submodules.self_attention.submodules.k_layernorm = Norm
    return TransformerBlockSubmodules(layer_specs=[layer] * get_num_layers_to_build(config, vp_stage=vp_stage), layer_norm=Norm)


def _chunk(request: ProfileRequest, config: TransformerConfig, *, vp_stage: int, device: torch.device) -> torch.nn.Module:
    """One model chunk on its device, in the precision of the run."""
    model = request.model
    stage = vp_stage if _interleaving(request) else None
    chunk = GPTModel(
        config=config,
        transformer_layer_spec=_layers(request, config, vp_stage=stage),
        vocab_size=model.vocab_size,
        max_sequence_length=(model.max_position_embeddings or request.training.sequence_length)
        + model.position_embedding_offset,
        pre_process=parallel_state.is_pipeline_first_stage(ignore_virtual=False, vp_stage=stage),
        post_process=parallel_state.is_pipeline_last_stage(ignore_virtual=False, vp_stage=stage),
        share_embeddings_and_output_weights=model.tie_word_embeddings,
        position_embedding_type=_POSITIONS[model.positions],
        vp_stage=stage,
    ).to(device)
    initialise(chunk, config=config, tied=model.tie_word_embeddings, seed=request.seed)
    return Float16Module(config, chunk) if config.params_dtype != torch.float32 else chunk


def _data_parallel(
    request: ProfileRequest, config: TransformerConfig, chunk: torch.nn.Module, *, first: bool
) -> DistributedDataParallel:
    ddp = DistributedDataParallelConfig(
        grad_reduce_in_fp32=request.training.gradient_precision in (None, "fp32"),
        use_distributed_optimizer=request.parallel.zero_stage == 1,
    )
    # Later chunks' gradients are reduced as one bucket, as Megatron's own training loop does.
    return DistributedDataParallel(config, ddp, chunk, disable_bucketing=not first)
