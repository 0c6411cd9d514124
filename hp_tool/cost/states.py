"""Weights, gradients and optimizer states of the pipeline's two ends: bytes, and seconds to reduce and update them."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from hp_tool.cost.candidates import Candidates, FloatArray
from hp_tool.cost.communication import ring
from hp_tool.cost.parameters import (
    embedding_parameters,
    expert_parameters,
    layer_parameters,
    moe_shared_parameters,
    norm_weights,
    output_parameters,
)
from hp_tool.cost.shapes import activation_element_bytes
from hp_tool.cost.stages import FIRST, LAST, StageLayers, stage_layers
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
)
"""What everything here depends on."""

_ZERO_STAGES = np.array([[1], [2], [3]])
"""From which ZeRO stage on the optimizer, the gradients and the weights are sharded."""


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
    """Bytes have shape (2, n), first and last stage of each candidate; seconds have shape (n,)."""

    weights: FloatArray
    gradients: FloatArray
    optimizer: FloatArray
    reduce_s: FloatArray
    """One reduction of the gradients over the replicas, before any of it is hidden."""
    gather_s: FloatArray
    """One all-gather of the weights, before any of it is hidden."""
    tied_reduction_s: FloatArray
    """All-reduce of a tied embedding's gradient between the pipeline's ends."""
    update_s: FloatArray
    """Optimizer step."""


def bytes_per_parameter(workload: TrainingWorkload) -> BytesPerParameter:
    """Mixed precision as Megatron Core keeps it: 16-bit weights, fp32 gradients, fp32 master copy and Adam states."""
    # FSDP's mixed precision keeps fp32 shards and gathers 16 bits; no master copy is needed then.
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


def end_parameters(
    model: ModelSpec, workload: TrainingWorkload, candidates: Candidates, stages: StageLayers
) -> tuple[FloatArray, FloatArray | float]:
    """Parameters on one rank of the first and of the last stage, shape (2, n): (all but routed experts, routed experts).

    Tied weights are kept on both ends where those are different stages (Megatron Core), once where they are the same.
    """
    t, alone = candidates.tensor_parallel_size, candidates.pipeline_parallel_size == 1
    embedding = embedding_parameters(model, sequence_length=workload.sequence_length, tensor_parallel_size=t)
    output = output_parameters(model, tensor_parallel_size=t)
    own_output = output * (1.0 if not model.tie_word_embeddings else ~alone)
    layer = layer_parameters(model, tensor_parallel_size=t)
    experts: FloatArray | float = 0.0
    if model.num_experts:
        layer = layer + stages.moe_fraction * (moe_shared_parameters(model, tensor_parallel_size=t) - layer)
        shards = candidates.expert_parallel_size * candidates.expert_tensor_parallel_size
        experts = stages.total * stages.moe_fraction * (expert_parameters(model) / shards)
    head = own_output + norm_weights(model)
    # Each multi-token-prediction layer also has a projection from 2h to h and two norms.
    head = head + model.num_nextn_predict_layers * 2.0 * (model.hidden_size**2 + norm_weights(model))
    return stages.total * layer + (FIRST | alone) * embedding + (LAST | alone) * head, experts


def state_costs(
    *, model: ModelSpec, cluster: ClusterSpec, workload: TrainingWorkload, profile: EfficiencyProfile, candidates: Candidates
) -> StateCosts:
    """States under ZeRO: stage 1 shards the optimizer over the replicas, 2 gradients too, 3 weights too. The replicas of
    everything but routed experts are the d c ranks of a tensor and pipeline position; those of an expert are t d c / (e_p e_t).

    Reduction: all-reduce of gradients (ZeRO 0), or their reduce-scatter and the all-gather of weights.
    Update: memory-bound; every state read and written on the own shard, gradients zeroed and their norm taken whole.
    """
    c, size = candidates, bytes_per_parameter(workload)
    t, replicas = c.tensor_parallel_size, c.data_parallel_size * c.context_parallel_size
    parameters, experts = end_parameters(model, workload, candidates, stage_layers(model, candidates))
    groups = [(parameters, replicas, t)]
    if model.num_experts:
        expert_ranks = c.expert_parallel_size * c.expert_tensor_parallel_size
        groups.append((np.asarray(experts), np.maximum(t * replicas // expert_ranks, 1), expert_ranks))

    reached = profile.gpu.memory_fraction * cluster.gpu.memory_bandwidth_bytes_per_second
    per_byte = profile.framework.optimizer_traffic_factor / reached
    both_ends, none = np.zeros((2, len(c))), np.zeros(len(c))
    weights, gradients, optimizer = both_ends, both_ends, both_ends
    reduce, gather, update = none, none, none
    for held, copies, stride in groups:
        shard = 1.0 / copies
        share = np.where(c.zero_stage >= _ZERO_STAGES, shard, 1.0)
        weights = weights + held * (size.weights * share[2])
        gradients = gradients + held * (size.gradients * share[1])
        optimizer = optimizer + held * (size.optimizer * share[0])
        largest = held.max(axis=0)
        data = ring(group_size=copies, stride=stride, cluster=cluster, profile=profile)
        sharded = c.zero_stage >= 1
        reduce = reduce + data.seconds(largest * (1.0 - shard) * (size.gradients * np.where(sharded, 1.0, 2.0)))
        gather = gather + data.seconds(largest * (1.0 - shard) * (size.communicated_weights * sharded))
        traffic = (2.0 * size.optimizer + size.gradients + size.weights) * share[0] + 2.0 * size.gradients * share[1]
        update = update + largest * traffic * per_byte
    return StateCosts(
        weights=weights,
        gradients=gradients,
        optimizer=optimizer,
        reduce_s=reduce,
        gather_s=gather,
        tied_reduction_s=_tied_seconds(model, cluster, profile, candidates, size.gradients),
        update_s=update,
    )


def _tied_seconds(
    model: ModelSpec, cluster: ClusterSpec, profile: EfficiencyProfile, candidates: Candidates, gradient_bytes: float
) -> FloatArray:
    """First and last stage all-reduce the shared embedding's gradient: V h / t parameters, a group of two."""
    c, p = candidates, candidates.pipeline_parallel_size
    if not model.tie_word_embeddings or int(p.max()) == 1:
        return np.zeros(len(c))
    far = c.tensor_parallel_size * c.context_parallel_size * c.data_parallel_size * np.maximum(p - 1, 1)
    wire = model.vocab_size * model.hidden_size * gradient_bytes / c.tensor_parallel_size * (p > 1)
    return ring(group_size=np.minimum(p, 2), stride=far, cluster=cluster, profile=profile).seconds(wire)
