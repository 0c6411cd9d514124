"""Weights, gradients and optimizer states of the pipeline's two ends: bytes, and seconds to reduce and update them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from hp_tool.cost.arrays import Column, FloatArray, anywhere, maximum, where, zeros_like
from hp_tool.cost.candidates import ZBV, Candidates
from hp_tool.cost.collectives import group_ring, ring
from hp_tool.cost.end_parameters import end_adapters, end_expert_parameters, end_frozen, end_matrices, end_parameters
from hp_tool.cost.optimizer import BytesPerParameter, StageBytes, bytes_per_parameter, muon_seconds, offload_states, stage_bytes
from hp_tool.cost.parameters import cross_parameters, expert_parameters, layer_parameters, moe_shared_parameters
from hp_tool.cost.pipeline_stages import StageLayers
from hp_tool.cost.schedules.bubble import with_mirrored_stage
from hp_tool.cost.topology import dense_group, expert_group
from hp_tool.cost.zero import Sharding, sharding
from hp_tool.domain.efficiency import EfficiencyProfile
from hp_tool.domain.frameworks import facts
from hp_tool.domain.hardware import ClusterSpec
from hp_tool.domain.model import ModelSpec
from hp_tool.domain.workload import TrainingWorkload


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
    """Optimizer step on the device."""
    offload_s: Column = 0.0
    """Optimizer step on the host, with the copies there and back."""
    host_bytes: Column = 0.0

    @property
    def ends(self) -> tuple[dict[str, Column], dict[str, Column]]:
        """Bytes of the first and of the last stage by their names in MEMORY_PARTS."""
        return (
            {"weights": self.first_weights, "gradients": self.first_gradients, "optimizer": self.first_optimizer},
            {"weights": self.last_weights, "gradients": self.last_gradients, "optimizer": self.last_optimizer},
        )


def state_costs(
    *,
    model: ModelSpec,
    cluster: ClusterSpec,
    workload: TrainingWorkload,
    profile: EfficiencyProfile,
    candidates: Candidates,
    stages: StageLayers,
) -> StateCosts:
    """States under ZeRO: stage 1 shards the optimizer over the replicas, 2 gradients too, 3 weights too. Replicas are the
    d c ranks of a tensor and pipeline position; of a routed expert they are t d c / (e_p e_t).

    Reduction: all-reduce of gradients (ZeRO 0), or their reduce-scatter and the all-gather of weights; hybrid sharding
    does so in each shard group and all-reduces the gradients' shards over the replicas.
    Update: memory-bound; every state read and written on the own shard, gradients zeroed and their norm taken whole.
    """
    c, size = candidates, bytes_per_parameter(workload)
    machine: dict[str, Any] = {"cluster": cluster, "profile": profile}
    group: dict[str, Any] = machine | {
        "zero_stage": c.zero_stage,
        "all_reduced_below": 2 if workload.optimizer == "muon" else 1,
        "bucket_share": facts(workload.framework).bucket_bytes / size.gradients,
    }
    order = cluster.rank_order
    division = sharding(c, group=with_mirrored_stage(c, dense_group(c, "cp", "dp", order=order), order=order))
    ends = end_parameters(model, workload, c, stages=stages)
    matrices = end_matrices(model, c, stages=stages) if size.tells_matrices_apart else (0.0, 0.0)
    added = end_adapters(model, workload, c, stages=stages, routed=False)
    frozen = end_frozen(model, workload, c) if workload.frozen else (0.0, 0.0)
    costs = _group_costs(*_ends(ends, matrices, added, frozen, size), sharding=division, **group)
    expert_division = division
    if model.num_experts:
        expert_division = sharding(c, group=with_mirrored_stage(c, expert_group(c, "dp", order=order), order=order))
        ends = end_expert_parameters(model, c, stages=stages)
        added = end_adapters(model, workload, c, stages=stages, routed=True)
        experts = _group_costs(*_ends(ends, ends, added, (0.0, 0.0), size), sharding=expert_division, **group)
        costs = {name: value + experts[name] for name, value in costs.items()}
    if workload.optimizer == "muon":
        costs["update_s"] = costs["update_s"] + muon_seconds(
            model=model, candidates=c, division=division, expert_division=expert_division, matrices=matrices, **machine
        )
    if workload.offload == "optimizer":
        costs = offload_states(costs, workload=workload, gpu=cluster.gpu, size=size)
    gathered = (c.zero_stage >= 3) * (size.communicated_weights + size.matrix_communicated) * _layer_on_rank(model, c)
    return StateCosts(
        **costs,
        gathered_layer=gathered,
        tied_reduction_s=_tied_seconds(
            model, cluster, profile, candidates, 0.0 if workload.freezes_embedding else size.gradients
        ),
    )


def _ends(
    parameters: tuple[Column, Column],
    matrices: tuple[Column, Column],
    adapters: tuple[Column | None, Column | None],
    frozen: tuple[Column, Column],
    size: BytesPerParameter,
) -> tuple[StageBytes, StageBytes]:
    """The first and the last stage in bytes."""
    kinds = zip(parameters, matrices, adapters, frozen, strict=True)
    first, last = (
        stage_bytes(all_, matrices=some, adapters=added, frozen=still, size=size) for all_, some, added, still in kinds
    )
    return first, last


def _layer_on_rank(model: ModelSpec, candidates: Candidates) -> Column:
    """Parameters of one layer on one rank; of the larger kind where a model has both."""
    t = candidates.tensor_parallel_size
    if model.architecture == "encoder_decoder":
        return layer_parameters(model, tensor_parallel_size=t) + cross_parameters(model, tensor_parallel_size=t)
    if not model.num_experts:
        return layer_parameters(model, tensor_parallel_size=t)
    experts = expert_parameters(model) / (candidates.expert_parallel_size * candidates.expert_tensor_parallel_size)
    return moe_shared_parameters(model, tensor_parallel_size=t) + experts


def _group_costs(
    first: StageBytes,
    last: StageBytes,
    *,
    sharding: Sharding,
    cluster: ClusterSpec,
    profile: EfficiencyProfile,
    zero_stage: Column,
    all_reduced_below: int,
    bucket_share: float,
) -> dict[str, Column]:
    """The costs of parameters that the same ranks hold. Below that ZeRO stage gradients are all-reduced, from it on
    reduce-scattered. Replicas reduce in buckets of that share of the accumulated gradients' bytes.
    """
    shard = 1.0 / sharding.shards
    optimizer_share, gradient_share, weight_share = (where(zero_stage >= stage, shard, 1.0) for stage in (1, 2, 3))
    data = group_ring(group=sharding.shard_group, cluster=cluster, profile=profile)
    weights, gradients, optimizer, sent, sent_always = (
        maximum(getattr(first, name), getattr(last, name))
        for name in ("trained_weights", "gradients", "optimizer", "communicated_trained", "communicated_weights")
    )
    sent = where(zero_stage >= 3, sent_always, sent)
    traffic = (2.0 * optimizer + gradients + weights) * optimizer_share + 2.0 * gradients * gradient_share
    reached = profile.gpu.memory_fraction * cluster.gpu.memory_bandwidth_bytes_per_second
    held = gradient_share + bucket_share * (sharding.shards > 1) if bucket_share else gradient_share
    return {
        "first_weights": first.weights * weight_share,
        "first_gradients": first.gradients * held,
        "first_optimizer": first.optimizer * optimizer_share,
        "last_weights": last.weights * weight_share,
        "last_gradients": last.gradients * held,
        "last_optimizer": last.optimizer * optimizer_share,
        "reduce_s": data.seconds((1.0 - shard) * gradients * where(zero_stage >= all_reduced_below, 1.0, 2.0)),
        "replica_s": sharding.replica_seconds(gradients, cluster=cluster, profile=profile),
        "gather_s": data.seconds((1.0 - shard) * sent) * (zero_stage >= 1),
        "update_s": traffic * (profile.framework.optimizer_traffic_factor / reached),
    }


def _tied_seconds(
    model: ModelSpec, cluster: ClusterSpec, profile: EfficiencyProfile, candidates: Candidates, gradient_bytes: float
) -> FloatArray:
    """First and last stage all-reduce the shared embedding's gradient: V h / t parameters, a group of two."""
    c, p = candidates, candidates.pipeline_parallel_size
    apart = (p > 1) & (c.pipeline_schedule < ZBV) if model.tie_word_embeddings else False
    if not (gradient_bytes and anywhere(apart)):
        return zeros_like(p)
    (stages,) = dense_group(c, "pp", order=cluster.rank_order)
    far = stages.stride * maximum(p - 1, 1)
    wire = model.vocab_size * model.hidden_size * gradient_bytes / c.tensor_parallel_size * apart
    return ring(group_size=where(apart, 2, 1), stride=far, cluster=cluster, profile=profile).seconds(wire)
