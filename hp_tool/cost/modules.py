"""Recomputation by module, in Megatron Core's words: what each module does not keep, and what running it again costs.

core_attn, mlp, moe and shared_experts are checkpointed: their inputs are kept, what arises inside is not. layernorm, moe_act
and mla_up_proj discard their outputs, which their consumers would keep, until the backward pass wants them. Sources:
transformer_config.py, transformer_layer.py, moe/ and multi_latent_attention.py of Megatron Core 0.16.
"""

from __future__ import annotations

from typing import Any

from hp_tool.cost.attention import head_widths, up_projections
from hp_tool.cost.block import BlockBytes, BlockTime
from hp_tool.cost.candidates import CORE_ATTN, LAYERNORM, MLA_UP_PROJ, MLP, MOE, MOE_ACT, PER_OP, SHARED_EXPERTS, Candidates
from hp_tool.cost.compute import elementwise_seconds, weight_matmuls
from hp_tool.cost.elementwise import Column, IntArray, anywhere, where
from hp_tool.cost.experts import activation_width, routed_tokens, shared_matrices
from hp_tool.cost.parameters import active_expert_matrices, mlp_matrices, moe_layers, shared_expert_matrices
from hp_tool.cost.per_op import per_op_matrices, per_op_seconds
from hp_tool.cost.shapes import LAYER_AXES, Shapes
from hp_tool.domain.efficiency import EfficiencyProfile
from hp_tool.domain.hardware import GpuSpec
from hp_tool.domain.model import ModelSpec
from hp_tool.domain.workload import TrainingWorkload


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
