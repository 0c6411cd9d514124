"""Build the requested model in Megatron Core: configuration, layers, weights, DDP wrapper."""

import math
import re
import zlib
from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
from megatron.core.models.gpt import GPTModel
from megatron.core.tensor_parallel import model_parallel_cuda_manual_seed
from megatron.core.transformer import MLATransformerConfig, TransformerConfig
from megatron.core.transformer.enums import AttnBackend
from megatron.core.transformer.module import Float16Module
from megatron.core.utils import get_model_config
from torch.nn import functional

from hp_tool.cluster.profiler.layers import layer_specs, mtp_specs
from hp_tool.cluster.profiler.support import supported_overlaps
from hp_tool.domain.measurement import ProfileRequest
from hp_tool.domain.model import ModelSpec
from hp_tool.domain.parallel import Recompute
from hp_tool.domain.pipeline_layout import chunk_layers, missing_layers
from hp_tool.domain.switches import Switches

_POSITIONS = {"learned": "learned_absolute", "rotary": "rope", "none": "none"}
_DTYPES = {
    "bf16": torch.bfloat16,
    "fp8": torch.bfloat16,
    "fp16": torch.float16,
    "fp32": torch.float32,
}
OF_DDP = ("overlap_grad_reduce", "overlap_param_gather")
_BLOCK = 2**20  # elements hashed at a time, so that initialisation never sets the peak of memory


def build(request: ProfileRequest, *, device: torch.device) -> list[DistributedDataParallel]:
    """Build this rank's model chunks (a single one unless interleaved).

    The process group must exist.
    """
    chunks = build_chunks(request, device=device)
    config = get_model_config(chunks[0])
    ddp = DistributedDataParallelConfig(**ddp_fields(request))
    # As in Megatron's training loop, the gradients of later chunks are reduced as a single bucket.
    wrapped = [
        DistributedDataParallel(config, ddp, chunk, disable_bucketing=index > 0)
        for index, chunk in enumerate(chunks)
    ]
    if ddp.overlap_grad_reduce:  # Megatron's training loop sets it, too.
        config.no_sync_func, config.grad_sync_func = (
            functions if len(wrapped) > 1 else functions[0]
            for functions in (
                [chunk.no_sync for chunk in wrapped],
                [chunk.start_grad_sync for chunk in wrapped],
            )
        )
    return wrapped


def ddp_fields(request: ProfileRequest) -> dict[str, Any]:
    """Return the fields of Megatron Core's DistributedDataParallelConfig."""
    run, _ = supported_overlaps(request)
    return {
        "grad_reduce_in_fp32": request.training.gradient_precision in (None, "fp32"),
        "use_distributed_optimizer": request.parallel.zero_stage == 1,
        **{name: value for name, value in run.items() if name in OF_DDP},
    }


def build_chunks(request: ProfileRequest, *, device: torch.device) -> list[torch.nn.Module]:
    """Build this rank's model chunks without data parallelism, for serving."""
    parallel = request.parallel
    parallel_state.initialize_model_parallel(
        parallel.tensor_parallel_size,
        parallel.pipeline_parallel_size,
        _interleaving_fields(request),
        context_parallel_size=parallel.context_parallel_size,
        expert_model_parallel_size=parallel.expert_parallel_size,
        expert_tensor_parallel_size=parallel.expert_tensor_parallel_size,
        create_gloo_process_groups=False,
    )
    run, _ = supported_overlaps(request)
    graphs = run["cuda_graph_impl"] != "none"
    model_parallel_cuda_manual_seed(
        request.seed, te_rng_tracker=graphs, use_cudagraphable_rng=graphs
    )
    config = transformer_config(request, cuda=device.type == "cuda")
    if config.tp_comm_overlap:
        _start_userbuffers(request)
    return [
        _build_chunk(request, config, vp_stage=stage, device=device)
        for stage in range(parallel.virtual_pipeline_parallel_size)
    ]


def transformer_config(request: ProfileRequest, *, cuda: bool) -> TransformerConfig:
    """Return Megatron Core's configuration of the request."""
    run, _ = supported_overlaps(request)
    latent = request.model.kv_lora_rank is not None
    return (MLATransformerConfig if latent else TransformerConfig)(
        **transformer_fields(request, run=run, cuda=cuda)
    )


def transformer_fields(request: ProfileRequest, *, run: Switches, cuda: bool) -> dict[str, Any]:
    """Return the fields of the TransformerConfig. `run` selects the overlaps and fusions."""
    model, training, parallel = request.model, request.training, request.parallel
    dtype = _DTYPES[training.precision]
    return dict(
        num_layers=model.num_hidden_layers,
        hidden_size=model.hidden_size,
        num_attention_heads=model.num_attention_heads,
        num_query_groups=model.kv_heads,
        kv_channels=model.head_size,
        **_latent_fields(model),
        **_expert_fields(request),
        ffn_hidden_size=model.ffn_size,
        gated_linear_unit=model.gated_mlp,
        activation_func=functional.silu if model.gated_mlp else functional.gelu,
        normalization="RMSNorm" if model.normalization == "rmsnorm" else "LayerNorm",
        add_bias_linear=model.has_mlp_bias,
        add_qkv_bias=model.has_attention_bias,
        qk_layernorm=model.query_key_norm is not None or model.kv_lora_rank is not None,
        hidden_dropout=training.dropout,
        attention_dropout=training.dropout,
        bf16=training.precision in ("bf16", "fp8"),
        fp8="hybrid" if training.precision == "fp8" else None,
        fp8_recipe=training.fp8_recipe or "delayed",
        fp16=training.precision == "fp16",
        params_dtype=dtype,
        tensor_model_parallel_size=parallel.tensor_parallel_size,
        pipeline_model_parallel_size=parallel.pipeline_parallel_size,
        virtual_pipeline_model_parallel_size=_interleaving_fields(request),
        **_end_stage_layers(request),
        context_parallel_size=parallel.context_parallel_size,
        cp_comm_type=parallel.context_parallel_communication or "p2p",
        sequence_parallel=parallel.sequence_parallel and parallel.tensor_parallel_size > 1,
        pipeline_dtype=dtype,
        # Megatron frees an output once its send is posted. NCCL's streams keep that memory alive,
        # but gloo would send overwritten data.
        deallocate_pipeline_outputs=cuda,
        attention_backend=AttnBackend.auto
        if training.attention == "flash"
        else AttnBackend.unfused,
        mtp_num_layers=model.num_nextn_predict_layers or None,
        **{name: value for name, value in run.items() if name not in OF_DDP},
        **({"cuda_graph_scope": "full_iteration"} if run["cuda_graph_impl"] != "none" else {}),
        **_recompute_fields(request),
    )


def _latent_fields(model: ModelSpec) -> dict[str, Any]:
    if model.kv_lora_rank is None:
        return {}
    return {
        "q_lora_rank": model.q_lora_rank,
        "kv_lora_rank": model.kv_lora_rank,
        "qk_head_dim": model.qk_nope_head_dim,
        "qk_pos_emb_head_dim": model.qk_rope_head_dim,
        "v_head_dim": model.v_head_dim,
        "rope_type": "rope",
    }


def _expert_fields(request: ProfileRequest) -> dict[str, Any]:
    """Return the fields of routed and shared experts.

    The router has no auxiliary loss, which would be added to the model's, and a few steps would not
    balance it anyway. For balanced routing, Megatron assigns tokens at random instead.
    """
    model, parallel = request.model, request.parallel
    if model.num_experts is None:
        return {}
    shared = model.shared_expert_size
    return {
        "num_moe_experts": model.num_experts,
        "moe_router_topk": model.num_experts_per_tok or 1,
        "moe_ffn_hidden_size": model.moe_intermediate_size or model.ffn_size,
        "moe_shared_expert_intermediate_size": shared or None,
        "moe_shared_expert_gate": model.shared_expert_gate,
        "moe_layer_freq": [
            int(n >= model.first_k_dense_replace) for n in range(model.num_hidden_layers)
        ],
        "moe_router_num_groups": model.n_group,
        "moe_router_group_topk": model.topk_group,
        "moe_router_load_balancing_type": "none",
        "moe_router_force_load_balancing": request.balanced_routing,
        "moe_expert_capacity_factor": request.training.expert_capacity_factor,
        "expert_model_parallel_size": parallel.expert_parallel_size,
        "expert_tensor_parallel_size": parallel.expert_tensor_parallel_size,
    }


def _interleaving_fields(request: ProfileRequest) -> int | None:
    chunks = request.parallel.virtual_pipeline_parallel_size
    return chunks if chunks > 1 else None


def _end_stage_layers(request: ProfileRequest) -> dict[str, Any]:
    """Return the layer counts of the first and last stage.

    Empty if all stages have equally many layers.
    """
    parallel, layers, dense = (
        request.parallel,
        request.model.num_hidden_layers,
        request.model.begins_dense,
    )
    stages, chunks = parallel.pipeline_parallel_size, parallel.virtual_pipeline_parallel_size
    first, last = missing_layers(
        num_layers=layers, stages=stages, chunks=chunks, begins_dense=dense
    )
    if (first, last) == (0, 0):
        return {}
    if last == 1:
        return {
            "account_for_embedding_in_pipeline_split": first == 1,
            "account_for_loss_in_pipeline_split": True,
        }
    counts = chunk_layers(num_layers=layers, stages=stages, chunks=chunks, begins_dense=dense)
    return {
        "num_layers_in_first_pipeline_stage": counts[0],
        "num_layers_in_last_pipeline_stage": counts[-1],
    }


def _recompute_fields(request: ProfileRequest) -> dict[str, Any]:
    recompute = request.parallel.recompute
    if isinstance(recompute, str):
        recompute = Recompute(granularity=recompute)
    if recompute.granularity == "none":
        return {}
    if recompute.granularity == "selective":
        return {
            "recompute_granularity": "selective",
            "recompute_modules": list(recompute.modules or ("core_attn",)),
        }
    method = recompute.method or "uniform"
    parallel = request.parallel
    chunks = parallel.pipeline_parallel_size * parallel.virtual_pipeline_parallel_size
    per_chunk = -(-request.model.num_hidden_layers // chunks)
    default = 1 if method == "uniform" else per_chunk
    return {
        "recompute_granularity": "full",
        "recompute_method": method,
        "recompute_num_layers": recompute.num_layers
        if recompute.num_layers is not None
        else default,
    }


def _start_userbuffers(request: ProfileRequest) -> None:
    """Create the buffers for Transformer Engine's tensor-parallel overlap, as Megatron-LM does."""
    from megatron.core.utils import is_te_min_version
    from transformer_engine.pytorch.module import base

    parallel, training = request.parallel, request.training
    is_fp8 = training.precision == "fp8"
    quantized: dict[str, Any] = {"use_fp8": is_fp8}
    if is_te_min_version("2.7.0"):
        modes = base.UserBufferQuantizationMode
        quantized = {"quantization_modes": [modes.FP8 if is_fp8 else modes.NONE]}
    rows = training.sequence_length * parallel.micro_batch_size // parallel.context_parallel_size
    base.initialize_ub(
        shape=[rows, request.model.hidden_size],
        tp_size=parallel.tensor_parallel_size,
        ub_cfgs={},
        bootstrap_backend="nccl",
        **quantized,
    )


def _build_chunk(
    request: ProfileRequest, config: TransformerConfig, *, vp_stage: int, device: torch.device
) -> torch.nn.Module:
    model = request.model
    stage = vp_stage if _interleaving_fields(request) else None
    layers = layer_specs(request, config, vp_stage=stage)
    chunk = GPTModel(
        config=config,
        transformer_layer_spec=layers,
        mtp_block_spec=mtp_specs(config, layers, vp_stage=stage),
        vocab_size=model.vocab_size,
        max_sequence_length=(model.max_position_embeddings or request.training.sequence_length)
        + model.position_embedding_offset,
        pre_process=parallel_state.is_pipeline_first_stage(ignore_virtual=False, vp_stage=stage),
        post_process=parallel_state.is_pipeline_last_stage(ignore_virtual=False, vp_stage=stage),
        share_embeddings_and_output_weights=model.tie_word_embeddings,
        position_embedding_type=_POSITIONS[model.positions],
        vp_stage=stage,
    ).to(device)
    _initialise(chunk, config=config, tied=model.tie_word_embeddings, seed=request.seed)
    return Float16Module(config, chunk) if config.params_dtype != torch.float32 else chunk


@torch.no_grad()
def _initialise(
    chunk: torch.nn.Module, *, config: TransformerConfig, tied: bool, seed: int
) -> None:
    """Fill every matrix of a model chunk. As in Megatron, biases stay 0 and norm weights 1.

    Each weight is a hash of its name and its position in the unsharded matrix, so every TP, PP and
    DP size starts from the same model. All configurations must therefore have equal losses, which
    every profile run checks.
    """
    for name, weight in chunk.named_parameters():
        if weight.dim() == 2:
            name = _global_name(name, chunk, tied=tied)
            std = config.init_method_std
            if "linear_proj" in name or "linear_fc2" in name:
                std /= math.sqrt(2 * config.num_layers)
            stride = 2 if config.gated_linear_unit and "linear_fc1" in name else 1
            # Dimension that tensor parallelism shards; None for an unsharded matrix.
            dim = weight.partition_dim if getattr(weight, "tensor_model_parallel", False) else None
            place = {"dim": dim, "shards": _shard_of(name), "stride": stride}
            _fill(weight.data, **place, std=std, seed=zlib.crc32(f"{seed}/{name}".encode()))


def _global_name(name: str, chunk: torch.nn.Module, *, tied: bool) -> str:
    """Return a parameter's name with the global layer number.

    A tied output layer has the embedding's name.
    """
    if tied and name == "output_layer.weight":
        return "embedding.word_embeddings.weight"
    if predicted := re.match(r"mtp\.layers\.(\d+)\.", name):  # All layers are on one stage.
        layer = chunk.mtp.layers[int(predicted[1])].transformer_layer
        return predicted[0] + _global_expert(name[predicted.end() :], layer=layer)
    match = re.match(r"decoder\.layers\.(\d+)\.", name)
    if match is None:
        return name
    number = chunk.decoder.layers[int(match[1])].layer_number
    return f"decoder.layers.{number}.{_global_expert(name[match.end() :], layer=chunk.decoder.layers[int(match[1])])}"  # noqa: E501


def _global_expert(name: str, *, layer: torch.nn.Module) -> str:
    match = re.search(
        r"experts\.local_experts\.(\d+)\.(linear_fc\d)\.weight|experts\.(linear_fc\d)\.weight(\d+)",
        name,
    )
    if match is None:
        return name
    first = parallel_state.get_expert_model_parallel_rank() * layer.mlp.experts.num_local_experts
    return f"experts.{first + int(match[1] or match[4])}.{match[2] or match[3]}"


def _shard_of(name: str) -> tuple[int, int]:
    """Return the number of shards of a matrix and the index of this rank's shard.

    Experts have their own group.
    """
    if ".experts." in name:
        return (
            parallel_state.get_expert_tensor_parallel_world_size(),
            parallel_state.get_expert_tensor_parallel_rank(),
        )
    return (
        parallel_state.get_tensor_model_parallel_world_size(),
        parallel_state.get_tensor_model_parallel_rank(),
    )


def _fill(
    weight: torch.Tensor,
    *,
    dim: int | None,
    shards: tuple[int, int],
    stride: int,
    std: float,
    seed: int,
) -> None:
    """Fill this rank's [rows, columns] shard of a matrix with uniform values.

    Their standard deviation is `std`.
    """
    size, rank = shards
    rows, columns = (torch.arange(n, device=weight.device) for n in weight.shape)
    width = weight.shape[1] * (size if dim == 1 else 1)
    if dim == 0:
        # Stride 2 for gated MLPs: a rank holds its shard of the gate, followed by its shard of the
        # up projection.
        rows_per_part = weight.shape[0] // stride
        rows = (rows // rows_per_part * size + rank) * rows_per_part + rows % rows_per_part
    elif dim == 1:
        columns = columns + rank * weight.shape[1]
    block = max(1, _BLOCK // weight.shape[1])
    for start in range(0, weight.shape[0], block):
        place = rows[start : start + block, None] * width + columns
        weight[start : start + block] = (_hash(place, seed=seed) * 2 - 1) * (math.sqrt(3) * std)


def _hash(place: torch.Tensor, *, seed: int) -> torch.Tensor:
    """Hash int64 positions to float32 in [0, 1).

    Uses MurmurHash3's 32-bit finalizer after a Weyl sequence.
    """
    mask = 0xFFFFFFFF
    x = (place * 0x9E3779B1 + seed) & mask
    x = ((x ^ (x >> 16)) * 0x85EBCA6B) & mask
    x = ((x ^ (x >> 13)) * 0xC2B2AE35) & mask
    return ((x ^ (x >> 16)) >> 8).float() * 2.0**-24
