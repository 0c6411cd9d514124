"""The weight matrices of a layer on one rank, used for FLOPs, matmul time, LoRA, Muon and
serving.

Symbols are defined in docs/cost-model.md.
"""

from hp_tool.cost.arrays import Floats, Ints, maximum
from hp_tool.cost.candidates import Candidates
from hp_tool.cost.matrix import Matrix, column, replicated
from hp_tool.cost.recurrent import recurrent_matrices
from hp_tool.domain.model import ModelSpec


def layer_matrices(
    model: ModelSpec, *, tensor: Ints = 1, expert: Ints = 1, expert_tensor: Ints = 1
) -> list[Matrix]:
    """Return all matrices of a layer for these parallel sizes."""
    attention = mixer_matrices(model, tensor=tensor)
    if model.feed_forward == "none":
        return attention
    if model.layer_kind.mlp == "dense":
        return [*attention, *mlp_matrices(model, tensor=tensor)]
    routed = expert_matrices(model, expert=expert, expert_tensor=expert_tensor)
    return [
        *attention,
        router_matrix(model),
        *latent_matrices(model),
        *routed,
        *shared_expert_matrices(model, tensor=tensor),
    ]


def rank_matrices(model: ModelSpec, candidates: Candidates) -> list[Matrix]:
    """For each candidate, return the shapes of the layer's weight matrices on one rank."""
    c = candidates
    return layer_matrices(
        model,
        tensor=c.tensor_parallel_size,
        expert=c.expert_parallel_size,
        expert_tensor=c.expert_tensor_parallel_size,
    )


def mixer_matrices(model: ModelSpec, *, tensor: Ints = 1) -> list[Matrix]:
    """Return the matrices of a layer's token mixer, split by heads.

    These are the projections of attention or of a recurrent mixer.
    """
    match model.mixer:
        case "attention":
            return attention_matrices(model, tensor=tensor)
        case "none":
            return []
        case _:
            return recurrent_matrices(model, tensor=tensor)


def attention_matrices(model: ModelSpec, *, tensor: Ints = 1) -> list[Matrix]:
    """Return the attention projections, split by heads, including those of an output gate and an
    indexer if the model has them.

    Latent attention's down-projections (arXiv 2405.04434, section 2.1) and the indexer
    (DeepSeek-V3.2) are replicated.
    """
    index_matrices = _index_matrices(model)
    if model.attention_output_gate is not None:
        gate = query_heads(model, tensor) * (
            model.v_head_size if model.attention_output_gate == "channel" else 1
        )
        index_matrices.insert(
            0,
            column(
                "linear_gate",
                (gate,),
                float(model.hidden_size),
                source="attention_input",
                ranks=tensor,
            ),
        )
    return [*_projections(model, tensor), *index_matrices]


def _index_matrices(model: ModelSpec) -> list[Matrix]:
    """Return the indexer's matrices: one for its queries and one for its single key. The query
    matrix projects the compressed query if there is one.

    With latent attention, a third matrix computes one weight per head.
    """
    if not has_indexer(model):
        return []
    h, heads, width = (
        float(model.hidden_size),
        float(model.index_n_heads or 1),
        float(model.index_head_dim or 0),
    )
    compressed = model.q_lora_rank is not None
    queries = float(model.q_lora_rank or h)
    query_matrices = [
        replicated(
            "index_q",
            heads * width,
            queries,
            source="q_latent" if compressed else "attention_input",
        ),
        replicated("index_k", width, h, source="attention_input"),
    ]
    return (
        [*query_matrices, replicated("index_weights", heads, h, source="attention_input")]
        if compressed
        else query_matrices
    )


def _projections(model: ModelSpec, tensor: Ints) -> list[Matrix]:
    h, heads = float(model.hidden_size), query_heads(model, tensor)
    output = Matrix(
        module="linear_proj",
        outputs=(h,),
        inputs=heads * model.v_head_size,
        source="core",
        division="row",
        ranks=tensor,
    )
    if model.kv_lora_rank is None:
        shared = kv_heads(model, tensor)
        key, value = model.head_size * shared, model.v_head_size * shared
        fused = (
            (heads * model.head_size, key)
            if model.values_are_keys
            else (heads * model.head_size, key, value)
        )
        return [column("linear_qkv", fused, h, source="attention_input", ranks=tensor), output]
    rank, rope = float(model.kv_lora_rank), float(model.qk_rope_head_dim or 0)
    queries = (heads * model.qk_head_size,)
    if model.q_lora_rank is None:
        to_queries = [column("linear_q_proj", queries, h, source="attention_input", ranks=tensor)]
    else:
        latent = float(model.q_lora_rank)
        to_queries = [
            replicated("linear_q_down_proj", latent, h, source="attention_input"),
            column("linear_q_up_proj", queries, latent, source="q_latent", ranks=tensor),
        ]
    keys_values = (heads * (model.qk_nope_size + model.v_head_size),)
    return [
        *to_queries,
        replicated("linear_kv_down_proj", rank + rope, h, source="attention_input"),
        column("linear_kv_up_proj", keys_values, rank, source="kv_latent", ranks=tensor),
        output,
    ]


def mlp_matrices(model: ModelSpec, *, tensor: Ints = 1) -> list[Matrix]:
    """Return the matrices of a dense MLP: two, or three if gated."""
    return _mlp(model, float(model.ffn_size), tensor)


def shared_expert_matrices(model: ModelSpec, *, tensor: Ints = 1) -> list[Matrix]:
    """Return the matrices of a layer's shared experts, split like a dense MLP; empty if there are
    none.
    """
    return _mlp(model, float(model.shared_expert_size), tensor) if model.shared_expert_size else []


def expert_matrices(model: ModelSpec, *, expert: Ints = 1, expert_tensor: Ints = 1) -> list[Matrix]:
    """Return the matrices of a layer's routed experts. Each rank has num_experts / `expert`
    experts.
    """
    local = float(model.num_experts or 0) / expert
    return _mlp(model, float(model.expert_size), expert_tensor, count=local, routed=True)


def latent_matrices(model: ModelSpec) -> list[Matrix]:
    """Return the projections from the hidden size to the width of the routed experts' inputs and
    back; empty if both are equal.
    """
    if model.moe_latent_size is None:
        return []
    h, latent = float(model.hidden_size), float(model.moe_latent_size)
    return [
        replicated("latent_down", latent, h, source="mlp_input"),
        replicated("latent_up", h, latent, source="routed_output"),
    ]


def router_matrix(model: ModelSpec) -> Matrix:
    """Return the router's matrix, with one output per expert."""
    return replicated(
        "router", float(model.num_experts or 0), float(model.hidden_size), source="mlp_input"
    )


def query_heads(model: ModelSpec, tensor: Ints) -> Floats:
    """Return the number of query heads on one rank."""
    return model.num_attention_heads / tensor


def kv_heads(model: ModelSpec, tensor: Ints) -> Floats:
    """Return the number of key/value heads on one rank.

    With fewer heads than ranks, each rank has one complete head (Megatron Core). Latent attention
    expands the latent vector to one key and one value per query head.
    """
    return (
        query_heads(model, tensor)
        if model.attention == "latent"
        else maximum(model.kv_heads / tensor, 1.0)
    )


def attention_flops(model: ModelSpec, t: Ints, *, decoding: bool) -> Floats:
    """Return 4 a d / t, the attention FLOPs per query token and visible key.

    When decoding, latent attention works in the latent space, where a head is as wide as the latent
    rank (plus the rotary part). In prefill, it expands the heads.
    """
    heads = query_heads(model, t)
    if model.kv_lora_rank is None:
        return 2.0 * heads * (model.head_size + model.v_head_size)
    rope = float(model.qk_rope_head_dim or 0)
    width = (
        2.0 * model.kv_lora_rank + rope
        if decoding
        else model.qk_nope_size + rope + model.v_head_size
    )
    return 2.0 * heads * width


def cached_width(model: ModelSpec, tensor: Ints) -> Floats:
    """Return the number of elements per token and layer in the KV cache of one rank.

    These are the keys and values of the local heads. With latent attention, every rank stores the
    complete latent vector and its rotary key. The key of an indexer is included.
    """
    if model.mixer != "attention":
        return 0.0 * tensor
    if model.kv_lora_rank is not None:
        return (
            float(model.kv_lora_rank + (model.qk_rope_head_dim or 0))
            + index_width(model)
            + 0.0 * tensor
        )
    return (model.head_size + model.v_head_size) * kv_heads(model, tensor) + index_width(model)


def index_width(model: ModelSpec) -> float:
    """Return the number of elements of an indexer's key per token and layer; every rank stores the
    complete key.
    """
    return float(model.index_head_dim or 0) if has_indexer(model) else 0.0


def has_indexer(model: ModelSpec) -> bool:
    """Return whether the model's layers have an indexer."""
    return model.index_topk is not None and not model.shares_index


def _mlp(
    model: ModelSpec, width: float, ranks: Ints, *, count: Floats = 1.0, routed: bool = False
) -> list[Matrix]:
    h, local = (
        float(model.moe_latent_size or model.hidden_size) if routed else float(model.hidden_size),
        width / ranks,
    )
    read, activation = (
        ("routed_input", "routed_activation") if routed else ("mlp_input", "activation")
    )
    outputs = (local,) * model.mlp_inputs
    return [
        Matrix(
            module="linear_fc1",
            outputs=outputs,
            inputs=h,
            source=read,
            division="column",
            ranks=ranks,
            count=count,
            routed=routed,
        ),
        Matrix(
            module="linear_fc2",
            outputs=(h,),
            inputs=local,
            source=activation,
            division="row",
            ranks=ranks,
            count=count,
            routed=routed,
        ),
    ]
