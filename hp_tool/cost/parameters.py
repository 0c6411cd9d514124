"""Parameter counts: of a whole model, and of one pipeline stage's slice."""

from __future__ import annotations

from typing import cast

import numpy as np

from hp_tool.cost.candidates import FloatArray, IntArray
from hp_tool.cost.elementwise import maximum
from hp_tool.domain.model import ModelSpec

Size = IntArray | int

RELATIVE_BUCKETS = 32
"""Distances that relative positions tell apart (arXiv 1910.10683 section 2.1)."""
TOKEN_TYPES = 2
"""First and second sentence (arXiv 1810.04805)."""


def attention_matrices(model: ModelSpec, *, tensor_parallel_size: Size = 1) -> FloatArray:
    """Weights of one attention block's projections on one rank: h a d + 2 h k d + a d h, heads split t ways.

    With fewer key/value heads than ranks each rank keeps one whole head (Megatron Core). Latent attention (DeepSeek):
    down-projections are whole on every rank, up-projections split by heads.
    """
    t = cast(IntArray, tensor_parallel_size)
    h, heads = model.hidden_size, model.num_attention_heads / t
    if model.kv_lora_rank is None:
        d = model.head_size
        return h * d * (2.0 * heads + 2.0 * maximum(model.kv_heads / t, 1.0))
    nope, rope = model.qk_nope_head_dim or 0, model.qk_rope_head_dim or 0
    value = model.v_head_dim or model.head_size
    down = h * (model.kv_lora_rank + rope)
    up = model.kv_lora_rank * heads * (nope + value)
    if model.q_lora_rank is None:
        query = h * heads * (nope + rope)
    else:
        query = h * model.q_lora_rank + model.q_lora_rank * heads * (nope + rope)
    return query + down + up + heads * value * h


def attention_parameters(model: ModelSpec, *, tensor_parallel_size: Size = 1) -> FloatArray:
    """Projections, their biases (row-parallel ones whole), the block's norm and the latents' norms, on one rank."""
    t = cast(IntArray, tensor_parallel_size)
    biases: FloatArray | float = 0.0
    latent_norms = 0.0
    if model.has_attention_bias:
        d = model.head_size
        biases = model.num_attention_heads * d / t + 2.0 * d * maximum(model.kv_heads / t, 1.0) + model.hidden_size
    if model.kv_lora_rank is not None:
        latent_norms = float(model.kv_lora_rank + (model.q_lora_rank or 0))
    return attention_matrices(model, tensor_parallel_size=tensor_parallel_size) + biases + norm_weights(model) + latent_norms


def mlp_matrices(model: ModelSpec) -> float:
    """Weights of one dense MLP: two matrices of h x ffn, three where gated."""
    return _matrices(model) * model.hidden_size * model.ffn_size


def mlp_parameters(model: ModelSpec, *, tensor_parallel_size: Size = 1) -> FloatArray:
    """A dense MLP and its norm on one rank."""
    t = cast(IntArray, tensor_parallel_size)
    biases: FloatArray | float = 0.0
    if model.has_mlp_bias:
        biases = (_matrices(model) - 1.0) * model.ffn_size / t + model.hidden_size
    return mlp_matrices(model) / t + biases + norm_weights(model)


def layer_parameters(model: ModelSpec, *, tensor_parallel_size: Size = 1) -> FloatArray:
    """One dense layer on one of t ranks."""
    attention = attention_parameters(model, tensor_parallel_size=tensor_parallel_size)
    return attention + mlp_parameters(model, tensor_parallel_size=tensor_parallel_size)


def expert_parameters(model: ModelSpec) -> float:
    """All routed experts of one MoE layer."""
    return (model.num_experts or 0) * _matrices(model) * model.hidden_size * _expert_width(model)


def moe_shared_parameters(model: ModelSpec, *, tensor_parallel_size: Size = 1) -> FloatArray:
    """One MoE layer without its routed experts on one rank: attention, router (whole), shared experts, norm."""
    t = cast(IntArray, tensor_parallel_size)
    router = model.hidden_size * (model.num_experts or 0)
    shared = shared_expert_matrices(model)
    return attention_parameters(model, tensor_parallel_size=tensor_parallel_size) + shared / t + router + norm_weights(model)


def shared_expert_matrices(model: ModelSpec) -> float:
    """Weights of the shared experts of one MoE layer."""
    return model.num_shared_experts * _matrices(model) * model.hidden_size * _expert_width(model)


def active_expert_matrices(model: ModelSpec) -> float:
    """Weights a token meets in one MoE block: top-k and shared experts, and the router."""
    experts = (model.num_experts_per_tok or 0) + model.num_shared_experts
    return model.hidden_size * (experts * _matrices(model) * _expert_width(model) + (model.num_experts or 0))


def norm_weights(model: ModelSpec) -> float:
    """Weights of one normalization: h for rmsnorm, 2h for layernorm."""
    return (2.0 if model.normalization == "layernorm" else 1.0) * model.hidden_size


def moe_layers(model: ModelSpec) -> int:
    """Layers with experts: all but the leading dense ones; none in a dense model."""
    return max(model.num_hidden_layers - model.first_k_dense_replace, 0) if model.num_experts else 0


def embedding_parameters(model: ModelSpec, *, sequence_length: int, tensor_parallel_size: Size = 1) -> FloatArray:
    """The input embedding on one rank: V h / t, and learned positions, which every rank keeps whole."""
    positions = (model.max_position_embeddings or sequence_length) if model.positions == "learned" else 0
    return model.vocab_size * model.hidden_size / np.asarray(tensor_parallel_size) + positions * model.hidden_size


def output_parameters(model: ModelSpec, *, tensor_parallel_size: Size = 1) -> FloatArray:
    """The output layer's matrix on one rank: V h / t, whether tied (then it is the embedding's copy) or not."""
    return model.vocab_size * model.hidden_size / np.asarray(tensor_parallel_size)


def cross_parameters(model: ModelSpec, *, tensor_parallel_size: Size = 1) -> FloatArray:
    """Cross attention of one decoder layer on one rank: the same matrices and norm as self-attention's."""
    return attention_parameters(model, tensor_parallel_size=tensor_parallel_size)


def special_parameters(model: ModelSpec, *, tensor_parallel_size: Size = 1) -> FloatArray | float:
    """What other architectures have beside the layers, embedding and head of a decoder, on one of t ranks.

    encoder_decoder (T5): cross attention in each decoder layer, the encoder's final norm, a table of relative positions for
    each side. encoder (BERT): two token types (2h); the masked language model's dense (h^2 + h), norm and output bias
    (V / t); the pooler (h^2 + h) and the next-sentence classifier (2h + 2). All but cross attention and output bias are
    whole on every rank (Megatron Core). Not counted: the output bias of Megatron's T5.
    """
    h = float(model.hidden_size)
    if model.architecture == "encoder":
        output_bias = model.vocab_size / np.asarray(tensor_parallel_size)
        return 2.0 * head_matrices(model) + 2.0 * h + norm_weights(model) + (2.0 * h + 2.0) + TOKEN_TYPES * h + output_bias
    if model.architecture == "encoder_decoder":
        tables = 2.0 * RELATIVE_BUCKETS * model.num_attention_heads if model.positions == "relative" else 0.0
        cross = model.decoder_layers * cross_parameters(model, tensor_parallel_size=tensor_parallel_size)
        return cross + norm_weights(model) + tables
    return 0.0


def head_matrices(model: ModelSpec) -> float:
    """Weights that a token meets between the layers and the output layer: the masked language model's dense of an encoder.
    The pooler and the classifier see one token of a sequence and are not counted.
    """
    return float(model.hidden_size) ** 2 if model.architecture == "encoder" else 0.0


def total_parameters(model: ModelSpec, *, sequence_length: int = 0) -> float:
    """Parameters of the whole model; learned positions count max_position_embeddings, else sequence_length rows."""
    output = 0.0 if model.tie_word_embeddings else float(output_parameters(model))
    sparse = moe_layers(model)
    layers = float(special_parameters(model)) + (model.total_layers - sparse) * float(layer_parameters(model))
    layers += sparse * (float(moe_shared_parameters(model)) + expert_parameters(model))
    return layers + float(embedding_parameters(model, sequence_length=sequence_length)) + output + norm_weights(model)


def _matrices(model: ModelSpec) -> float:
    return 3.0 if model.gated_mlp else 2.0


def _expert_width(model: ModelSpec) -> float:
    return float(model.moe_intermediate_size or model.ffn_size)
