"""Recomputation: the bytes that a model chunk saves, the bytes restored at once, and the seconds of
recomputation.

Selective recomputation refers to Megatron Core's modules, or to torchtitan's operations (per_op).
"""

from hp_tool.cost.arrays import Floats, Ints, anywhere, ceil, maximum, minimum, where
from hp_tool.cost.attention import core_bytes
from hp_tool.cost.block import LAYER_AXES, BlockBytes, BlockTime, LayerBytes, LayerTime, Shapes
from hp_tool.cost.candidates import (
    CORE_ATTN,
    FULL_BLOCK,
    FULL_UNIFORM,
    LAYERNORM,
    MLA_UP_PROJ,
    MLP,
    MOE,
    MOE_ACT,
    PER_OP,
    SELECTIVE,
    SHARED_EXPERTS,
    Candidates,
)
from hp_tool.cost.case import TrainingCase
from hp_tool.cost.matrices import (
    attention_matrices,
    kv_heads,
    mlp_matrices,
    query_heads,
    shared_expert_matrices,
)
from hp_tool.cost.matrix import Matrix, entries, shapes
from hp_tool.cost.moe import routed_tokens
from hp_tool.cost.parameters import active_expert_matrices
from hp_tool.cost.roofline import elementwise_seconds, weight_matmuls
from hp_tool.domain.model import ModelSpec


def chunk_activations(*, candidates: Candidates, layer: LayerBytes, layers: Floats) -> Floats:
    """Return the bytes that a model chunk of `layers` layers saves for one micro-batch.

    full uniform: one layer input for every recompute_num_layers layers. full block: the first
    recompute_num_layers layers save only their input, all others save everything.
    """
    method, count = candidates.recompute_method, candidates.recompute_num_layers
    plain = layers * where(method == SELECTIVE, layer.saved_selective, layer.saved)
    if not candidates.recomputes_layers:
        return plain
    blocked = where(count > 0, minimum(count, layers), layers)
    block = blocked * layer.saved_full + (layers - blocked) * layer.saved
    uniform = ceil(layers / maximum(count, 1)) * layer.saved_full
    return where(method == FULL_BLOCK, block, where(method == FULL_UNIFORM, uniform, plain))


def recomputed_working(*, candidates: Candidates, layer: LayerBytes, layers: Floats) -> Floats:
    """Return the bytes that recomputation restores at once.

    These are one attention core, the modules of one block, or the layers of one checkpoint. If
    weight gradients are computed after the input gradients of the complete chunk, all `layers` of
    the chunk are restored.
    """
    method = candidates.recompute_method
    core: Floats = (method == SELECTIVE) * layer.repeated
    if not candidates.recomputes_layers:
        return core
    at_once: Floats = where(
        method == FULL_UNIFORM, maximum(candidates.recompute_num_layers, 1), method == FULL_BLOCK
    )
    if candidates.names_schedules:
        at_once = where(candidates.splits_backward & (method >= FULL_UNIFORM), layers, at_once)
    return core + at_once * layer.saved


def recomputed_layer_fraction(candidates: Candidates, *, layers_per_chunk: Floats) -> Floats:
    """Return the fraction of layers whose complete forward pass is recomputed."""
    method, count = candidates.recompute_method, candidates.recompute_num_layers
    if not candidates.recomputes_layers:
        return 0.0 * method
    blocked = where(count > 0, minimum(count / layers_per_chunk, 1.0), 1.0)
    return where(method == FULL_BLOCK, blocked, method == FULL_UNIFORM)


def recomputed_seconds(
    candidates: Candidates, *, layer: LayerTime, forward: Floats, full_fraction: Floats
) -> Floats:
    """Return the time in seconds of recomputation per layer and micro-batch, averaged over the
    layers of a stage.

    The fraction `full_fraction` of the layers (`recomputed_layer_fraction`) repeats the forward
    pass, which takes `forward` seconds including communication. Selective recomputation takes
    `repeated` seconds.
    """
    selective: Floats = (candidates.recompute_method == SELECTIVE) * layer.repeated
    return full_fraction * forward + selective


# Recomputation by module, under Megatron Core's names: bytes that each module drops, and seconds to
# run it again.
#
# core_attn, mlp, moe and shared_experts are checkpointed: inputs are kept, inner tensors are not.
# layernorm, moe_act and mla_up_proj discard their outputs, which their consumers would keep, until
# the backward pass needs them. Sources: transformer_config.py, transformer_layer.py, moe/ and
# multi_latent_attention.py of Megatron Core 0.16.


def layer_axes(c: Candidates) -> tuple[str, ...]:
    """Return the candidate fields on which the costs inside a layer depend."""
    return (*LAYER_AXES, "recompute_modules") if c.names_modules else LAYER_AXES


def dropped_bytes(c: Candidates, block: BlockBytes, *, s: Shapes) -> Floats:
    """Return the bytes of one block that its recomputed modules do not save.

    A checkpointed MLP saves its input in 16 bits, whereas the matmul in an MLP without
    checkpointing saves a quantised copy. The checkpointed MLP saves nothing if the preceding norm
    discards its output.
    """
    modules = c.recompute_modules
    norm, mlp = _is_recomputed(modules, LAYERNORM), _is_recomputed(modules, MLP)
    parts = (
        _is_recomputed(modules, MOE_ACT) * block.expert_activations
        + _is_recomputed(modules, SHARED_EXPERTS) * block.shared_experts
    )
    experts = where(modules & MOE, block.moe, parts)
    wider_input = (
        where(block.mlp > 0.0, 1.0, 0.0) * (s.e - s.saved_input) * s.tokens * s.h / s.shards
    )
    return (
        _is_recomputed(modules, CORE_ATTN) * block.core
        + norm * block.norm_output
        + mlp * (block.mlp - (1 - norm) * wider_input)
        + _is_recomputed(modules, MLA_UP_PROJ) * block.up_projected
        + experts
    )


def repeated_seconds(
    *,
    candidates: Candidates,
    case: TrainingCase,
    s: Shapes,
    attention: BlockTime,
    second: BlockTime,
    region: Floats,
) -> Floats:
    """Return the time of selective recomputation per layer and micro-batch, in seconds.

    `second` is the MLP or MoE block. `region` is the time of the tensor-parallel collectives of one
    of the layer's two blocks. A checkpointed MLP repeats them too.
    """
    model = case.model
    c, modules = candidates, candidates.recompute_modules
    hidden = s.tokens * s.h / s.shards
    norm = elementwise_seconds(2.0 * s.e * hidden, machine=case, kernels=1.0)
    # The norm and the residual are outside the module: 5 accesses and a mask, as in the blocks'
    # traffic.
    around = elementwise_seconds((5.0 * s.e + s.mask) * hidden, machine=case, kernels=2.0)
    inside = second.matmul + second.elementwise - around + second.expert
    norms = (
        2.0
        if model.mixer != "none" and model.feed_forward != "none"
        else 1.0 * bool(model.num_experts)
    )
    again = (
        _is_recomputed(modules, CORE_ATTN) * attention.core
        + _is_recomputed(modules, LAYERNORM) * norms * norm
    )
    if model.kv_lora_rank is not None and model.mixer == "attention":
        again = again + _is_recomputed(modules, MLA_UP_PROJ) * _up_projection_seconds(case, s)
    if model.feed_forward == "none":
        return again
    if not model.num_experts:
        again = again + _is_recomputed(modules, MLP) * (inside + region)
        if anywhere(modules == PER_OP):
            again = where(
                modules == PER_OP,
                per_op_seconds(case=case, s=s, attention=attention, second=second, region=region),
                again,
            )
        return again
    shared, activation = _expert_seconds(case, c, s)
    if model.num_shared_experts:
        inside, shared = inside + region, shared + region
    parts = (
        _is_recomputed(modules, MOE_ACT) * activation
        + _is_recomputed(modules, SHARED_EXPERTS) * shared
    )
    return again + where(modules & MOE, inside, parts)


def repeated_token_flops(model: ModelSpec, c: Candidates, *, attention: float) -> float:
    """Return the forward FLOPs per token that the recomputed modules of one candidate repeat.

    `attention` is the FLOPs of the attention cores.
    """
    modules = c.recompute_modules
    if modules == PER_OP:
        return (
            2.0
            * (model.num_hidden_layers + model.num_nextn_predict_layers)
            * per_op_matrices(model)
        )
    layers = model.num_hidden_layers + model.num_nextn_predict_layers
    sparse = model.moe_layers + (model.num_nextn_predict_layers if model.num_experts else 0)
    repeated = 0.0
    if modules & MLP:
        repeated += (layers - sparse) * float(entries(mlp_matrices(model)))
    if modules & MOE:
        repeated += sparse * float(active_expert_matrices(model))
    elif modules & SHARED_EXPERTS:
        repeated += sparse * float(entries(shared_expert_matrices(model)))
    if modules & MLA_UP_PROJ:
        repeated += layers * float(entries(_up_projections(model, 1)))
    return 2.0 * repeated + (attention if modules & CORE_ATTN else 0.0)


def _is_recomputed(modules: Ints, bit: int) -> Ints:
    return (modules & bit) // bit


def _up_projections(model: ModelSpec, tensor: Ints) -> list[Matrix]:
    """Return latent attention's up-projections to queries, unrotated keys, and values."""
    modules = ("linear_q_proj", "linear_q_up_proj", "linear_kv_up_proj")
    return [
        matrix for matrix in attention_matrices(model, tensor=tensor) if matrix.module in modules
    ]


def _up_projection_seconds(case: TrainingCase, s: Shapes) -> Floats:
    """Return the seconds to compute queries, keys and values from the latents and to apply rotary
    embedding to the rotary parts.
    """
    matrices = shapes(_up_projections(case.model, s.t))
    matmul, _ = weight_matmuls(s.tokens, matrices, case=case, precision=case.workload.precision)
    rotated = s.tokens * 2.0 * s.e * (matrices[0][0] + matrices[1][0])
    return matmul + elementwise_seconds(rotated, machine=case, kernels=1.0)


def _expert_seconds(case: TrainingCase, c: Candidates, s: Shapes) -> tuple[Floats, Floats]:
    """Return the forward seconds of (shared experts, activation functions of the routed
    experts).
    """
    model = case.model
    gates = float(model.mlp_inputs)
    routed = routed_tokens(case, c, s) * model.expert_size / c.expert_tensor_parallel_size
    activation = elementwise_seconds((gates + 1.0) * s.e * routed, machine=case, kernels=1.0)
    if not model.num_shared_experts:
        return 0.0, activation
    matrices = shapes(shared_expert_matrices(model, tensor=s.t))
    shared, _ = weight_matmuls(s.tokens, matrices, case=case, precision=case.workload.precision)
    traffic = (gates + 1.0) * s.e * s.tokens * matrices[1][1]
    return shared + elementwise_seconds(traffic, machine=case, kernels=1.0), activation


# torchtitan's selective recomputation per operation (recompute per_op) of a Llama block.
#
# It keeps the block's input and the outputs of attention, of every second matmul (queries, values,
# the MLP's gate and down projection) and of reduce-scatters; all else, including gathers of tensor
# parallelism, runs again before the backward pass. Source: torchtitan 0.2,
# distributed/activation_checkpoint.py (_apply_op_sac) and models/llama3/infra/parallelize.py.


def per_op_bytes(*, case: TrainingCase, s: Shapes) -> Floats:
    """Return the saved bytes per layer and micro-batch under per_op.

    They are e T (h/r + a d + k d + a d + f + h + 2 h / t with SP) plus the fp32 log-sum-exp, for a
    rank with `a` query and k key/value heads of width d and an MLP of width f. The layer's input is
    sharded over the r ranks of SP. The output of the down projection is saved unsharded, before its
    reduce-scatter. The outputs of the two reduce-scatters are sharded.
    """
    model = case.model
    heads, kv_heads, hidden = _rank_sizes(model, s)
    width = (
        s.h / s.shards
        + (2.0 * heads + kv_heads) * model.head_size
        + hidden
        + s.h
        + s.sharded * 2.0 * s.h / s.t
    )
    return s.e * s.tokens * width + core_bytes(workload=case.workload, s=s, heads=heads)


def per_op_seconds(
    *, case: TrainingCase, s: Shapes, attention: BlockTime, second: BlockTime, region: Floats
) -> Floats:
    """Return the time of recomputation per layer and micro-batch under per_op, in seconds.

    Recomputed are the matmuls for the keys, the output projection and the second half of the MLP's
    input, all elementwise kernels, and one of the two collectives of each block (`region` has both
    collectives of one block).
    """
    model = case.model
    heads, kv_heads, hidden = _rank_sizes(model, s)
    again = [(kv_heads * model.head_size, s.h), (s.h, heads * model.head_size), (hidden, s.h)]
    matmul, _ = weight_matmuls(s.tokens, again, case=case, precision=case.workload.precision)
    return matmul + attention.elementwise + second.elementwise + region


def per_op_matrices(model: ModelSpec) -> float:
    """Return the entries of one layer's recomputed matrices."""
    width = (model.num_attention_heads + model.kv_heads) * model.head_size
    return float(model.hidden_size * (width + model.ffn_size))


def _rank_sizes(model: ModelSpec, s: Shapes) -> tuple[Floats, Floats, Floats]:
    return query_heads(model, s.t), kv_heads(model, s.t), model.ffn_size / s.t
