"""ZeRO and data parallelism: sharding of parameters, gradients and optimizer states, and the
communication it requires.
"""

from __future__ import annotations

from dataclasses import dataclass

from hp_tool.cost.arrays import Floats, Ints, anywhere, maximum, minimum, where
from hp_tool.cost.candidates import ZBV, Candidates
from hp_tool.cost.case import Machine, TrainingCase
from hp_tool.cost.network import Axis, Group, dense_group, group_ring, split
from hp_tool.domain.efficiency import EfficiencyProfile


@dataclass(frozen=True, slots=True, kw_only=True)
class Sharding:
    """How ranks with the same parameters shard their states.

    The states are sharded over the ranks of `shard_group`, and replicated by all groups along
    `replica_group`. In hybrid sharding (HSDP), the shard groups are the inner dimension and their
    replicas the outer one, as in FSDP2's two-dimensional mesh and Megatron's
    num_distributed_optimizer_instances.
    """

    group: Group
    """All ranks with the same parameters."""
    shard_group: Group
    replica_group: Group | None = None
    """Ranks that replicate the same shard; None without hybrid sharding."""

    @property
    def shards(self) -> Ints:
        return self.shard_group.size

    def replica_seconds(self, gradient_bytes: Floats, *, machine: Machine) -> Floats:
        """Return the seconds to all-reduce a rank's shard of `gradient_bytes` over the replicas.

        Each rank sends 2 G / N (r - 1) / r bytes.
        """
        if self.replica_group is None:
            return 0.0
        replicas = self.replica_group.size
        group = group_ring(machine=machine, group=self.replica_group)
        return group.seconds(2.0 * gradient_bytes / self.shards * (1.0 - 1.0 / replicas))


def sharding(candidates: Candidates, *, group: Group) -> Sharding:
    """Return how the ranks of `group`, which have the same parameters, shard their states.

    Either all ranks form one shard group, or, with data_parallel_shard_size S, there are d / S
    shard groups. Each of these has S c ranks, because context-parallel ranks have the same
    parameters too.
    """
    size = candidates.data_parallel_shard_size
    if not anywhere(size > 0):
        return Sharding(group=group, shard_group=group)
    replicas = where(size > 0, candidates.data_parallel_size // maximum(size, 1), 1)
    shard_group, replica_group = split(group, replicas)
    return Sharding(group=group, shard_group=shard_group, replica_group=replica_group)


@dataclass(frozen=True, slots=True, kw_only=True)
class StateTimes:
    """Seconds per step for the states of the first or last stage, whichever has more; shape
    (n,).
    """

    reduce_s: Floats
    """One reduction of the gradients over the shard group, before overlap."""
    replica_s: Floats
    """All-reduce of the sharded gradients over the replicas of hybrid sharding, once per step; 0
    without hybrid sharding.
    """
    gather_s: Floats
    """One all-gather of the weights, before overlap."""
    broadcast_s: Floats = 0.0
    """Broadcasts of the updated weights, without overlap, in frameworks that broadcast weights
    instead of gathering them.
    """
    update_s: Floats
    """Optimizer step on the device."""
    offload_s: Floats = 0.0
    """Optimizer step on the host, including copies."""
    run: Ints | int = 1
    """Number of micro-batches whose gradients ZeRO 2 accumulates before it reduces them."""
    tied_reduction_s: Floats = 0.0
    """All-reduce of a tied embedding's gradient between the first and the last stage."""

    def __add__(self, other: StateTimes) -> StateTimes:
        return StateTimes(
            reduce_s=self.reduce_s + other.reduce_s,
            replica_s=self.replica_s + other.replica_s,
            gather_s=self.gather_s + other.gather_s,
            broadcast_s=self.broadcast_s + other.broadcast_s,
            update_s=self.update_s + other.update_s,
        )


# Exposed communication of gradients and weights: the part that compute does not hide.


def data_parallel_seconds(
    *,
    profile: EfficiencyProfile,
    candidates: Candidates,
    states: StateTimes,
    micro_batches: Floats,
    forward: Floats,
    stage: Floats,
    layers: Floats,
) -> Floats:
    """Return the exposed seconds of gradient and weight communication in one step.

    ZeRO 0 and 1 reduce gradients once, after the last micro-batch, and gather weights once. Both
    overlap with one micro-batch on the stage, including its exposed communication, which uses other
    links. Each of v interleaved chunks runs p micro-batches in a row before the next chunk starts.
    The communication of one chunk overlaps with the p micro-batches of the next (Megatron Core's
    schedules.py, grad_sync_func and param_sync_func). The communication of the last chunk in a
    pass, 1/v of the total, has no overlap. ZeRO 2 reduces gradients after every micro-batch's
    backward pass and overlaps the gather of weights with one forward pass. If it accumulates a
    `run` of p micro-batches (`StateTimes.run`), it communicates after each run like ZeRO 1. ZeRO 3
    gathers weights for every forward and backward pass. In hybrid sharding, replicas all-reduce
    once, in the last micro-batch. This overlaps with the part of the stage's compute that the
    reduction over the shard group does not use.
    """
    overlap = profile.framework.data_parallel_overlap
    once = states.reduce_s + states.gather_s
    zero = candidates.zero_stage
    replicated = profile.framework.all_reduce_overlap
    alone = (zero == 0) & (candidates.pipeline_parallel_size == 1)
    share: Floats = overlap if replicated is None else where(alone, replicated, overlap)
    chunks = candidates.virtual_pipeline_parallel_size
    interleaved = chunks > 1
    behind = stage * (1.0 + interleaved * (candidates.pipeline_parallel_size - 1.0))
    total = exposed_seconds(once, behind=behind, overlap=share * (1.0 - interleaved / chunks))
    if anywhere(zero >= 2):
        reduce, gather, backward = states.reduce_s, states.gather_s, stage - forward
        each = fully_sharded_seconds(
            gather=gather,
            reduce=reduce,
            forward=forward,
            backward=backward,
            layers=layers,
            overlap=overlap,
        )
        gradients = micro_batches * exposed_seconds(reduce, behind=backward, overlap=overlap)
        weights = exposed_seconds(gather, behind=forward, overlap=overlap)
        second = gradients + weights
        if anywhere(states.run > 1):
            by_run = total + (micro_batches / states.run - 1.0) * exposed_seconds(
                reduce, behind=behind, overlap=overlap
            )
            second = where(states.run > 1, by_run, second)
        total = where(zero >= 3, micro_batches * each, where(zero == 2, second, total))
        once = where(zero >= 3, 2.0 * gather + reduce, once)
    if anywhere(states.replica_s > 0.0):
        total = total + exposed_seconds(
            states.replica_s, behind=maximum(stage - once, 0.0), overlap=overlap
        )
    return total + states.broadcast_s + states.tied_reduction_s


def fully_sharded_seconds(
    *,
    gather: Floats,
    reduce: Floats,
    forward: Floats,
    backward: Floats,
    layers: Floats,
    overlap: float,
) -> Floats:
    """Return the exposed seconds of ZeRO 3 communication in one micro-batch (arXiv 2304.11277
    section 3.3).

    Weights are gathered for both passes; gradients are reduced during the backward pass. Each
    layer's gather overlaps with the previous layer. The first gather of a pass and the last
    reduction do not overlap, so at most the fraction (L - 1) / L of the L layers' communication is
    hidden.
    """
    hidden = overlap * maximum(1.0 - 1.0 / layers, 0.0)
    return exposed_seconds(gather, behind=forward, overlap=hidden) + exposed_seconds(
        gather + reduce, behind=backward, overlap=hidden
    )


def exposed_seconds(seconds: Floats, *, behind: Floats, overlap: Floats) -> Floats:
    """Return the exposed seconds of communication that takes `seconds` and overlaps with `behind`
    seconds of compute.

    Compute hides the fraction `overlap` of the time during which both run.
    """
    return seconds - overlap * minimum(seconds, behind)


def tied_gradient_seconds(
    case: TrainingCase, candidates: Candidates, gradient_bytes: float
) -> Floats:
    """Return the time of the all-reduce of a tied embedding's gradient between first and last
    stage, in seconds.

    The message has V h / t parameters. The group has two ranks, which share an NVLink domain only
    if the complete pipeline is in one domain.
    """
    model = case.model
    c, p = candidates, candidates.pipeline_parallel_size
    on_two_stages = (p > 1) & (c.pipeline_schedule < ZBV) if model.tie_word_embeddings else False
    if not (gradient_bytes and anywhere(on_two_stages)):
        return 0.0 * p
    group = dense_group(c, "pp", cluster=case.cluster)
    (stages,) = group.axes
    in_one_domain = group.domain.size % (stages.size * stages.stride) == 0
    distance = where(in_one_domain, 1, maximum(stages.stride * (p - 1), group.domain.size))
    pair = Group((Axis(1 + on_two_stages, distance),), group.domain)
    wire = (
        model.vocab_size
        * model.hidden_size
        * gradient_bytes
        / c.tensor_parallel_size
        * on_two_stages
    )
    return group_ring(machine=case, group=pair).seconds(wire)
