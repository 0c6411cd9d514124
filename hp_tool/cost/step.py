"""Step time of each candidate from its layers', ends' and states' costs: exposed seconds by part."""

from __future__ import annotations

from hp_tool.cost.candidates import SELECTIVE, Candidates, FloatArray
from hp_tool.cost.communication import send_seconds
from hp_tool.cost.elementwise import maximum, minimum, where, zeros_like
from hp_tool.cost.head import HeadTime
from hp_tool.cost.layer import LayerTime, activation_element_bytes
from hp_tool.cost.memory import recomputed_layer_fraction
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
    head: HeadTime,
    states: StateCosts,
    micro_batches: FloatArray,
) -> dict[str, FloatArray]:
    """The slowest stage runs m micro-batches, then waits for the others to fill and drain.

    Bubble: what the other stages take for one micro-batch, divided by v; with equal stages (p-1)/v (t_f + t_b),
    arXiv 2104.04473 section 2.2. Data-parallel communication hides at most behind one micro-batch's compute.
    """
    c, m = candidates, micro_batches
    p = c.pipeline_parallel_size
    layers = model.num_hidden_layers / p
    whole = recomputed_layer_fraction(c, layers_per_chunk=layers / c.virtual_pipeline_parallel_size)
    again = whole * (layer.forward + layer.forward_communication)
    again = again + where(c.recompute_method == SELECTIVE, layer.attention_core, 0.0)

    # Per stage and micro-batch. The ends add to the first and last stage; the longer end sets the pace.
    compute = layers * (layer.forward + layer.backward)
    recompute = layers * again
    communication = layers * (layer.forward_communication + layer.backward_communication)
    output = head.output + head.output_communication
    both_ends = head.embedding + output
    end = where(p > 1.0, maximum(head.embedding, output), both_ends)
    output_share = where(end > head.embedding, head.output_communication, 0.0)
    stage = compute + recompute + communication + end
    everything = p * (compute + recompute + communication) + both_ends
    transfer = transfer_seconds(model=model, cluster=cluster, workload=workload, profile=profile, candidates=c)
    chunks = c.virtual_pipeline_parallel_size
    overlap = profile.framework
    none = zeros_like(p)
    return {
        "compute": m * (compute + end - output_share),
        "recompute": m * recompute,
        "tensor_parallel": m * (communication + output_share),
        "context_parallel": none,
        "expert_parallel": none,
        "pipeline_bubble": (everything - stage) / chunks + 2.0 * (p - 1.0) * transfer,
        "pipeline_p2p": (2.0 * (1.0 - overlap.pipeline_overlap)) * m * chunks * transfer,
        "data_parallel": states.reduction_s
        - overlap.data_parallel_overlap * minimum(states.reduction_s, compute)
        + states.tied_reduction_s,
        "optimizer": states.update_s,
        "overhead": none + overlap.step_overhead_s,
    }


def transfer_seconds(
    *, model: ModelSpec, cluster: ClusterSpec, workload: TrainingWorkload, profile: EfficiencyProfile, candidates: Candidates
) -> FloatArray:
    """One micro-batch's activations to the next stage: each tensor-parallel rank sends its share, e T h / t
    (Megatron's scatter-gather, arXiv 2104.04473 section 4.1; with SP they are sharded already).
    """
    c = candidates
    t = c.tensor_parallel_size
    tokens = workload.sequence_length * c.micro_batch_size / c.context_parallel_size
    message = tokens * model.hidden_size * activation_element_bytes(workload) / t
    distance = t * c.context_parallel_size * c.data_parallel_size
    seconds = send_seconds(message, distance=distance, cluster=cluster, profile=profile)
    return where(c.pipeline_parallel_size > 1, seconds, 0.0)
