"""Parameter counts of layers, embeddings, output layers and complete models, on one rank. Symbols:
docs/cost-model.md.
"""

from hp_tool.cost.arrays import Floats, Ints
from hp_tool.cost.matrices import (
    expert_matrices,
    has_indexer,
    kv_heads,
    latent_matrices,
    mixer_matrices,
    mlp_matrices,
    query_heads,
    router_matrix,
    shared_expert_matrices,
)
from hp_tool.cost.matrix import entries
from hp_tool.cost.recurrent import recurrent_vectors
from hp_tool.domain.model import ModelSpec


def attention_parameters(model: ModelSpec, *, tensor_parallel_size: Ints = 1) -> Floats:
    """Return the parameter count of a layer's token mixer on one rank. Cross-attention has as many
    parameters as self-attention.

    Includes projections, biases (those of row-parallel matrices are not split), the block's norm,
    norms of latents, queries and keys, and attention sinks. Query and key norms over all heads are
    split with the heads.
    """
    t = tensor_parallel_size
    if model.mixer != "attention":
        mixer_vectors = (
            recurrent_vectors(model, t) + norm_weights(model) if model.is_recurrent else 0.0
        )
        return entries(mixer_matrices(model, tensor=t)) + mixer_vectors
    biases: Floats = 0.0
    latent_norms = 0.0
    if model.has_attention_bias:
        biases = model.num_attention_heads * model.head_size / t
        biases = biases + (model.head_size + model.v_head_size) * kv_heads(model, t)
    if model.has_attention_output_bias:
        biases = biases + model.hidden_size
    if model.query_key_norm is not None:
        biases = biases + _query_key_norms(model, t)
    if model.attention_sinks:
        biases = biases + model.num_attention_heads / t
    if model.kv_lora_rank is not None:
        latent_norms = float(model.kv_lora_rank + (model.q_lora_rank or 0))
    if has_indexer(model):  # A norm of the indexer's key, with bias, or norms of queries and keys.
        latent_norms += 2.0 * (model.index_head_dim or 0)
    return entries(mixer_matrices(model, tensor=t)) + biases + norm_weights(model) + latent_norms


def _query_key_norms(model: ModelSpec, t: Ints) -> Floats:
    """Return the weights of the query and key norms. A norm per head has d weights; norms over all
    heads have a d / t and k d / t weights on one rank.
    """
    width: Floats = 2.0 * model.head_size
    if model.query_key_norm == "all_heads":
        width = model.head_size * (query_heads(model, t) + kv_heads(model, t))
    return model.vectors_per_norm * width


def mlp_parameters(model: ModelSpec, *, tensor_parallel_size: Ints = 1) -> Floats:
    """Return the parameter count of a dense MLP on one rank, including the layer's norms except
    attention's.
    """
    t = tensor_parallel_size
    if model.feed_forward == "none":
        return 0.0
    biases: Floats = 0.0
    if model.has_mlp_bias:
        biases = model.mlp_inputs * float(model.ffn_size) / t + model.hidden_size
    return entries(mlp_matrices(model, tensor=t)) + biases + _norms_except_attention(model)


def layer_parameters(model: ModelSpec, *, tensor_parallel_size: Ints = 1) -> Floats:
    """Return the parameter count of one dense layer on one of t ranks."""
    attention = attention_parameters(model, tensor_parallel_size=tensor_parallel_size)
    return attention + mlp_parameters(model, tensor_parallel_size=tensor_parallel_size)


def expert_parameters(model: ModelSpec) -> float:
    """Return the parameter count of all routed experts of one MoE layer."""
    biases = 0.0
    if model.expert_bias:
        biases = (model.num_experts or 0) * (
            float(model.mlp_inputs) * model.expert_size + model.hidden_size
        )
    return float(entries(expert_matrices(model))) + biases


def moe_shared_parameters(model: ModelSpec, *, tensor_parallel_size: Ints = 1) -> Floats:
    """Return the parameter count of one MoE layer on one rank, excluding its routed experts.

    Includes attention, shared experts, norms, and the unsplit router, latent projections and
    shared-expert gate.
    """
    t = tensor_parallel_size
    router = entries(latent_matrices(model)) + model.hidden_size * (
        (model.num_experts or 0) + model.shared_expert_gate
    )
    router += (model.num_experts or 0) * model.router_bias
    if model.moe_latent_norm:
        router += model.moe_latent_size or 0
    attention = attention_parameters(model, tensor_parallel_size=tensor_parallel_size)
    return (
        attention
        + entries(shared_expert_matrices(model, tensor=t))
        + router
        + _norms_except_attention(model)
    )


def active_expert_matrices(model: ModelSpec) -> float:
    """Return the number of matrix entries that process a token in one MoE block: top-k experts,
    shared experts and router.
    """
    routed = (
        entries(expert_matrices(model))
        * (model.num_experts_per_tok or 0)
        / (model.num_experts or 1)
    )
    return float(
        routed
        + entries([*shared_expert_matrices(model), *latent_matrices(model), router_matrix(model)])
    )


def norm_weights(model: ModelSpec) -> float:
    """Return the weights of one normalization: h for rmsnorm, 2h for layernorm, unless norm_vectors
    is set.
    """
    return float(model.vectors_per_norm * model.hidden_size)


def final_norm_weights(model: ModelSpec) -> float:
    """Return the weights of the norm after the last layer (of the decoder, in an encoder-decoder
    model).
    """
    return norm_weights(model) if model.final_norm else 0.0


def _norms_except_attention(model: ModelSpec) -> float:
    """Return the weights of a layer's norms except attention's."""
    return (model.norms_per_layer - 1) * norm_weights(model)


def embedding_parameters(
    model: ModelSpec, *, sequence_length: int, tensor_parallel_size: Ints = 1
) -> Floats:
    """Return the parameter count of the input embedding on one rank.

    These are V h / t, and the learned positions, token types and norm, which are not split.
    """
    rows = model.token_types
    if model.positions == "learned":
        rows += model.position_tables * (
            (model.max_position_embeddings or sequence_length) + model.position_embedding_offset
        )
    sides = 2.0 if model.architecture == "encoder_decoder" else 1.0
    unsplit = rows * model.hidden_size + (
        sides * norm_weights(model) if model.embedding_norm else 0.0
    )
    return model.vocab_size * model.hidden_size / tensor_parallel_size + unsplit


def output_parameters(model: ModelSpec, *, tensor_parallel_size: Ints = 1) -> Floats:
    """Return V h / t, the parameter count of the output matrix on one rank. With tied weights, this
    matrix is a copy of the embedding's.
    """
    return model.vocab_size * model.hidden_size / tensor_parallel_size


def special_parameters(model: ModelSpec, *, tensor_parallel_size: Ints = 1) -> Floats:
    """Return the parameters on one of t ranks that are outside a decoder's layers, embedding and
    output layer.

    - encoder_decoder (T5): cross-attention in each decoder layer, the encoder's final norm, and the
      tables of relative positions.
    - encoder (BERT): the dense matrix of the masked language model (h^2 + h) and its norm, the
      pooler (h^2 + h), and the next-sentence classifier (2h + 2).
    - bias of the output layer (V / t), if the model has one.

    Except for cross-attention and the output bias, every rank stores all of them (Megatron Core).
    The output bias of Megatron's T5 is not counted.
    """
    h, unsplit = float(model.hidden_size), 0.0
    if model.head_dense_vectors:
        unsplit += head_matrices(model) + (model.head_dense_vectors - 1) * h + norm_weights(model)
    if model.has_sentence_head:
        unsplit += h * h + h + 2.0 * h + 2.0
    if model.architecture == "encoder_decoder":
        if model.positions == "relative":
            tables = model.total_layers if model.relative_attention_every_layer else 2
            unsplit += tables * model.relative_attention_num_buckets * model.num_attention_heads
        cross = model.decoder_layers * attention_parameters(
            model, tensor_parallel_size=tensor_parallel_size
        )
        return (
            cross + final_norm_weights(model) + unsplit + _output_bias(model, tensor_parallel_size)
        )
    return unsplit + _output_bias(model, tensor_parallel_size)


def _output_bias(model: ModelSpec, t: Ints) -> Floats:
    return model.vocab_size / t if model.has_output_bias else 0.0


def head_matrices(model: ModelSpec) -> float:
    """Return the number of matrix entries that process a token between the layers and the output
    layer.

    This is the dense matrix of a masked language model. The pooler and the classifier process only
    one token per sequence and are not counted.
    """
    return float(model.hidden_size) ** 2 if model.head_dense_vectors else 0.0


def total_parameters(model: ModelSpec, *, sequence_length: int = 0) -> float:
    """Return the model's total parameter count.

    The learned position-embedding table has max_position_embeddings rows, or sequence_length if
    that is not set.
    """
    output = 0.0 if model.tie_word_embeddings else float(output_parameters(model))
    layers = float(special_parameters(model))
    for _, kind in model.kinds:
        each = float(
            moe_shared_parameters(kind) + expert_parameters(kind)
            if kind.num_experts
            else layer_parameters(kind)
        )
        layers += kind.total_layers * each
    return (
        layers
        + float(embedding_parameters(model, sequence_length=sequence_length))
        + output
        + final_norm_weights(model)
    )


def active_parameters(model: ModelSpec, *, sequence_length: int = 0) -> float:
    """Return the parameter count of the complete model, excluding routed experts to which a token
    is not routed.
    """
    total = total_parameters(model, sequence_length=sequence_length)
    if not model.num_experts:
        return total
    idle = 1.0 - (model.num_experts_per_tok or 0) / model.num_experts
    return total - model.moe_layers * idle * expert_parameters(model)
