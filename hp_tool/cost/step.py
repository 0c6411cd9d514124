"""Step time of each candidate from its layers', ends' and states' costs: exposed seconds by part."""

from __future__ import annotations

from hp_tool.cost.block import Column
from hp_tool.cost.candidates import SELECTIVE, Candidates, FloatArray
from hp_tool.cost.communication import send_seconds
from hp_tool.cost.elementwise import anywhere, maximum, minimum, where, zeros_like
from hp_tool.cost.head import HeadTime
from hp_tool.cost.host import host_waits, launched_layers, message_stalls
from hp_tool.cost.layer import LayerTime
from hp_tool.cost.memory import recomputed_layer_fraction
from hp_tool.cost.offload import activation_seconds
from hp_tool.cost.placement import dense_group
from hp_tool.cost.schedules.costs import is_folded, split_bubble_share, splits_backward
from hp_tool.cost.schedules.folded import share_of_ends
from hp_tool.cost.section import Section, Stage
from hp_tool.cost.shapes import activation_element_bytes
from hp_tool.cost.sharding import exposed, fully_sharded_seconds
from hp_tool.cost.stages import StageLayers
from hp_tool.cost.states import StateCosts
from hp_tool.domain.efficiency import EfficiencyProfile
from hp_tool.domain.hardware import ClusterSpec
from hp_tool.domain.model import ModelSpec
from hp_tool.domain.workload import TrainingWorkload

TIME_PARTS = (
    "compute",
    "recompute",
    "tensor_parallel",
    "context_parallel",
    "expert_parallel",
    "pipeline_bubble",
    "pipeline_p2p",
    "data_parallel",
    "optimizer",
    "offload",
    "overhead",
)
"""Exposed seconds; they sum to the step time."""


def time_parts(
    *,
    model: ModelSpec,
    cluster: ClusterSpec,
    workload: TrainingWorkload,
    profile: EfficiencyProfile,
    candidates: Candidates,
    layer: LayerTime,
    stages: StageLayers,
    head: HeadTime,
    states: StateCosts,
    micro_batches: FloatArray,
    offloaded: Column = 0.0,
) -> dict[str, FloatArray]:
    """The slowest stage runs m micro-batches, then waits for the others to fill and drain.

    Bubble: what the other stages take for one micro-batch, divided by v; with equal stages (p-1)/v (t_f + t_b),
    arXiv 2104.04473 section 2.2; `schedules.costs` has those that split the backward pass. Data-parallel communication
    hides at most behind one micro-batch's compute. Of a section of the pipeline the bubble is what all its stages take.
    """
    c, m = candidates, micro_batches
    p = c.pipeline_parallel_size
    chunks = c.virtual_pipeline_parallel_size
    layers = stages.pace
    whole = recomputed_layer_fraction(c, layers_per_chunk=layers / chunks)
    again = whole * (layer.forward + layer.tensor + layer.context + layer.expert)
    again = again + where(c.recompute_method == SELECTIVE, layer.repeated, 0.0)

    # Per stage and micro-batch. The ends add to the first and last stage; the longer end sets the pace, as far as it is
    # longer than the layer that an uneven end leaves out.
    compute = layers * (layer.forward + layer.backward)
    recompute = layers * again
    tensor = layers * (layer.tensor + layer.tensor_backward)
    context = layers * (layer.context + layer.context_backward)
    expert = layers * (layer.expert + layer.expert_backward)
    # Multi-token prediction: each depth is one more layer and one more pass through the output layer.
    extra = model.num_nextn_predict_layers
    output = (1.0 + extra) * (head.output + head.output_communication)
    body = compute + recompute + tensor + context + expert
    if extra and not isinstance(c, Stage):  # which counts them among its layers
        output = output + extra / layers * body
    embedding = head.embedding
    if isinstance(c, Section):
        embedding, output = c.holds_embedding * embedding, c.holds_output * output
    both_ends = embedding + output
    framework = profile.framework
    passes = layers * (layer.forward + layer.tensor + layer.context + layer.expert)
    held, stretched = body, passes
    if framework.host_layer_s:
        launched = launched_layers(layers, moe_fraction=stages.pace_moe_fraction, recomputed_fraction=whole)
        waiting = host_waits(
            profile=profile, cluster=cluster, candidates=c, layers=launched, recomputed_fraction=whole, forward_s=passes,
            backward_s=body - passes,
        )  # fmt: skip
        # A pass takes what its host takes; communication runs on meanwhile.
        waits = waiting[0] + waiting[1]
        held, stretched = body + waits, passes + waiting[0]
    each = held / layers
    ends = maximum(embedding - stages.fewer_first * each, output - stages.fewer_last * each)
    end = where(p > 1.0, maximum(ends, 0.0), both_ends)
    output_share = where(output >= embedding, minimum(end, (1.0 + extra) * head.output_communication), 0.0)
    others = (p - 1.0) * held + both_ends - stages.fewer * each - end
    if isinstance(c, Section):
        others = c.stages * held + both_ends
    bubble = others / chunks
    if anywhere(c.pipeline_schedule):
        folded = is_folded(c)
        end = where(folded, share_of_ends(c) * both_ends, end)
        output_share = where(folded, share_of_ends(c) * (1.0 + extra) * head.output_communication, output_share)
        split = split_bubble_share(c, forward=passes, whole=body, weight_gradient=layers * layer.weight_gradient)
        bubble = where(splits_backward(c), where(folded, (p - 1.0) * held, others) * split, bubble)
    transfer = transfer_seconds(model=model, cluster=cluster, workload=workload, profile=profile, candidates=c)
    offload = zeros_like(p)
    if workload.offload == "optimizer":
        offload = offload + states.offload_s
    elif workload.offload == "activations":
        offload = offload + m * activation_seconds(offloaded, forward=passes, backward=body - passes, gpu=cluster.gpu)
    overhead: Column = zeros_like(p) + framework.step_overhead_s
    if framework.host_layer_s:
        overhead = overhead + m * waits
    stalled, stalled_once = message_stalls(profile=profile, cluster=cluster, candidates=c)
    return {
        "compute": m * (compute + end - output_share),
        "recompute": m * recompute,
        "tensor_parallel": m * (tensor + output_share),
        "context_parallel": m * context + zeros_like(p),
        "expert_parallel": m * expert + zeros_like(p),
        "pipeline_bubble": bubble + 2.0 * (p - 1.0) * transfer + stalled_once,
        "pipeline_p2p": (2.0 * (1.0 - framework.pipeline_overlap)) * m * chunks * transfer + m * stalled,
        "data_parallel": data_parallel_seconds(
            profile=profile,
            candidates=c,
            states=states,
            micro_batches=m,
            forward=stretched,
            stage=held,
            layers=layers,
        ),
        "optimizer": states.update_s,
        "offload": offload,
        "overhead": overhead,
    }


def data_parallel_seconds(
    *,
    profile: EfficiencyProfile,
    candidates: Candidates,
    states: StateCosts,
    micro_batches: Column,
    forward: Column,
    stage: Column,
    layers: Column,
) -> Column:
    """Exposed seconds of gradients and weights in one step.

    ZeRO 0 and 1: gradients once, after the last micro-batch, weights once; what hides them is one micro-batch on the
    stage, its own exposed communication included, which uses other links. ZeRO 2: gradients after every micro-batch's
    backward pass, weights behind one forward pass. ZeRO 3: weights are gathered for every forward and backward pass.
    Replicas of hybrid sharding all-reduce once, with the last micro-batch, behind what its reduction leaves of the stage.
    """
    overlap = profile.framework.data_parallel_overlap
    once = states.reduce_s + states.gather_s
    zero = candidates.zero_stage
    replicated = profile.framework.all_reduce_overlap
    alone = (zero == 0) & (candidates.pipeline_parallel_size == 1)
    share: Column = overlap if replicated is None else where(alone, replicated, overlap)
    total = exposed(once, behind=stage, overlap=share)
    if anywhere(zero >= 2):
        reduce, gather, backward = states.reduce_s, states.gather_s, stage - forward
        each = fully_sharded_seconds(
            gather=gather, reduce=reduce, forward=forward, backward=backward, layers=layers, overlap=overlap
        )
        gradients = micro_batches * exposed(reduce, behind=backward, overlap=overlap)
        weights = exposed(gather, behind=forward, overlap=overlap)
        total = where(zero >= 3, micro_batches * each, where(zero == 2, gradients + weights, total))
        once = where(zero >= 3, 2.0 * gather + reduce, once)
    if anywhere(states.replica_s > 0.0):
        total = total + exposed(states.replica_s, behind=maximum(stage - once, 0.0), overlap=overlap)
    return total + states.tied_reduction_s


def transfer_seconds(
    *, model: ModelSpec, cluster: ClusterSpec, workload: TrainingWorkload, profile: EfficiencyProfile, candidates: Candidates
) -> FloatArray:
    """One micro-batch's activations to the next stage: each tensor-parallel rank sends its share, e T h / t
    (Megatron's scatter-gather, arXiv 2104.04473 section 4.1; with SP they are sharded already). Some neighbours are in
    different NVLink domains wherever one domain does not hold all stages, and those set the pace.
    """
    c = candidates
    t = c.tensor_parallel_size
    tokens = workload.sequence_length * c.micro_batch_size / c.context_parallel_size
    message = tokens * model.hidden_size * activation_element_bytes(workload) / t
    (stages,) = dense_group(c, "pp", order=cluster.rank_order)
    crosses = stages.size * stages.stride > cluster.nvlink_domain_size
    seconds = send_seconds(message, distance=stages.stride, crosses=crosses, cluster=cluster, profile=profile)
    return where(stages.size > 1, seconds, 0.0)
