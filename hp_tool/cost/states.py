"""Weights, gradients and optimizer states of the pipeline's two ends: bytes, and seconds to reduce and update them."""

from __future__ import annotations

from dataclasses import dataclass

from hp_tool.cost.block import Column
from hp_tool.cost.candidates import Candidates, FloatArray
from hp_tool.cost.communication import ring
from hp_tool.cost.elementwise import anywhere, maximum, minimum, where, zeros_like
from hp_tool.cost.parameters import (
    embedding_parameters,
    expert_parameters,
    layer_parameters,
    moe_shared_parameters,
    norm_weights,
    output_parameters,
)
from hp_tool.cost.shapes import activation_element_bytes
from hp_tool.cost.sharding import Sharding, sharding
from hp_tool.cost.stages import End, stage_layers
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
    "expert_parallel_size",
    "expert_tensor_parallel_size",
    "data_parallel_size",
    "zero_stage",
    "data_parallel_shard_size",
)
"""What everything here depends on."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BytesPerParameter:
    """Before sharding: 2 + 4 + 12 = 18 by default."""

    weights: float
    gradients: float
    optimizer: float
    """Adam's two states and the master copy."""
    communicated_weights: float
    """What an all-gather of weights sends: the matmuls' 16 bits even where the shards are kept in fp32."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StateCosts:
    """Arrays of shape (n,): bytes on one rank of the first and of the last stage, seconds of the larger one."""

    first_weights: Column
    first_gradients: Column
    first_optimizer: Column
    last_weights: Column
    last_gradients: Column
    last_optimizer: Column
    gathered_layer: Column
    """Bytes of one layer's weights when gathered under ZeRO 3; 0 where weights are not sharded."""
    reduce_s: Column
    """One reduction of the gradients over the shard group, before any of it is hidden."""
    replica_s: Column
    """All-reduce of the sharded gradients over the replicas of hybrid sharding, once a step; 0 without."""
    gather_s: Column
    """One all-gather of the weights, before any of it is hidden."""
    tied_reduction_s: Column
    """All-reduce of a tied embedding's gradient between the pipeline's ends."""
    update_s: Column
    """Optimizer step."""


def bytes_per_parameter(workload: TrainingWorkload) -> BytesPerParameter:
    """Mixed precision as Megatron Core keeps it: 16-bit weights, fp32 gradients, fp32 master copy and Adam states.
    FSDP keeps fp32 shards and gathers 16 bits; no master copy is needed then.
    """
    wide = workload.precision == "fp32" or workload.framework == "torch-fsdp"
    weights = STATE_BYTES[workload.parameter_precision or ("fp32" if wide else "bf16")]
    gradients = STATE_BYTES[workload.gradient_precision or "fp32"]
    states = ADAM_LIKE_STATES[workload.optimizer] * STATE_BYTES[workload.optimizer_precision or "fp32"]
    master = 4.0 if weights < 4.0 else 0.0
    return BytesPerParameter(
        weights=weights,
        gradients=gradients,
        optimizer=states + master,
        communicated_weights=min(weights, activation_element_bytes(workload)),
    )


def end_parameters(model: ModelSpec, workload: TrainingWorkload, candidates: Candidates) -> tuple[FloatArray, FloatArray]:
    """Parameters besides routed experts on one rank of the first and of the last stage. Tied weights are kept on both
    where those are different stages (Megatron Core), once where they are the same.
    """
    t, p = candidates.tensor_parallel_size, candidates.pipeline_parallel_size
    alone = p == 1
    stages = stage_layers(model, candidates)
    dense = layer_parameters(model, tensor_parallel_size=t)
    more = moe_shared_parameters(model, tensor_parallel_size=t) - dense if model.num_experts else 0.0
    first, last = (end.layers * (dense + end.moe_fraction * more) for end in (stages.first, stages.last))
    embedding = embedding_parameters(model, sequence_length=workload.sequence_length, tensor_parallel_size=t)
    own_output = (p > 1) if model.tie_word_embeddings else 1.0
    head = output_parameters(model, tensor_parallel_size=t) * own_output + norm_weights(model)
    # Each multi-token-prediction layer also has a projection from 2h to h and two norms.
    head = head + model.num_nextn_predict_layers * 2.0 * (model.hidden_size**2 + norm_weights(model))
    return first + embedding + alone * head, last + alone * embedding + head


def end_expert_parameters(model: ModelSpec, candidates: Candidates) -> tuple[Column, Column]:
    """Routed experts on one rank of the first and of the last stage."""

    def on(end: End) -> Column:
        ranks = candidates.expert_parallel_size * candidates.expert_tensor_parallel_size
        return end.layers * end.moe_fraction * expert_parameters(model) / ranks

    stages = stage_layers(model, candidates)
    return on(stages.first), on(stages.last)


def state_costs(
    *, model: ModelSpec, cluster: ClusterSpec, workload: TrainingWorkload, profile: EfficiencyProfile, candidates: Candidates
) -> StateCosts:
    """States under ZeRO: stage 1 shards the optimizer over the replicas, 2 gradients too, 3 weights too. Replicas are the
    d c ranks of a tensor and pipeline position; of a routed expert they are t d c / (e_p e_t).

    Reduction: all-reduce of gradients (ZeRO 0), or their reduce-scatter and the all-gather of weights; hybrid sharding
    does so in each shard group and all-reduces the gradients' shards over the replicas.
    Update: memory-bound; every state read and written on the own shard, gradients zeroed and their norm taken whole.
    """
    c, size = candidates, bytes_per_parameter(workload)
    copies = c.data_parallel_size * c.context_parallel_size
    costs = _group_costs(
        *end_parameters(model, workload, c),
        sharding=sharding(c, copies=copies, stride=c.tensor_parallel_size),
        size=size,
        cluster=cluster,
        profile=profile,
        zero_stage=c.zero_stage,
    )
    if model.num_experts:
        ranks = c.expert_parallel_size * c.expert_tensor_parallel_size
        experts = _group_costs(
            *end_expert_parameters(model, c),
            sharding=sharding(c, copies=maximum(c.tensor_parallel_size * copies // ranks, 1), stride=ranks),
            size=size,
            cluster=cluster,
            profile=profile,
            zero_stage=c.zero_stage,
        )
        costs = {name: value + experts[name] for name, value in costs.items()}
    gathered = (c.zero_stage >= 3) * size.communicated_weights * _layer_on_rank(model, c)
    return StateCosts(
        **costs, gathered_layer=gathered, tied_reduction_s=_tied_seconds(model, cluster, profile, candidates, size.gradients)
    )


def _layer_on_rank(model: ModelSpec, candidates: Candidates) -> Column:
    """Parameters of one layer on one rank; of the larger kind where a model has both."""
    t = candidates.tensor_parallel_size
    if not model.num_experts:
        return layer_parameters(model, tensor_parallel_size=t)
    experts = expert_parameters(model) / (candidates.expert_parallel_size * candidates.expert_tensor_parallel_size)
    return moe_shared_parameters(model, tensor_parallel_size=t) + experts


def _group_costs(
    first: Column,
    last: Column,
    *,
    sharding: Sharding,
    size: BytesPerParameter,
    cluster: ClusterSpec,
    profile: EfficiencyProfile,
    zero_stage: Column,
) -> dict[str, Column]:
    """The costs of parameters that the same ranks hold."""
    shard = 1.0 / sharding.shards
    optimizer_share, gradient_share, weight_share = (where(zero_stage >= stage, shard, 1.0) for stage in (1, 2, 3))
    per_weight, per_gradient = size.weights * weight_share, size.gradients * gradient_share
    per_state = size.optimizer * optimizer_share
    largest = maximum(first, last)
    data = ring(group_size=sharding.shards, stride=sharding.stride, cluster=cluster, profile=profile)
    sent = largest * (1.0 - shard)
    traffic = (2.0 * size.optimizer + size.gradients + size.weights) * optimizer_share + 2.0 * per_gradient
    reached = profile.gpu.memory_fraction * cluster.gpu.memory_bandwidth_bytes_per_second
    return {
        "first_weights": first * per_weight,
        "first_gradients": first * per_gradient,
        "first_optimizer": first * per_state,
        "last_weights": last * per_weight,
        "last_gradients": last * per_gradient,
        "last_optimizer": last * per_state,
        "reduce_s": data.seconds(sent * (size.gradients * where(zero_stage >= 1, 1.0, 2.0))),
        "replica_s": sharding.replica_seconds(largest * size.gradients, cluster=cluster, profile=profile),
        "gather_s": data.seconds(sent * size.communicated_weights) * (zero_stage >= 1),
        "update_s": largest * traffic * (profile.framework.optimizer_traffic_factor / reached),
    }


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
