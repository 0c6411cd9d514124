"""The weight matrices of one layer on one rank, and parameter counts of layers, ends and whole models.

FLOPs, matmul time, LoRA, Muon and serving read the same table of matrices. Modules have Megatron Core's names. Column-parallel
matrices are divided by rows (outputs), row-parallel ones by columns (inputs); replicated ones are whole on every rank. Letters:
docs/cost-model.md.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

from hp_tool.cost.arrays import Floats, Ints, maximum
from hp_tool.cost.candidates import Candidates
from hp_tool.domain.model import LayerKind, ModelSpec

Division = Literal["column", "row", "replicated"]
Shape = tuple[Floats, Floats]
"""(outputs n, inputs k) of y = W x on one rank."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Matrix:
    """W of y = W x on one rank; sizes have shape (n,), or are plain numbers of one candidate."""

    module: str
    """linear_qkv, linear_proj, router, ...; linear_fc1 and linear_fc2 for dense MLPs, routed and shared experts."""
    outputs: tuple[Floats, ...]
    """Rows on this rank, by fused part: queries, keys, values; gate and up."""
    inputs: Floats
    """Columns on this rank."""
    source: str
    """The tensor that W multiplies. Matrices of one source share its copy for the backward pass."""
    division: Division
    ranks: Ints = 1
    """Ranks that share a divided matrix."""
    count: Floats = 1.0
    """Matrices of this shape on the rank: local experts."""
    routed: bool = False
    """Whether it belongs to a routed expert."""

    @property
    def rows(self) -> Floats:
        """Outputs on this rank."""
        return sum(self.outputs[1:], self.outputs[0])

    @property
    def shape(self) -> Shape:
        """(outputs, inputs) on this rank."""
        return self.rows, self.inputs

    @property
    def entries(self) -> Floats:
        """Entries of all `count` matrices on this rank."""
        return self.count * self.rows * self.inputs


def layer_matrices(
    model: ModelSpec, kind: LayerKind, *, tensor: Ints = 1, expert: Ints = 1, expert_tensor: Ints = 1
) -> list[Matrix]:
    """All matrices of a layer of this kind, under tensor, expert and expert-tensor parallelism of these sizes."""
    attention = attention_matrices(model, tensor=tensor)
    if kind.mlp == "dense":
        return [*attention, *mlp_matrices(model, tensor=tensor)]
    routed = expert_matrices(model, expert=expert, expert_tensor=expert_tensor)
    return [*attention, router_matrix(model), *routed, *shared_expert_matrices(model, tensor=tensor)]


def rank_matrices(model: ModelSpec, candidates: Candidates, *, moe: bool) -> list[Matrix]:
    """All matrices of a layer with or without experts, on one rank of each candidate."""
    c = candidates
    return layer_matrices(
        model,
        model.layer_kind(moe=moe),
        tensor=c.tensor_parallel_size,
        expert=c.expert_parallel_size,
        expert_tensor=c.expert_tensor_parallel_size,
    )


def attention_matrices(model: ModelSpec, *, tensor: Ints = 1) -> list[Matrix]:
    """Attention's projections, divided by heads.

    Latent attention's down-projections are replicated (arXiv 2405.04434, section 2.1).
    """
    h, heads = float(model.hidden_size), query_heads(model, tensor)
    output = Matrix(
        module="linear_proj", outputs=(h,), inputs=heads * model.v_head_size, source="core", division="row", ranks=tensor
    )
    if model.kv_lora_rank is None:
        key = model.head_size * kv_heads(model, tensor)
        fused = (heads * model.head_size, key, key)
        return [_column("linear_qkv", fused, h, source="attention_input", ranks=tensor), output]
    rank, rope = float(model.kv_lora_rank), float(model.qk_rope_head_dim or 0)
    queries = (heads * model.qk_head_size,)
    if model.q_lora_rank is None:
        to_queries = [_column("linear_q_proj", queries, h, source="attention_input", ranks=tensor)]
    else:
        latent = float(model.q_lora_rank)
        to_queries = [
            _replicated("linear_q_down_proj", latent, h, source="attention_input"),
            _column("linear_q_up_proj", queries, latent, source="q_latent", ranks=tensor),
        ]
    keys_values = (heads * (model.qk_nope_size + model.v_head_size),)
    return [
        *to_queries,
        _replicated("linear_kv_down_proj", rank + rope, h, source="attention_input"),
        _column("linear_kv_up_proj", keys_values, rank, source="kv_latent", ranks=tensor),
        output,
    ]


def mlp_matrices(model: ModelSpec, *, tensor: Ints = 1) -> list[Matrix]:
    """The matrices of a dense MLP: two, or three if it is gated."""
    return _mlp(model, float(model.ffn_size), tensor)


def shared_expert_matrices(model: ModelSpec, *, tensor: Ints = 1) -> list[Matrix]:
    """The matrices of a layer's shared experts, which divide like a dense MLP; empty without shared experts."""
    return _mlp(model, float(model.shared_expert_size), tensor) if model.shared_expert_size else []


def expert_matrices(model: ModelSpec, *, expert: Ints = 1, expert_tensor: Ints = 1) -> list[Matrix]:
    """The matrices of a layer's routed experts, num_experts / expert of them on a rank."""
    local = float(model.num_experts or 0) / expert
    return _mlp(model, float(model.expert_size), expert_tensor, count=local, routed=True)


def router_matrix(model: ModelSpec) -> Matrix:
    """The router, with one output per expert."""
    return _replicated("router", float(model.num_experts or 0), float(model.hidden_size), source="mlp_input")


def entries(matrices: Iterable[Matrix]) -> Floats:
    """Entries of these matrices on one rank: their parameters without biases."""
    return sum((matrix.entries for matrix in matrices), 0.0)


def shapes(matrices: Iterable[Matrix]) -> list[Shape]:
    """(outputs, inputs) of each matrix on one rank."""
    return [matrix.shape for matrix in matrices]


def shapes_by_source(matrices: Iterable[Matrix]) -> list[Shape]:
    """Shapes with the matrices of one source fused into one, as inference engines run them."""
    fused: dict[str, Shape] = {}
    for matrix in matrices:
        rows, inputs = fused.get(matrix.source, (0.0, matrix.inputs))
        fused[matrix.source] = (rows + matrix.rows, inputs)
    return list(fused.values())


def query_heads(model: ModelSpec, tensor: Ints) -> Floats:
    """Query heads on one rank."""
    return model.num_attention_heads / tensor


def kv_heads(model: ModelSpec, tensor: Ints) -> Floats:
    """Key/value heads on one rank; with fewer heads than ranks each rank keeps one whole head (Megatron Core).

    Latent attention expands its latent to one key and value per query head.
    """
    return query_heads(model, tensor) if model.attention == "latent" else maximum(model.kv_heads / tensor, 1.0)


def cached_width(model: ModelSpec, tensor: Ints) -> Floats:
    """Numbers that a KV cache holds per token and layer on one rank.

    Keys and values of the local heads, or the latent with its rotary key, which every rank keeps whole.
    """
    if model.kv_lora_rank is not None:
        return float(model.kv_lora_rank + (model.qk_rope_head_dim or 0)) + 0.0 * tensor
    return 2.0 * model.head_size * kv_heads(model, tensor)


def _mlp(model: ModelSpec, width: float, ranks: Ints, *, count: Floats = 1.0, routed: bool = False) -> list[Matrix]:
    h, local = float(model.hidden_size), width / ranks
    read, activation = ("routed_input", "routed_activation") if routed else ("mlp_input", "activation")
    outputs = (local,) * model.mlp_inputs
    return [
        Matrix(
            module="linear_fc1", outputs=outputs, inputs=h, source=read,
            division="column", ranks=ranks, count=count, routed=routed,
        ),
        Matrix(
            module="linear_fc2", outputs=(h,), inputs=local, source=activation,
            division="row", ranks=ranks, count=count, routed=routed,
        ),
    ]  # fmt: skip


def _column(module: str, outputs: tuple[Floats, ...], inputs: Floats, *, source: str, ranks: Ints) -> Matrix:
    return Matrix(module=module, outputs=outputs, inputs=inputs, source=source, division="column", ranks=ranks)


def _replicated(module: str, outputs: float, inputs: float, *, source: str) -> Matrix:
    return Matrix(module=module, outputs=(outputs,), inputs=inputs, source=source, division="replicated")


# Parameters: of layers and ends on one rank, and of whole models.


def attention_parameters(model: ModelSpec, *, tensor_parallel_size: Ints = 1) -> Floats:
    """Parameters of an attention block on one rank; cross attention has the same.

    Counted are projections, their biases (row-parallel ones whole), the block's norm and the latents' norms, and if the model
    has them norms of queries and keys (norms of all heads are split with the heads) and sinks.
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
    """Weights of the query and key norms: vectors of d, or of the local heads' a d / t + k d / t."""
    width: Floats = 2.0 * model.head_size
    if model.query_key_norm == "all_heads":
        width = model.head_size * (query_heads(model, t) + kv_heads(model, t))
    return model.vectors_per_norm * width


def mlp_parameters(model: ModelSpec, *, tensor_parallel_size: Ints = 1) -> Floats:
    """Parameters of a dense MLP on one rank and of the layer's norms except attention's."""
    t = tensor_parallel_size
    biases: Floats = 0.0
    if model.has_mlp_bias:
        biases = model.mlp_inputs * float(model.ffn_size) / t + model.hidden_size
    return entries(mlp_matrices(model, tensor=t)) + biases + _norms_beside_attention(model)


def layer_parameters(model: ModelSpec, *, tensor_parallel_size: Ints = 1) -> Floats:
    """Parameters of one dense layer on one of t ranks."""
    attention = attention_parameters(model, tensor_parallel_size=tensor_parallel_size)
    return attention + mlp_parameters(model, tensor_parallel_size=tensor_parallel_size)


def expert_parameters(model: ModelSpec) -> float:
    """Parameters of all routed experts of one MoE layer."""
    biases = 0.0
    if model.expert_bias:
        biases = (model.num_experts or 0) * (float(model.mlp_inputs) * model.expert_size + model.hidden_size)
    return float(entries(expert_matrices(model))) + biases


def moe_shared_parameters(model: ModelSpec, *, tensor_parallel_size: Ints = 1) -> Floats:
    """Parameters of one MoE layer on one rank without its routed experts.

    Attention, router and shared experts' gate (whole), shared experts, norms.
    """
    t = tensor_parallel_size
    router = model.hidden_size * ((model.num_experts or 0) + model.shared_expert_gate)
    router += (model.num_experts or 0) * model.router_bias
    attention = attention_parameters(model, tensor_parallel_size=tensor_parallel_size)
    return attention + entries(shared_expert_matrices(model, tensor=t)) + router + _norms_beside_attention(model)


def active_expert_matrices(model: ModelSpec) -> float:
    """Entries that a token passes in one MoE block: top-k and shared experts, and the router."""
    routed = entries(expert_matrices(model)) * (model.num_experts_per_tok or 0) / (model.num_experts or 1)
    return float(routed + entries([*shared_expert_matrices(model), router_matrix(model)]))


def norm_weights(model: ModelSpec) -> float:
    """Weights of one normalization: h for rmsnorm, 2h for layernorm, unless norm_vectors is set."""
    return float(model.vectors_per_norm * model.hidden_size)


def final_norm_weights(model: ModelSpec) -> float:
    """Weights of the norm after the last layer (in an encoder-decoder model the decoder's)."""
    return norm_weights(model) if model.final_norm else 0.0


def _norms_beside_attention(model: ModelSpec) -> float:
    """Weights of a layer's norms except attention's."""
    return (model.norms_per_layer - 1) * norm_weights(model)


def embedding_parameters(model: ModelSpec, *, sequence_length: int, tensor_parallel_size: Ints = 1) -> Floats:
    """Parameters of the input embedding on one rank: V h / t, and learned positions, token types and norm (whole)."""
    rows = model.token_types
    if model.positions == "learned":
        rows += model.position_tables * ((model.max_position_embeddings or sequence_length) + model.position_embedding_offset)
    sides = 2.0 if model.architecture == "encoder_decoder" else 1.0
    whole = rows * model.hidden_size + (sides * norm_weights(model) if model.embedding_norm else 0.0)
    return model.vocab_size * model.hidden_size / tensor_parallel_size + whole


def output_parameters(model: ModelSpec, *, tensor_parallel_size: Ints = 1) -> Floats:
    """Parameters of the output layer's matrix on one rank, V h / t; a tied one is the embedding's copy."""
    return model.vocab_size * model.hidden_size / tensor_parallel_size


def special_parameters(model: ModelSpec, *, tensor_parallel_size: Ints = 1) -> Floats:
    """Parameters on one of t ranks that a decoder's layers, embedding and head do not have.

    - encoder_decoder (T5): cross attention in each decoder layer, the encoder's final norm, tables of relative positions.
    - encoder (BERT): the masked language model's dense (h^2 + h) and norm; the pooler (h^2 + h) and the next-sentence
      classifier (2h + 2).
    - a bias of the output layer (V / t).

    All except cross attention and output bias are whole on every rank (Megatron Core). The output bias of Megatron's T5 is not
    counted.
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
        cross = model.decoder_layers * attention_parameters(model, tensor_parallel_size=tensor_parallel_size)
        return cross + final_norm_weights(model) + whole + _output_bias(model, tensor_parallel_size)
    return whole + _output_bias(model, tensor_parallel_size)


def _output_bias(model: ModelSpec, t: Ints) -> Floats:
    return model.vocab_size / t if model.has_output_bias else 0.0


def head_matrices(model: ModelSpec) -> float:
    """Entries that a token passes between the layers and the output layer: the dense matrix of a masked language model.

    The pooler and the classifier see one token per sequence and are not counted.
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
