"""Parameter counts: of a whole model, and of one pipeline stage's slice."""

from __future__ import annotations

from typing import cast

from hp_tool.cost.candidates import FloatArray, IntArray
from hp_tool.cost.elementwise import maximum
from hp_tool.domain.model import ModelSpec


def attention_matrices(model: ModelSpec) -> float:
    """Weights of one attention block's projections: h a d (queries) + 2 h k d (keys, values) + a d h (output)."""
    h, d = model.hidden_size, model.head_size
    return h * d * (2.0 * model.num_attention_heads + 2.0 * model.kv_heads)


def mlp_matrices(model: ModelSpec) -> float:
    """Weights of one dense MLP: two matrices of h x ffn, three where gated."""
    return (3.0 if model.gated_mlp else 2.0) * model.hidden_size * model.ffn_size


def norm_weights(model: ModelSpec) -> float:
    """Weights of one normalization: h for rmsnorm, 2h for layernorm."""
    return (2.0 if model.normalization == "layernorm" else 1.0) * model.hidden_size


def layer_parameters(model: ModelSpec, *, tensor_parallel_size: IntArray | int = 1) -> FloatArray:
    """Parameters of one transformer layer on one of t ranks, shape of t.

    Matrices and column-parallel biases are split t ways; norms and row-parallel biases are replicated. With fewer
    key/value heads than ranks each rank keeps one whole head (Megatron Core).
    """
    t = tensor_parallel_size
    h, d, ffn = model.hidden_size, model.head_size, model.ffn_size
    query = model.num_attention_heads * d / t
    key_value = 2.0 * d * maximum(model.kv_heads / t, 1.0)
    hidden = (2.0 if model.gated_mlp else 1.0) * ffn / t
    matrices = h * (2.0 * query + key_value) + h * (hidden + ffn / t)
    split_biases = model.has_attention_bias * (query + key_value) + model.has_mlp_bias * hidden
    whole_biases = h * (int(model.has_attention_bias) + int(model.has_mlp_bias))
    return matrices + split_biases + whole_biases + 2.0 * norm_weights(model)


def embedding_parameters(model: ModelSpec, *, sequence_length: int, tensor_parallel_size: IntArray | int = 1) -> FloatArray:
    """The input embedding on one rank: V h / t, and learned positions, which every rank keeps whole."""
    positions = (model.max_position_embeddings or sequence_length) if model.positions == "learned" else 0
    return output_parameters(model, tensor_parallel_size=tensor_parallel_size) + positions * model.hidden_size


def output_parameters(model: ModelSpec, *, tensor_parallel_size: IntArray | int = 1) -> FloatArray:
    """The output layer's matrix on one rank: V h / t, whether tied (then it is the embedding's copy) or not."""
    matrix: FloatArray = model.vocab_size * model.hidden_size / cast(IntArray, tensor_parallel_size)
    return matrix


def total_parameters(model: ModelSpec, *, sequence_length: int = 0) -> float:
    """Parameters of the whole model; learned positions count max_position_embeddings, else sequence_length rows."""
    output = 0.0 if model.tie_word_embeddings else float(output_parameters(model))
    layers = model.num_hidden_layers * float(layer_parameters(model))
    return layers + float(embedding_parameters(model, sequence_length=sequence_length)) + output + norm_weights(model)
