"""Step time of each candidate from its layers', ends' and states' costs: exposed seconds by part."""

from __future__ import annotations

import numpy as np

from hp_tool.cost.candidates import SELECTIVE, Candidates, FloatArray
from hp_tool.cost.communication import ring_seconds, send_seconds
from hp_tool.cost.head import HeadTime
from hp_tool.cost.layer import LayerTime, activation_element_bytes
from hp_tool.cost.memory import recomputed_layer_fraction, state_bytes
from hp_tool.cost.pipeline import bubble_seconds
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
    parameters: FloatArray,
    micro_batches: FloatArray,
) -> dict[str, FloatArray]:
    """The slowest stage runs m micro-batches, then waits for the others to fill and drain. `parameters` are those of
    one rank of the largest stage.
    """
    c, m = candidates, micro_batches
    p = c.pipeline_parallel_size.astype(np.float64)
    layers = model.num_hidden_layers / p
    whole = recomputed_layer_fraction(c, layers_per_chunk=layers / c.virtual_pipeline_parallel_size)
    again = whole * (layer.forward + layer.forward_communication)
    again = again + np.where(c.recompute_method == SELECTIVE, layer.attention_core, 0.0)

    # Per stage and micro-batch. The ends add to the first and last stage; the longer end sets the pace.
    compute = layers * (layer.forward + layer.backward)
    recompute = layers * again
    communication = layers * (layer.forward_communication + layer.backward_communication)
    output = head.output + head.output_communication
    both_ends = head.embedding + output
    end = np.where(p > 1.0, np.maximum(head.embedding, output), both_ends)
    output_share = np.where(end > head.embedding, head.output_communication, 0.0)
    stage = compute + recompute + communication + end
    everything = p * (compute + recompute + communication) + both_ends
    transfer = transfer_seconds(model=model, cluster=cluster, workload=workload, profile=profile, candidates=c)
    zeros = np.zeros_like(p)
    return {
        "compute": m * (compute + end - output_share),
        "recompute": m * recompute,
        "tensor_parallel": m * (communication + output_share),
        "context_parallel": zeros,
        "expert_parallel": zeros,
        "pipeline_bubble": bubble_seconds(c, all_stages_s=everything, slowest_stage_s=stage) + 2.0 * (p - 1.0) * transfer,
        "pipeline_p2p": 2.0 * m * c.virtual_pipeline_parallel_size * transfer * (1.0 - profile.framework.pipeline_overlap),
        "data_parallel": gradient_seconds(
            model=model,
            cluster=cluster,
            workload=workload,
            profile=profile,
            candidates=c,
            parameters=parameters,
            behind=compute,
        ),
        "optimizer": optimizer_seconds(
            cluster=cluster, workload=workload, profile=profile, candidates=c, parameters=parameters
        ),
        "overhead": zeros + profile.framework.step_overhead_s,
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
    return np.where(c.pipeline_parallel_size > 1, seconds, 0.0)


def gradient_seconds(
    *,
    model: ModelSpec,
    cluster: ClusterSpec,
    workload: TrainingWorkload,
    profile: EfficiencyProfile,
    candidates: Candidates,
    parameters: FloatArray,
    behind: FloatArray,
) -> FloatArray:
    """Exposed seconds of data parallelism, once a step: all-reduce of gradients (ZeRO 0), or their reduce-scatter and
    the all-gather of updated weights (ZeRO 1 and above). `behind` is the compute of one micro-batch on one stage: more
    than that cannot hide them. Tied weights on two stages add an all-reduce between the pipeline's ends.
    """
    c = candidates
    state = state_bytes(workload)
    n = c.data_parallel_size * c.context_parallel_size
    group = {"group_size": n, "stride": c.tensor_parallel_size}
    share = (n - 1.0) / n
    per_parameter = np.where(c.zero_stage >= 1, state.gradients + state.weights, 2.0 * state.gradients)
    total = ring_seconds(parameters * per_parameter * share, cluster=cluster, profile=profile, **group)
    exposed = total - profile.framework.data_parallel_overlap * np.minimum(total, behind)
    if not model.tie_word_embeddings:
        return exposed
    p = c.pipeline_parallel_size
    shared = model.vocab_size * model.hidden_size / c.tensor_parallel_size * state.gradients
    ends = ring_seconds(
        shared,
        group_size=np.minimum(p, 2),
        stride=c.tensor_parallel_size * n * np.maximum(p - 1, 1),
        cluster=cluster,
        profile=profile,
    )
    return exposed + ends


def optimizer_seconds(
    *,
    cluster: ClusterSpec,
    workload: TrainingWorkload,
    profile: EfficiencyProfile,
    candidates: Candidates,
    parameters: FloatArray,
) -> FloatArray:
    """Memory-bound update: every state read and written, on a 1/(d c) share under ZeRO 1 and above; gradients are
    zeroed and their norm taken over the whole buffer.
    """
    state = state_bytes(workload)
    n = np.where(candidates.zero_stage >= 1, candidates.data_parallel_size * candidates.context_parallel_size, 1)
    update = (2.0 * state.optimizer + state.gradients + state.weights) / n
    traffic = parameters * (update + 2.0 * state.gradients) * profile.framework.optimizer_traffic_factor
    reached = profile.gpu.memory_fraction * cluster.gpu.memory_bandwidth_bytes_per_second
    return traffic / reached
