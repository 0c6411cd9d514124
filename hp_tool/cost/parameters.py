"""Parameter counts: of a whole model, and of one pipeline stage's slice."""

from __future__ import annotations

from typing import cast

import numpy as np

from hp_tool.cost.arrays import FloatArray, IntArray, maximum
from hp_tool.domain.model import ModelSpec

Size = IntArray | int


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
    """Projections, their biases (row-parallel ones whole), the block's norm and the latents' norms, on one rank; norms of
    queries and keys (of all heads: split with them) and sinks where the model has them.
    """
    t = cast(IntArray, tensor_parallel_size)
    biases: FloatArray | float = 0.0
    latent_norms = 0.0
    if model.has_attention_bias:
        d = model.head_size
        biases = model.num_attention_heads * d / t + 2.0 * d * maximum(model.kv_heads / t, 1.0)
    if model.has_attention_output_bias:
        biases = biases + model.hidden_size
    if model.query_key_norm is not None:
        biases = biases + _query_key_norms(model, t)
    if model.attention_sinks:
        biases = biases + model.num_attention_heads / t
    if model.kv_lora_rank is not None:
        latent_norms = float(model.kv_lora_rank + (model.q_lora_rank or 0))
    return attention_matrices(model, tensor_parallel_size=tensor_parallel_size) + biases + norm_weights(model) + latent_norms


def _query_key_norms(model: ModelSpec, t: IntArray) -> FloatArray | float:
    """Vectors of d for queries and for keys, or of the local heads' a d / t + k d / t."""
    width: FloatArray | float = 2.0 * model.head_size
    if model.query_key_norm == "all_heads":
        width = model.head_size * (model.num_attention_heads / t + maximum(model.kv_heads / t, 1.0))
    return model.vectors_per_norm * width


def mlp_matrices(model: ModelSpec) -> float:
    """Weights of one dense MLP: two matrices of h x ffn, three where gated."""
    return _matrices(model) * model.hidden_size * model.ffn_size


def mlp_parameters(model: ModelSpec, *, tensor_parallel_size: Size = 1) -> FloatArray:
    """A dense MLP on one rank, and the layer's norms but attention's."""
    t = cast(IntArray, tensor_parallel_size)
    biases: FloatArray | float = 0.0
    if model.has_mlp_bias:
        biases = (_matrices(model) - 1.0) * model.ffn_size / t + model.hidden_size
    return mlp_matrices(model) / t + biases + _norms_beside_attention(model)


def layer_parameters(model: ModelSpec, *, tensor_parallel_size: Size = 1) -> FloatArray:
    """One dense layer on one of t ranks."""
    attention = attention_parameters(model, tensor_parallel_size=tensor_parallel_size)
    return attention + mlp_parameters(model, tensor_parallel_size=tensor_parallel_size)


def expert_parameters(model: ModelSpec) -> float:
    """All routed experts of one MoE layer."""
    experts, width = model.num_experts or 0, _expert_width(model)
    biases = experts * ((_matrices(model) - 1.0) * width + model.hidden_size) if model.expert_bias else 0.0
    return experts * _matrices(model) * model.hidden_size * width + biases


def moe_shared_parameters(model: ModelSpec, *, tensor_parallel_size: Size = 1) -> FloatArray:
    """One MoE layer without its routed experts on one rank: attention, router and shared experts' gate (whole), shared
    experts, norm.
    """
    t = cast(IntArray, tensor_parallel_size)
    router = model.hidden_size * ((model.num_experts or 0) + model.shared_expert_gate)
    router += (model.num_experts or 0) * model.router_bias
    attention = attention_parameters(model, tensor_parallel_size=tensor_parallel_size)
    return attention + shared_expert_matrices(model) / t + router + _norms_beside_attention(model)


def shared_expert_matrices(model: ModelSpec) -> float:
    """Weights of the shared experts of one MoE layer."""
    return _matrices(model) * model.hidden_size * model.shared_expert_size


def active_expert_matrices(model: ModelSpec) -> float:
    """Weights a token meets in one MoE block: top-k and shared experts, and the router."""
    width = (model.num_experts_per_tok or 0) * _expert_width(model) + model.shared_expert_size
    return model.hidden_size * (width * _matrices(model) + (model.num_experts or 0))


def norm_weights(model: ModelSpec) -> float:
    """Weights of one normalization: h for rmsnorm, 2h for layernorm, unless norm_vectors says otherwise."""
    return float(model.vectors_per_norm * model.hidden_size)


def final_norm_weights(model: ModelSpec) -> float:
    """The norm behind the last layer, of an encoder-decoder model the decoder's."""
    return norm_weights(model) if model.final_norm else 0.0


def _norms_beside_attention(model: ModelSpec) -> float:
    """A layer's norms but the one counted with its attention."""
    return (model.norms_per_layer - 1) * norm_weights(model)


def moe_layers(model: ModelSpec) -> int:
    """Layers with experts: all but the leading dense ones; none in a dense model."""
    return max(model.num_hidden_layers - model.first_k_dense_replace, 0) if model.num_experts else 0


def embedding_parameters(model: ModelSpec, *, sequence_length: int, tensor_parallel_size: Size = 1) -> FloatArray:
    """The input embedding on one rank: V h / t; learned positions, token types and norm, which every rank keeps whole."""
    rows = model.token_types
    if model.positions == "learned":
        rows += model.position_tables * ((model.max_position_embeddings or sequence_length) + model.position_embedding_offset)
    sides = 2.0 if model.architecture == "encoder_decoder" else 1.0
    whole = rows * model.hidden_size + (sides * norm_weights(model) if model.embedding_norm else 0.0)
    return model.vocab_size * model.hidden_size / np.asarray(tensor_parallel_size) + whole


def output_parameters(model: ModelSpec, *, tensor_parallel_size: Size = 1) -> FloatArray:
    """The output layer's matrix on one rank: V h / t, whether tied (then it is the embedding's copy) or not."""
    return model.vocab_size * model.hidden_size / np.asarray(tensor_parallel_size)


def cross_parameters(model: ModelSpec, *, tensor_parallel_size: Size = 1) -> FloatArray:
    """Cross attention of one decoder layer on one rank: the same matrices and norm as self-attention's."""
    return attention_parameters(model, tensor_parallel_size=tensor_parallel_size)


def special_parameters(model: ModelSpec, *, tensor_parallel_size: Size = 1) -> FloatArray | float:
    """What other architectures have beside the layers, embedding and head of a decoder, on one of t ranks.

    encoder_decoder (T5): cross attention in each decoder layer, the encoder's final norm, tables of relative positions. encoder
    (BERT): the masked language model's dense (h^2 + h) and norm; the pooler (h^2 + h) and the next-sentence classifier
    (2h + 2). A bias of the output layer (V / t). All but cross attention and output bias are whole on every rank (Megatron
    Core). Not counted: the output bias of Megatron's T5.
    """
    h, whole = float(model.hidden_size), 0.0
    if model.head_dense_vectors:
        whole += head_matrices(model) + (model.head_dense_vectors - 1) * h + norm_weights(model)
    if model.has_sentence_head:
        whole += h * h + h + 2.0 * h + 2.0
    if model.architecture == "encoder_decoder":
        if model.positions == "relative":
            tables = model.total_layers if model.relative_attention_every_layer else 2
            whole += tables * model.relative_attention_num_buckets * model.num_attention_heads
        cross = model.decoder_layers * cross_parameters(model, tensor_parallel_size=tensor_parallel_size)
        return cross + final_norm_weights(model) + whole + _output_bias(model, tensor_parallel_size)
    return whole + _output_bias(model, tensor_parallel_size)


def _output_bias(model: ModelSpec, t: Size) -> FloatArray | float:
    return model.vocab_size / np.asarray(t) if model.has_output_bias else 0.0


def head_matrices(model: ModelSpec) -> float:
    """Weights that a token meets between the layers and the output layer: the masked language model's dense of an encoder.
    The pooler and the classifier see one token of a sequence and are not counted.
    """
    return float(model.hidden_size) ** 2 if model.head_dense_vectors else 0.0


def total_parameters(model: ModelSpec, *, sequence_length: int = 0) -> float:
    """Parameters of the whole model; learned positions count max_position_embeddings, else sequence_length rows."""
    output = 0.0 if model.tie_word_embeddings else float(output_parameters(model))
    sparse = moe_layers(model)
    layers = float(special_parameters(model)) + (model.total_layers - sparse) * float(layer_parameters(model))
    layers += sparse * (float(moe_shared_parameters(model)) + expert_parameters(model))
    return layers + float(embedding_parameters(model, sequence_length=sequence_length)) + output + final_norm_weights(model)


def active_parameters(model: ModelSpec, *, sequence_length: int = 0) -> float:
    """Parameters of the whole model without the routed experts that a token is not sent to."""
    idle = 1.0 - (model.num_experts_per_tok or 0) / model.num_experts if model.num_experts else 0.0
    return total_parameters(model, sequence_length=sequence_length) - moe_layers(model) * idle * expert_parameters(model)


def _matrices(model: ModelSpec) -> float:
    return 3.0 if model.gated_mlp else 2.0


def _expert_width(model: ModelSpec) -> float:
    return float(model.moe_intermediate_size or model.ffn_size)
