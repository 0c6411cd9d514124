"""Weights, gradients and optimizer states of the pipeline's two ends: bytes, and seconds to reduce and update them."""

from __future__ import annotations

from dataclasses import dataclass

from hp_tool.cost.candidates import Candidates, FloatArray
from hp_tool.cost.communication import ring
from hp_tool.cost.elementwise import anywhere, maximum, minimum, where, zeros_like
from hp_tool.cost.parameters import embedding_parameters, layer_parameters, norm_weights, output_parameters
from hp_tool.domain.efficiency import EfficiencyProfile
from hp_tool.domain.hardware import ClusterSpec
from hp_tool.domain.model import ModelSpec
from hp_tool.domain.workload import StatePrecision, TrainingWorkload

STATE_BYTES: dict[StatePrecision, float] = {"fp32": 4.0, "bf16": 2.0, "fp16": 2.0, "fp8": 1.0}
ADAM_LIKE_STATES = {"adam": 2.0, "muon": 1.0, "sgd": 0.0}
"""State tensors an optimizer keeps besides the master copy."""

STATE_AXES = (
    "tensor_parallel_size",
    "pipeline_parallel_size",
    "context_parallel_size",
    "data_parallel_size",
    "zero_stage",
)
"""What everything here depends on."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BytesPerParameter:
    """Before sharding: 2 + 4 + 12 = 18 by default."""

    weights: float
    gradients: float
    optimizer: float
    """Adam's two states and the master copy."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StateCosts:
    """Arrays of shape (n,)."""

    first_parameters: FloatArray
    """On one rank of the pipeline's first stage."""
    last_parameters: FloatArray
    weight_bytes: FloatArray
    """For each of a rank's parameters, under its ZeRO stage; likewise the next two."""
    gradient_bytes: FloatArray
    optimizer_bytes: FloatArray
    reduction_s: FloatArray
    """Data-parallel communication of one step before any of it is hidden."""
    tied_reduction_s: FloatArray
    """All-reduce of a tied embedding's gradient between the pipeline's ends."""
    update_s: FloatArray
    """Optimizer step."""


def bytes_per_parameter(workload: TrainingWorkload) -> BytesPerParameter:
    """Mixed precision as Megatron Core keeps it: 16-bit weights, fp32 gradients, fp32 master copy and Adam states."""
    weights = STATE_BYTES[workload.parameter_precision or ("fp32" if workload.precision == "fp32" else "bf16")]
    gradients = STATE_BYTES[workload.gradient_precision or "fp32"]
    states = ADAM_LIKE_STATES[workload.optimizer] * STATE_BYTES[workload.optimizer_precision or "fp32"]
    master = 4.0 if weights < 4.0 else 0.0
    return BytesPerParameter(weights=weights, gradients=gradients, optimizer=states + master)


def end_parameters(model: ModelSpec, workload: TrainingWorkload, candidates: Candidates) -> tuple[FloatArray, FloatArray]:
    """Parameters on one rank of the first and of the last stage. Tied weights are kept on both where those are different
    stages (Megatron Core), once where they are the same.
    """
    t, p = candidates.tensor_parallel_size, candidates.pipeline_parallel_size
    alone = p == 1
    layers = model.num_hidden_layers / p * layer_parameters(model, tensor_parallel_size=t)
    embedding = embedding_parameters(model, sequence_length=workload.sequence_length, tensor_parallel_size=t)
    own_output = (p > 1) if model.tie_word_embeddings else 1.0
    head = output_parameters(model, tensor_parallel_size=t) * own_output + norm_weights(model)
    return layers + embedding + alone * head, layers + alone * embedding + head


def state_costs(
    *, model: ModelSpec, cluster: ClusterSpec, workload: TrainingWorkload, profile: EfficiencyProfile, candidates: Candidates
) -> StateCosts:
    """States under ZeRO: stage 1 shards the optimizer over the d c replicas, 2 gradients too, 3 weights too.

    Reduction: all-reduce of gradients (ZeRO 0), or their reduce-scatter and the all-gather of updated weights.
    Update: memory-bound; every state read and written on the own shard, gradients zeroed and their norm taken whole.
    """
    c, size = candidates, bytes_per_parameter(workload)
    replicas = c.data_parallel_size * c.context_parallel_size
    first, last = end_parameters(model, workload, candidates)
    largest = maximum(first, last)
    shard = 1.0 / replicas
    optimizer_share = where(c.zero_stage >= 1, shard, 1.0)

    sent = where(c.zero_stage >= 1, size.gradients + size.weights, 2.0 * size.gradients) * (1.0 - shard)
    data = ring(group_size=replicas, stride=c.tensor_parallel_size, cluster=cluster, profile=profile)
    traffic = (2.0 * size.optimizer + size.gradients + size.weights) * optimizer_share + 2.0 * size.gradients
    reached = profile.gpu.memory_fraction * cluster.gpu.memory_bandwidth_bytes_per_second
    return StateCosts(
        first_parameters=first,
        last_parameters=last,
        weight_bytes=size.weights * where(c.zero_stage >= 3, shard, 1.0),
        gradient_bytes=size.gradients * where(c.zero_stage >= 2, shard, 1.0),
        optimizer_bytes=size.optimizer * optimizer_share,
        reduction_s=data.seconds(largest * sent),
        tied_reduction_s=_tied_seconds(model, cluster, profile, candidates, size.gradients),
        update_s=largest * traffic * (profile.framework.optimizer_traffic_factor / reached),
    )


def _tied_seconds(
    model: ModelSpec, cluster: ClusterSpec, profile: EfficiencyProfile, candidates: Candidates, gradient_bytes: float
) -> FloatArray:
    """First and last stage all-reduce the shared embedding's gradient: V h / t parameters, a group of two."""
    c, p = candidates, candidates.pipeline_parallel_size
    if not (model.tie_word_embeddings and anywhere(p > 1)):
        return zeros_like(p)
    far = c.tensor_parallel_size * c.context_parallel_size * c.data_parallel_size * maximum(p - 1, 1)
    wire = model.vocab_size * model.hidden_size * gradient_bytes / c.tensor_parallel_size * (p > 1)
    return ring(group_size=minimum(p, 2), stride=far, cluster=cluster, profile=profile).seconds(wire)
