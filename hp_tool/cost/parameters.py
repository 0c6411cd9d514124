"""Parameter counts: of a whole model, and of one pipeline stage's slice."""

from __future__ import annotations

import numpy as np

from hp_tool.cost.arrays import Floats, Ints
from hp_tool.cost.matrices import (
    attention_matrices,
    entries,
    expert_matrices,
    kv_heads,
    mlp_matrices,
    query_heads,
    router_matrix,
    shared_expert_matrices,
)
from hp_tool.domain.model import ModelSpec


def attention_parameters(model: ModelSpec, *, tensor_parallel_size: Ints = 1) -> Floats:
    """Projections, their biases (row-parallel ones whole), the block's norm and the latents' norms, on one rank; norms of
    queries and keys (of all heads: split with them) and sinks where the model has them.
    """
    t = tensor_parallel_size
    biases: Floats = 0.0
    latent_norms = 0.0
    if model.has_attention_bias:
        d = model.head_size
        biases = model.num_attention_heads * d / t + 2.0 * d * kv_heads(model, t)
    if model.has_attention_output_bias:
        biases = biases + model.hidden_size
    if model.query_key_norm is not None:
        biases = biases + _query_key_norms(model, t)
    if model.attention_sinks:
        biases = biases + model.num_attention_heads / t
    if model.kv_lora_rank is not None:
        latent_norms = float(model.kv_lora_rank + (model.q_lora_rank or 0))
    return entries(attention_matrices(model, tensor=t)) + biases + norm_weights(model) + latent_norms


def _query_key_norms(model: ModelSpec, t: Ints) -> Floats:
    """Vectors of d for queries and for keys, or of the local heads' a d / t + k d / t."""
    width: Floats = 2.0 * model.head_size
    if model.query_key_norm == "all_heads":
        width = model.head_size * (query_heads(model, t) + kv_heads(model, t))
    return model.vectors_per_norm * width


def mlp_parameters(model: ModelSpec, *, tensor_parallel_size: Ints = 1) -> Floats:
    """A dense MLP on one rank, and the layer's norms but attention's."""
    t = tensor_parallel_size
    biases: Floats = 0.0
    if model.has_mlp_bias:
        biases = model.mlp_inputs * float(model.ffn_size) / t + model.hidden_size
    return entries(mlp_matrices(model, tensor=t)) + biases + _norms_beside_attention(model)


def layer_parameters(model: ModelSpec, *, tensor_parallel_size: Ints = 1) -> Floats:
    """One dense layer on one of t ranks."""
    attention = attention_parameters(model, tensor_parallel_size=tensor_parallel_size)
    return attention + mlp_parameters(model, tensor_parallel_size=tensor_parallel_size)


def expert_parameters(model: ModelSpec) -> float:
    """All routed experts of one MoE layer."""
    biases = 0.0
    if model.expert_bias:
        biases = (model.num_experts or 0) * (float(model.mlp_inputs) * model.expert_size + model.hidden_size)
    return float(entries(expert_matrices(model))) + biases


def moe_shared_parameters(model: ModelSpec, *, tensor_parallel_size: Ints = 1) -> Floats:
    """One MoE layer without its routed experts on one rank: attention, router and shared experts' gate (whole), shared
    experts, norm.
    """
    t = tensor_parallel_size
    router = model.hidden_size * ((model.num_experts or 0) + model.shared_expert_gate)
    router += (model.num_experts or 0) * model.router_bias
    attention = attention_parameters(model, tensor_parallel_size=tensor_parallel_size)
    return attention + entries(shared_expert_matrices(model, tensor=t)) + router + _norms_beside_attention(model)


def active_expert_matrices(model: ModelSpec) -> float:
    """Weights a token meets in one MoE block: top-k and shared experts, and the router."""
    routed = entries(expert_matrices(model)) * (model.num_experts_per_tok or 0) / (model.num_experts or 1)
    return float(routed + entries([*shared_expert_matrices(model), router_matrix(model)]))


def norm_weights(model: ModelSpec) -> float:
    """Weights of one normalization: h for rmsnorm, 2h for layernorm, unless norm_vectors says otherwise."""
    return float(model.vectors_per_norm * model.hidden_size)


def final_norm_weights(model: ModelSpec) -> float:
    """The norm behind the last layer, of an encoder-decoder model the decoder's."""
    return norm_weights(model) if model.final_norm else 0.0


def _norms_beside_attention(model: ModelSpec) -> float:
    """A layer's norms but the one counted with its attention."""
    return (model.norms_per_layer - 1) * norm_weights(model)


def embedding_parameters(model: ModelSpec, *, sequence_length: int, tensor_parallel_size: Ints = 1) -> Floats:
    """The input embedding on one rank: V h / t; learned positions, token types and norm, which every rank keeps whole."""
    rows = model.token_types
    if model.positions == "learned":
        rows += model.position_tables * ((model.max_position_embeddings or sequence_length) + model.position_embedding_offset)
    sides = 2.0 if model.architecture == "encoder_decoder" else 1.0
    whole = rows * model.hidden_size + (sides * norm_weights(model) if model.embedding_norm else 0.0)
    return model.vocab_size * model.hidden_size / np.asarray(tensor_parallel_size) + whole


def output_parameters(model: ModelSpec, *, tensor_parallel_size: Ints = 1) -> Floats:
    """The output layer's matrix on one rank: V h / t, whether tied (then it is the embedding's copy) or not."""
    return model.vocab_size * model.hidden_size / np.asarray(tensor_parallel_size)


def cross_parameters(model: ModelSpec, *, tensor_parallel_size: Ints = 1) -> Floats:
    """Cross attention of one decoder layer on one rank: the same matrices and norm as self-attention's."""
    return attention_parameters(model, tensor_parallel_size=tensor_parallel_size)


def special_parameters(model: ModelSpec, *, tensor_parallel_size: Ints = 1) -> Floats:
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


def _output_bias(model: ModelSpec, t: Ints) -> Floats:
    return model.vocab_size / np.asarray(t) if model.has_output_bias else 0.0


def head_matrices(model: ModelSpec) -> float:
    """Weights that a token meets between the layers and the output layer: the masked language model's dense of an encoder.
    The pooler and the classifier see one token of a sequence and are not counted.
    """
    return float(model.hidden_size) ** 2 if model.head_dense_vectors else 0.0


def total_parameters(model: ModelSpec, *, sequence_length: int = 0) -> float:
    """Parameters of the whole model; learned positions count max_position_embeddings, else sequence_length rows."""
    output = 0.0 if model.tie_word_embeddings else float(output_parameters(model))
    sparse = model.moe_layers
    layers = float(special_parameters(model)) + (model.total_layers - sparse) * float(layer_parameters(model))
    layers += sparse * (float(moe_shared_parameters(model)) + expert_parameters(model))
    return layers + float(embedding_parameters(model, sequence_length=sequence_length)) + output + final_norm_weights(model)


def active_parameters(model: ModelSpec, *, sequence_length: int = 0) -> float:
    """Parameters of the whole model without the routed experts that a token is not sent to."""
    idle = 1.0 - (model.num_experts_per_tok or 0) / model.num_experts if model.num_experts else 0.0
    return total_parameters(model, sequence_length=sequence_length) - model.moe_layers * idle * expert_parameters(model)
