"""Recomputation: what a model chunk keeps all the same, what comes back at a time, and what runs again.

The modules that selective recomputation may name are in `modules`, torchtitan's operations in `per_op`.
"""

from __future__ import annotations

from typing import Any

from hp_tool.cost.arrays import Column, FloatArray, IntArray, anywhere, ceil, maximum, minimum, where, zeros_like
from hp_tool.cost.attention import core_bytes, head_widths, up_projections
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
from hp_tool.cost.moe import activation_width, routed_tokens, shared_matrices
from hp_tool.cost.parameters import active_expert_matrices, mlp_matrices, moe_layers, shared_expert_matrices
from hp_tool.cost.roofline import elementwise_seconds, weight_matmuls
from hp_tool.cost.schedules.bubble import splits_backward
from hp_tool.domain.efficiency import EfficiencyProfile
from hp_tool.domain.hardware import GpuSpec
from hp_tool.domain.model import ModelSpec
from hp_tool.domain.workload import TrainingWorkload


def chunk_activations(*, candidates: Candidates, layer: LayerBytes, layers: Column) -> Column:
    """Bytes one model chunk of `layers` layers keeps for one micro-batch under the candidate's recomputation.

    full uniform: one layer input for every recompute_num_layers layers; full block: the first recompute_num_layers
    layers keep their input, the others everything.
    """
    method, count = candidates.recompute_method, candidates.recompute_num_layers
    plain = layers * where(method == SELECTIVE, layer.saved_selective, layer.saved)
    if not anywhere(method >= FULL_UNIFORM):
        return plain
    blocked = where(count > 0, minimum(count, layers), layers)
    block = blocked * layer.saved_full + (layers - blocked) * layer.saved
    uniform = ceil(layers / maximum(count, 1)) * layer.saved_full
    return where(method == FULL_BLOCK, block, where(method == FULL_UNIFORM, uniform, plain))


def recomputed_working(*, candidates: Candidates, layer: LayerBytes, layers: Column) -> Column:
    """Bytes that recomputation brings back at a time: one attention core, or the modules of one block, or the layers of one
    checkpoint; where weight gradients come after the input gradients of the chunk, all its `layers`.
    """
    method = candidates.recompute_method
    core = where(method == SELECTIVE, layer.repeated, 0.0)
    if not anywhere(method >= FULL_UNIFORM):
        return core
    at_once = where(method == FULL_UNIFORM, maximum(candidates.recompute_num_layers, 1), method == FULL_BLOCK)
    split = splits_backward(candidates)
    if anywhere(split):
        at_once = where(split & (method >= FULL_UNIFORM), layers, at_once)
    return core + at_once * layer.saved


def recomputed_layer_fraction(candidates: Candidates, *, layers_per_chunk: Column) -> FloatArray:
    """Share of layers whose whole forward pass is run again."""
    method, count = candidates.recompute_method, candidates.recompute_num_layers
    if not anywhere(method >= FULL_UNIFORM):
        return zeros_like(method)
    blocked = where(count > 0, minimum(count / layers_per_chunk, 1.0), 1.0)
    return where(method == FULL_BLOCK, blocked, method == FULL_UNIFORM)


def recomputed_seconds(candidates: Candidates, *, layer: LayerTime, forward: Column, whole: Column) -> Column:
    """Seconds per layer and micro-batch that run again, the mean of a stage's layers: of the share `whole` of them
    (`recomputed_layer_fraction`) the forward pass, which takes `forward` with its communication; selectively, `repeated`.
    """
    return whole * forward + where(candidates.recompute_method == SELECTIVE, layer.repeated, 0.0)


# Recomputation by module, in Megatron Core's words: what each module does not keep, and what running it again costs.
#
# core_attn, mlp, moe and shared_experts are checkpointed: their inputs are kept, what arises inside is not. layernorm, moe_act
# and mla_up_proj discard their outputs, which their consumers would keep, until the backward pass wants them. Sources:
# transformer_config.py, transformer_layer.py, moe/ and multi_latent_attention.py of Megatron Core 0.16.


def names_modules(c: Candidates) -> bool:
    """Whether any candidate recomputes other modules than the attention core."""
    return anywhere(c.recompute_modules > CORE_ATTN)


def layer_axes(c: Candidates) -> tuple[str, ...]:
    """What everything inside a layer of these candidates depends on."""
    return (*LAYER_AXES, "recompute_modules") if names_modules(c) else LAYER_AXES


def dropped_bytes(c: Candidates, block: BlockBytes, *, s: Shapes) -> Column:
    """Bytes of one block that its recomputed modules do not keep.

    A checkpointed MLP keeps its input in 16 bits, where the matmul inside would keep a narrow copy; nothing at all where
    the norm before it discards its output.
    """
    modules = c.recompute_modules
    norm, mlp = _has(modules, LAYERNORM), _has(modules, MLP)
    parts = _has(modules, MOE_ACT) * block.expert_activations + _has(modules, SHARED_EXPERTS) * block.shared_experts
    experts = where(modules & MOE, block.moe, parts)
    wider_input = where(block.mlp > 0.0, 1.0, 0.0) * (s.e - s.saved_input) * s.tokens * s.h / s.shards
    return (
        _has(modules, CORE_ATTN) * block.core
        + norm * block.norm_output
        + mlp * (block.mlp - (1 - norm) * wider_input)
        + _has(modules, MLA_UP_PROJ) * block.up_projected
        + experts
    )


def repeated_seconds(
    *,
    candidates: Candidates,
    model: ModelSpec,
    workload: TrainingWorkload,
    gpu: GpuSpec,
    profile: EfficiencyProfile,
    s: Shapes,
    attention: BlockTime,
    second: BlockTime,
    region: Column,
    moe: bool,
) -> Column:
    """Seconds a layer and micro-batch that selective recomputation runs again; `second` is the MLP or the experts, `region`
    the tensor-parallel collectives around one of the layer's two blocks, which a checkpointed MLP runs again too.
    """
    c, modules = candidates, candidates.recompute_modules
    machine: dict[str, Any] = {"gpu": gpu, "profile": profile}
    hidden = s.tokens * s.h / s.shards
    norm = elementwise_seconds(2.0 * s.e * hidden, kernels=1.0, **machine)
    # The norm and the residual stand outside of the module: 5 accesses and a mask, as in the blocks' own traffic.
    around = elementwise_seconds((5.0 * s.e + s.mask) * hidden, kernels=2.0, **machine)
    inside = second.matmul + second.elementwise - around + second.expert
    again = _has(modules, CORE_ATTN) * attention.core + _has(modules, LAYERNORM) * 2.0 * norm
    if model.kv_lora_rank is not None:
        again = again + _has(modules, MLA_UP_PROJ) * _up_projection_seconds(model, workload, s, **machine)
    if not moe:
        again = again + _has(modules, MLP) * (inside + region)
        if anywhere(modules == PER_OP):
            blocks: dict[str, Any] = {"attention": attention, "second": second, "region": region}
            again = where(modules == PER_OP, per_op_seconds(model=model, workload=workload, s=s, **machine, **blocks), again)
        return again
    shared, activation = _expert_seconds(model, workload, c, s, **machine)
    if model.num_shared_experts:
        inside, shared = inside + region, shared + region
    parts = _has(modules, MOE_ACT) * activation + _has(modules, SHARED_EXPERTS) * shared
    return again + where(modules & MOE, inside, parts)


def repeated_token_flops(model: ModelSpec, c: Candidates, *, attention: float) -> float:
    """Forward FLOPs of one token that the modules of one candidate alone run again; `attention` are the cores' FLOPs."""
    modules = c.recompute_modules
    if modules == PER_OP:
        return 2.0 * (model.num_hidden_layers + model.num_nextn_predict_layers) * per_op_matrices(model)
    layers = model.num_hidden_layers + model.num_nextn_predict_layers
    sparse = moe_layers(model) + (model.num_nextn_predict_layers if model.num_experts else 0)
    parameters = 0.0
    if modules & MLP:
        parameters += (layers - sparse) * mlp_matrices(model)
    if modules & MOE:
        parameters += sparse * active_expert_matrices(model)
    elif modules & SHARED_EXPERTS:
        parameters += sparse * shared_expert_matrices(model)
    if modules & MLA_UP_PROJ:
        qk, v = head_widths(model)
        rank, nope = float(model.kv_lora_rank or 0), float(model.qk_nope_head_dim or 0)
        parameters += layers * model.num_attention_heads * (qk * (model.q_lora_rank or model.hidden_size) + rank * (nope + v))
    return 2.0 * parameters + (attention if modules & CORE_ATTN else 0.0)


def _has(modules: IntArray, bit: int) -> Any:
    """1 where the module is recomputed, else 0."""
    return (modules & bit) // bit


def _up_projection_seconds(
    model: ModelSpec, workload: TrainingWorkload, s: Shapes, *, gpu: GpuSpec, profile: EfficiencyProfile
) -> Column:
    """Queries, keys and values out of the latents, and the rotation of their parts."""
    matrices = up_projections(model, s)
    matmul, _ = weight_matmuls(s.tokens, matrices, gpu=gpu, profile=profile, precision=workload.precision)
    rotated = s.tokens * 2.0 * s.e * (matrices[0][0] + matrices[1][0])
    return matmul + elementwise_seconds(rotated, kernels=1.0, gpu=gpu, profile=profile)


def _expert_seconds(
    model: ModelSpec, workload: TrainingWorkload, c: Candidates, s: Shapes, *, gpu: GpuSpec, profile: EfficiencyProfile
) -> tuple[Column, Column]:
    """(shared experts, activation functions of the routed ones), forward."""
    gates = 2.0 if model.gated_mlp else 1.0
    routed = routed_tokens(model, workload, c, s) * activation_width(model, c)
    activation = elementwise_seconds((gates + 1.0) * s.e * routed, kernels=1.0, gpu=gpu, profile=profile)
    if not model.num_shared_experts:
        return 0.0, activation
    matrices = shared_matrices(model, s)
    shared, _ = weight_matmuls(s.tokens, matrices, gpu=gpu, profile=profile, precision=workload.precision)
    traffic = (gates + 1.0) * s.e * s.tokens * matrices[1][1]
    return shared + elementwise_seconds(traffic, kernels=1.0, gpu=gpu, profile=profile), activation


# torchtitan's selective recomputation per operation (recompute per_op): what it keeps of a Llama block and runs again.
#
# Of a block it keeps the input and the outputs of attention, of every second matmul (queries, values, the MLP's gate and down
# projection) and of reduce-scatters; all else runs again before the block's backward pass, gathers of tensor parallelism too.
# Source: torchtitan 0.2, distributed/activation_checkpoint.py (_apply_op_sac) and models/llama3/infra/parallelize.py.


def per_op_bytes(*, model: ModelSpec, workload: TrainingWorkload, s: Shapes) -> Column:
    """Bytes a layer and micro-batch: e T (h/r + a d + k d + a d + f + h + 2 h / t where SP is on) + the fp32 log-sum-exp, with
    a query and k key/value heads of d and an MLP of f on the rank, and the layer's input divided over the r ranks of SP.

    The down projection's output is kept before its reduce-scatter, so whole; those of the two reduce-scatters divided.
    """
    heads, kv_heads, hidden = _on_rank(model, s)
    width = s.h / s.shards + (2.0 * heads + kv_heads) * model.head_size + hidden + s.h + s.sharded * 2.0 * s.h / s.t
    return s.e * s.tokens * width + core_bytes(workload=workload, s=s, heads=heads)


def per_op_seconds(
    *,
    model: ModelSpec,
    workload: TrainingWorkload,
    gpu: GpuSpec,
    profile: EfficiencyProfile,
    s: Shapes,
    attention: BlockTime,
    second: BlockTime,
    region: Column,
) -> Column:
    """Seconds a layer and micro-batch: the matmuls for keys, the output projection and the MLP's other half, all elementwise
    kernels, and one of the two collectives around each block (`region` is both of one block).
    """
    heads, kv_heads, hidden = _on_rank(model, s)
    again = [(kv_heads * model.head_size, s.h), (s.h, heads * model.head_size), (hidden, s.h)]
    matmul, _ = weight_matmuls(s.tokens, again, gpu=gpu, profile=profile, precision=workload.precision)
    return matmul + attention.elementwise + second.elementwise + region


def per_op_matrices(model: ModelSpec) -> float:
    """Entries of one layer's matrices that multiply again."""
    width = (model.num_attention_heads + model.kv_heads) * model.head_size
    return float(model.hidden_size * (width + model.ffn_size))


def _on_rank(model: ModelSpec, s: Shapes) -> tuple[Column, Column, Column]:
    """(query heads, key/value heads, MLP width) of one tensor-parallel rank."""
    return model.num_attention_heads / s.t, maximum(model.kv_heads / s.t, 1.0), model.ffn_size / s.t
