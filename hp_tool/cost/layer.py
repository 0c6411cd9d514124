"""One transformer layer on one rank for one micro-batch: seconds of both passes, and saved
bytes.

Bytes follow arXiv 2205.05198 section 4 and tensor-parallel collectives its section 4.2, generalised
to GQA, latent attention, gated MLPs, fused attention, MoE layers, context parallelism and matmuls
below 16 bits.
"""

from dataclasses import replace

from hp_tool.cost.arrays import Floats, anywhere, maximum, minimum, where
from hp_tool.cost.attention import attention_bytes, attention_time
from hp_tool.cost.block import (
    NO_BYTES,
    NO_TIME,
    BlockBytes,
    BlockTime,
    LayerBytes,
    LayerTime,
    Shapes,
    shapes,
)
from hp_tool.cost.candidates import CORE_ATTN, PER_OP, Candidates
from hp_tool.cost.case import TrainingCase
from hp_tool.cost.lora import (
    adapter_tensor_seconds,
    residual_bytes,
    wide_gathers,
    with_adapter_bytes,
    with_adapter_time,
)
from hp_tool.cost.mlp import mlp_bytes, mlp_time
from hp_tool.cost.moe import expert_bytes, expert_time, overlap_with_other_pass
from hp_tool.cost.recomputation import dropped_bytes, per_op_bytes, repeated_seconds
from hp_tool.cost.recurrent_block import recurrent_bytes, recurrent_time
from hp_tool.domain.efficiency import FrameworkEfficiency

GATHER_COST = 0.5
"""How much a gather slows a concurrent matmul, relative to a reduction, which also adds data.

Chosen: Tables 4 and 5 of arXiv 2205.05198 fit equally well from 0.3 to 1. Up to 0.5, SP speeds up
the backward pass, as in Table 4.
"""


def layer_bytes(
    *,
    case: TrainingCase,
    candidates: Candidates,
    s: Shapes | None = None,
    attention: BlockBytes | None = None,
) -> LayerBytes:
    """Return the activation bytes of one layer of the case's kind.

    For a plain GPT with dropout and unfused attention these equal the paper's formulas:
    sbh(34+5as/h) on one device, sbh(10+24/t+5as/(ht)) with TP, sbh(34+5as/h)/t with SP, 34sbh/t
    with selective recomputation, 2sbh with full recomputation. With sequence parallelism the
    layer's input, which full recomputation saves, is sharded: 2sbh/t (Megatron Core). `attention`
    is the attention block's result if already computed.
    """
    s = s or shapes(case=case, candidates=candidates)
    attention = attention or mixer_bytes(case=case, candidates=candidates, s=s)
    second = _second_bytes(case=case, candidates=candidates, s=s)
    both = attention + second
    if case.workload.lora is not None:
        both = with_adapter_bytes(both, case=case, candidates=candidates, s=s)
    if case.workload.records_layers:
        # A CUDA graph keeps its output and the gradients of its output and input. Its input is
        # the norm's input, which is already counted.
        both = replace(both, saved=both.saved + 3.0 * s.e * s.tokens * s.h / s.shards)
    saved_selective, repeated = both.saved, both.core
    if case.workload.lora is not None:
        repeated = maximum(repeated, 0.0)
    if candidates.names_modules:
        dropped = [dropped_bytes(candidates, block, s=s) for block in (attention, second)]
        saved_selective = both.saved + both.core - dropped[0] - dropped[1]
        repeated = where(candidates.recompute_modules == CORE_ATTN, repeated, maximum(*dropped))
        if anywhere(candidates.recompute_modules == PER_OP):
            per_op_saved, per_op = (
                per_op_bytes(case=case, s=s),
                candidates.recompute_modules == PER_OP,
            )
            saved_selective = where(per_op, per_op_saved, saved_selective)
            repeated = where(per_op, both.saved + both.core - per_op_saved, repeated)
    return LayerBytes(
        saved=both.saved + both.core,
        saved_selective=saved_selective,
        waiting=both.saved,
        saved_full=residual_bytes(case, candidates, s) * s.tokens * s.h / s.shards,
        repeated=repeated,
        backward_working=both.working,
    )


def mixer_bytes(*, case: TrainingCase, candidates: Candidates, s: Shapes) -> BlockBytes:
    """Return the activation bytes of a layer's token mixer.

    If no MLP follows, the norm is part of the projection's kernel and is not recomputed (Megatron
    Core, mamba_layer_specs.py).
    """
    if case.model.mixer == "none":
        return NO_BYTES
    block = attention_bytes if case.model.mixer == "attention" else recurrent_bytes
    block_bytes = block(case=case, candidates=candidates, s=s)
    return (
        replace(block_bytes, norm_output=0.0) if case.model.feed_forward == "none" else block_bytes
    )


def mixer_time(*, case: TrainingCase, candidates: Candidates, s: Shapes) -> BlockTime:
    """Return the time of a layer's token mixer, in seconds."""
    if case.model.mixer == "none":
        return NO_TIME
    block = attention_time if case.model.mixer == "attention" else recurrent_time
    return block(case=case, candidates=candidates, s=s)


def _second_bytes(*, case: TrainingCase, candidates: Candidates, s: Shapes) -> BlockBytes:
    if case.model.feed_forward == "none":
        return NO_BYTES
    return (
        expert_bytes(case=case, candidates=candidates, s=s)
        if case.model.num_experts
        else mlp_bytes(model=case.model, s=s)
    )


def _second_time(*, case: TrainingCase, candidates: Candidates, s: Shapes) -> BlockTime:
    if case.model.feed_forward == "none":
        return NO_TIME
    return (
        expert_time(case=case, candidates=candidates, s=s)
        if case.model.num_experts
        else mlp_time(case=case, s=s)
    )


def layer_time(
    *,
    case: TrainingCase,
    candidates: Candidates,
    split_backward: bool = False,
    merged: bool = False,
    s: Shapes | None = None,
    attention: BlockTime | None = None,
    second: BlockTime | None = None,
) -> LayerTime:
    """Return the time of one layer of the case's kind, in seconds.

    Weight matmuls run three times: forward, input gradient and weight gradient. With
    `split_backward`, the weight gradient is returned in a separate field. With `merged`, forward
    and backward passes of different micro-batches run together. `s` overrides the sizes of the
    workload's micro-batches. `attention` and `second` are the times of the layer's blocks if
    already computed.
    """
    model, workload = case.model, case.workload
    s = s or shapes(case=case, candidates=candidates)
    attention = attention or mixer_time(case=case, candidates=candidates, s=s)
    if second is None:
        second = _second_time(case=case, candidates=candidates, s=s)
    if merged:
        second = overlap_with_other_pass(second, attention=attention)
    both = attention + second
    if workload.lora is not None:
        both = with_adapter_time(both, case=case, candidates=candidates, s=s)
    # An MoE block's tokens stay sharded over the tensor group; its shared experts gather and
    # scatter like a dense MLP.
    alone = model.feed_forward == "none" or (
        model.num_experts is not None and not model.num_shared_experts
    )
    regions = 2.0 - 1.0 * alone - 1.0 * (model.mixer == "none")
    trained = workload.lora is None
    wide = 0 if trained else wide_gathers(case, candidates)
    layer = as_layer_time(
        both,
        case=case,
        s=s,
        regions=regions,
        split_backward=split_backward,
        trained=trained,
        wide=wide,
    )
    if candidates.names_modules:
        region = layer.tensor / max(regions, 1.0)
        again = repeated_seconds(
            case=case, candidates=candidates, s=s, attention=attention, second=second, region=region
        )
        layer = replace(layer, repeated=again)
    if trained:
        return layer
    adapter_seconds, adapter_seconds_backward = adapter_tensor_seconds(
        case=case, candidates=candidates, s=s
    )
    return replace(
        layer,
        tensor=layer.tensor + adapter_seconds,
        tensor_backward=layer.tensor_backward + adapter_seconds_backward,
    )


def as_layer_time(
    block: BlockTime,
    *,
    case: TrainingCase,
    s: Shapes,
    regions: float,
    split_backward: bool = False,
    trained: bool = True,
    wide: int = 0,
) -> LayerTime:
    """Return the time in seconds of a layer, given those of its blocks and of its tensor-parallel
    collectives.

    A tensor-parallel region is a column-parallel matmul followed by a row-parallel matmul.
    """
    tensor, tensor_backward = _tensor_seconds(
        case.profile.framework, s=s, block=block, regions=regions, trained=trained, wide=wide
    )
    return LayerTime(
        forward=block.matmul + block.core + block.elementwise,
        backward=block.matmul
        + block.weight_gradient
        + block.core_backward
        + block.elementwise_backward,
        attention=block.core,
        attention_backward=block.core_backward,
        weight_gradient=block.weight_gradient if split_backward else 0.0,
        repeated=block.core,
        tensor=tensor,
        tensor_backward=tensor_backward,
        context=block.context,
        context_backward=block.context_backward,
        expert=block.expert,
        expert_backward=block.expert_backward,
    )


def _tensor_seconds(
    framework: FrameworkEfficiency,
    *,
    s: Shapes,
    block: BlockTime,
    regions: float,
    trained: bool,
    wide: int,
) -> tuple[Floats, Floats]:
    """Return the exposed (forward, backward) seconds of the collectives of `regions`
    tensor-parallel regions.

    Forward: one all-reduce per region, or with SP an all-gather and a reduce-scatter. Inputs and
    gradients below 16 bits are quantised before they are gathered (Transformer Engine,
    gather_along_first_dim), except `wide` inputs, which adapters need in 16 bits. Reductions stay
    in 16 bits. Backward without SP: the all-reduces, overlapped with the weight-gradient matmuls.
    Backward with SP: gradients are gathered first, without overlap. If the weights are trained, the
    sharded inputs are gathered again, overlapped with the input-gradient matmuls (arXiv 2205.05198
    section 4.2.2). Input gradients are reduce-scattered, overlapped with the weight-gradient
    matmuls. Overlapped collectives compete with the matmuls for SMs and bandwidth. The framework's
    overlap is the fraction of a reduction that is hidden completely. Gathers cost half as much
    (GATHER_COST).
    """
    gather, scatter, all_reduce = (
        regions * s.input_gather_s,
        regions * s.gather_s,
        regions * s.all_reduce_s,
    )
    overlap = framework.tensor_parallel_overlap
    exposed = all_reduce - overlap * minimum(all_reduce, block.weight_gradient)
    forward = where(
        s.sharded, gather + wide * (s.gather_s - s.input_gather_s) + scatter, all_reduce
    )
    # If forward collectives are pipelined with their matmuls, so is the gathering of gradients in
    # the backward pass, which shares the input-gradient matmuls with the gathering of inputs.
    # Transformer Engine's Userbuffers, which pipeline them, work only within NVLink
    # (github.com/NVIDIA/TransformerEngine/issues/1071, pull/1470).
    pipelined = framework.tensor_parallel_forward_overlap * s.sharded * s.tensor.in_domain
    again = 1.0 if trained else 0.0
    hidden = 1.0 - GATHER_COST * (1.0 - overlap)
    behind_inputs = minimum((again * hidden + pipelined) * gather, block.matmul)
    exposed_sharded = (
        (1.0 + again) * gather
        + scatter
        - behind_inputs
        - overlap * minimum(scatter, block.weight_gradient)
    )
    return forward - pipelined * minimum(forward, block.matmul), where(
        s.sharded, exposed_sharded, exposed
    )
