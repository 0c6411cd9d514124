"""Weights, gradients and optimizer states of pipeline stages: their bytes, and the seconds to
reduce and update them.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass, replace

from hp_tool.cost.arrays import Bools, Floats, Ints, anywhere, maximum, minimum, where
from hp_tool.cost.candidates import ZBV, Candidates
from hp_tool.cost.case import TrainingCase
from hp_tool.cost.lora import layer_adapter_parameters
from hp_tool.cost.matrices import rank_matrices
from hp_tool.cost.matrix import entries
from hp_tool.cost.network import dense_group, expert_group, group_ring, tree_latency
from hp_tool.cost.optimizer import (
    STATE_BYTES,
    BytesPerParameter,
    StageBytes,
    bytes_per_parameter,
    gradient_precision,
    muon_seconds,
    offloaded_update,
    stage_bytes,
)
from hp_tool.cost.parameters import (
    attention_parameters,
    embedding_parameters,
    expert_parameters,
    final_norm_weights,
    layer_parameters,
    moe_shared_parameters,
    norm_weights,
    output_parameters,
    special_parameters,
)
from hp_tool.cost.pipeline_stages import Pipeline, StageLayers, pipeline_between
from hp_tool.cost.precision import weight_copies
from hp_tool.cost.schedules.bubble import with_mirrored_stage
from hp_tool.cost.shared import Shared
from hp_tool.cost.zero import Sharding, StateTimes, sharding, tied_gradient_seconds
from hp_tool.domain.frameworks import framework_facts
from hp_tool.domain.model import ModelSpec
from hp_tool.domain.workload import TrainingWorkload


@dataclass(frozen=True, slots=True, kw_only=True)
class StageStates:
    """Bytes of states on one rank of a stage; shape (n,)."""

    weights: Floats
    gradients: Floats
    optimizer: Floats
    state: Floats
    """Part of `optimizer`: the bytes of one optimizer state."""
    host: Floats = 0.0
    """Bytes of states in host memory."""

    def __add__(self, other: StageStates) -> StageStates:
        return StageStates(
            weights=self.weights + other.weights,
            gradients=self.gradients + other.gradients,
            optimizer=self.optimizer + other.optimizer,
            state=self.state + other.state,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class StateCosts:
    """Bytes and seconds of the states of a pipeline."""

    stages: tuple[StageStates, ...]
    """States of each stage, in the order of Pipeline.stages."""
    gathered_layer: Floats
    """Bytes of one layer's gathered weights under ZeRO 3, plus its unreduced gradient if the
    gradient has a separate buffer. 0 if weights are not sharded.
    """
    gathered_end: Floats
    """Bytes of an embedding or output layer whose weights stay gathered under ZeRO 3."""
    times: StateTimes


def state_costs(
    *, case: TrainingCase, candidates: Candidates, pipeline: Pipeline, micro_batches: Floats
) -> StateCosts:
    """Return the bytes of the states under ZeRO, and the seconds to reduce and update them.

    ZeRO 1 shards the optimizer states over the replicas, ZeRO 2 also the gradients, ZeRO 3 also the
    weights. Replicas are the d c ranks with the same tensor and pipeline position. A routed expert
    has t d c / (e_p e_t) replicas.

    Reduction: an all-reduce of the gradients (ZeRO 0), or their reduce-scatter and the all-gather
    of weights. Hybrid sharding does this in each shard group and all-reduces the gradient shards
    over the replicas. With interleaving, ZeRO 2 accumulates gradients over a run of micro-batches.
    Each rank then stores the unsharded gradients of one of v chunks, or of two if another run
    follows. The update is limited by memory bandwidth. Each rank reads and writes every state of
    its shard, sets all gradients to zero and computes their norm.
    """
    model, workload, cluster = case.model, case.workload, case.cluster
    c, copies = candidates, weight_copies(workload, gpu=cluster.gpu)
    size = bytes_per_parameter(workload, weight_copies=copies)
    division = sharding(
        c,
        group=with_mirrored_stage(c, dense_group(c, "cp", "dp", cluster=cluster), cluster=cluster),
    )
    by_run = workload.gradient_reduction == "run"
    run, unsharded = _accumulation_runs(c, micro_batches) if by_run else (1, 0.0)
    added = _accumulation_traffic(workload, micro_batches, run) if by_run else 0.0
    pieces = (
        1.0 + (c.zero_stage >= 2) * pipeline.critical.count
    )  # layers, embedding and output layer
    stages, times = _divide_states(
        _shared_bytes(case, c, pipeline, size),
        case=case,
        candidates=c,
        pipeline=pipeline,
        size=size,
        sharding=division,
        pieces=pieces,
        unsharded=unsharded,
        added=added,
    )
    expert_division = division
    if model.num_experts:
        expert_division = sharding(
            c, group=with_mirrored_stage(c, expert_group(c, "dp", cluster=cluster), cluster=cluster)
        )
        expert_stages, expert_times = _divide_states(
            _expert_bytes(case, c, pipeline, size),
            case=case,
            candidates=c,
            pipeline=pipeline,
            size=size,
            sharding=expert_division,
            pieces=pieces,
            unsharded=unsharded,
            added=added,
        )
        stages = [shared + routed for shared, routed in zip(stages, expert_stages, strict=True)]
        times = times + expert_times
    if workload.optimizer == "muon":
        muon = muon_seconds(
            case=case,
            candidates=c,
            division=division,
            expert_division=expert_division,
            stages=_largest_stages(pipeline),
            matrices=_largest_over_stages(stage_matrices(case, c, pipeline), pipeline, c),
        )
        times = replace(times, update_s=times.update_s + muon)
    if workload.offload == "optimizer":
        stages, times = _with_offload(
            stages, times, case=case, candidates=c, pipeline=pipeline, size=size
        )
    return StateCosts(
        stages=tuple(stages),
        gathered_layer=_gathered_bytes(model, c, size, workload),
        gathered_end=_gathered_end_bytes(model, c, size, workload),
        times=replace(
            times,
            run=run,
            tied_reduction_s=tied_gradient_seconds(
                case, c, 0.0 if workload.freezes_embedding else size.gradients
            ),
        ),
    )


def _accumulation_runs(c: Candidates, micro_batches: Floats) -> tuple[Ints, Floats]:
    """Return (number of micro-batches that ZeRO 2 accumulates before it reduces, fraction of the
    gradients stored unsharded).

    Interleaving runs p micro-batches through one chunk in sequence and accumulates their gradients.
    """
    chunks = c.virtual_pipeline_parallel_size
    run = where(chunks > 1, c.pipeline_parallel_size, 1)
    return run, (c.zero_stage == 2) * (chunks > 1) * minimum(micro_batches / run, 2) / chunks


def _accumulation_traffic(workload: TrainingWorkload, micro_batches: Floats, run: Ints) -> Floats:
    """Return the bytes moved per step to accumulate gradients over runs of micro-batches, per
    gradient byte.

    If matmuls write 16-bit gradients, separate kernels accumulate them. The first micro-batch of a
    run reads 2 bytes per parameter and writes 4; each further one reads 2 + 4 and writes 4. So m
    micro-batches in runs of r move m (10 - 4 / r) bytes. Matmuls that add directly to the fp32
    buffer (Megatron Core's) move no additional bytes.

    Source: pytorch/pytorch, torch/distributed/fsdp/_fully_shard/_fsdp_param.py
    (to_accumulated_grad_if_needed, accumulate_unsharded_grad_if_needed).
    """
    framework = framework_facts(workload.framework)
    width = STATE_BYTES[gradient_precision(workload)]
    if framework.accumulates_in_fp32 or width < STATE_BYTES["fp32"]:
        return 0.0
    return micro_batches * (10.0 - 4.0 / run) / width


# Parameters on one rank of a stage.


def stage_parameters(
    case: TrainingCase, candidates: Candidates, pipeline: Pipeline
) -> list[Floats]:
    """Return the parameters, excluding routed experts, on one rank of each representative stage.

    Tied weights are stored with the embedding and with the output layer if these are on different
    stages (Megatron Core), otherwise once.
    """
    model = case.model
    t, p = candidates.tensor_parallel_size, candidates.pipeline_parallel_size

    def of(kind: ModelSpec) -> Floats:
        if candidates.is_alone:
            return _weights.get((kind,), (t,), lambda: _layer_weights(kind, t))
        return _layer_weights(kind, t)

    each = [of(kind) for _, kind in model.kinds]
    layers = [stage.layer_sum(each) for stage in pipeline.stages]
    embedding = embedding_parameters(
        model, sequence_length=case.workload.sequence_length, tensor_parallel_size=t
    )
    own_output = (
        ((p > 1) & (candidates.pipeline_schedule < ZBV)) if model.tie_word_embeddings else 1.0
    )
    head = output_parameters(model, tensor_parallel_size=t) * own_output + final_norm_weights(model)
    if model.architecture != "decoder" or model.has_output_bias:
        head = head + special_parameters(model, tensor_parallel_size=t)
    # Each multi-token-prediction layer also has a projection from 2h to h and two norms.
    extra = (
        2.0 * (model.hidden_size**2 + norm_weights(model))
        if model.num_nextn_predict_layers
        else 0.0
    )
    return [
        weights
        + stage.embedding_copies * embedding
        + (stage.output * head + stage.extra_layers * extra)
        for weights, stage in zip(layers, pipeline.stages, strict=True)
    ]


_weights: Shared[Floats] = Shared()


def _layer_weights(kind: ModelSpec, t: Ints) -> Floats:
    of_layer = moe_shared_parameters if kind.num_experts else layer_parameters
    return of_layer(kind, tensor_parallel_size=t)


def stage_matrices(case: TrainingCase, candidates: Candidates, pipeline: Pipeline) -> list[Floats]:
    """Return the entries of the layers' weight matrices, excluding routed experts, on one rank of
    each stage.
    """
    model = case.model

    each = [
        entries(matrix for matrix in rank_matrices(kind, candidates) if not matrix.routed)
        for _, kind in model.kinds
    ]
    layers = [stage.layer_sum(each) for stage in pipeline.stages]
    return [
        weights + stage.extra_layers * 2.0 * model.hidden_size**2
        for weights, stage in zip(layers, pipeline.stages, strict=True)
    ]


def _shared_bytes(
    case: TrainingCase, candidates: Candidates, pipeline: Pipeline, size: BytesPerParameter
) -> list[StageBytes]:
    nothing: list[Floats] = [0.0] * len(pipeline.stages)
    columns = zip(
        stage_parameters(case, candidates, pipeline),
        stage_matrices(case, candidates, pipeline) if size.tells_matrices_apart else nothing,
        _adapters(case, candidates, pipeline, routed=False),
        _frozen_parameters(case, candidates, pipeline) if case.workload.frozen else nothing,
        strict=True,
    )
    return [
        stage_bytes(parameters, matrices=matrices, adapters=adapters, frozen=frozen, size=size)
        for parameters, matrices, adapters, frozen in columns
    ]


def _expert_bytes(
    case: TrainingCase, candidates: Candidates, pipeline: Pipeline, size: BytesPerParameter
) -> list[StageBytes]:
    ranks = candidates.expert_parallel_size * candidates.expert_tensor_parallel_size
    experts = max(
        expert_parameters(kind) for _, kind in case.model.kinds
    )  # all MoE layers are identical
    adapters = _adapters(case, candidates, pipeline, routed=True)
    sizes = []
    for stage, added in zip(pipeline.stages, adapters, strict=True):
        stored_layers = [layers for layers in (stage.layers, stage.mirrored) if layers is not None]
        routed: Floats = sum(
            layers.count * layers.expert_share * experts / ranks for layers in stored_layers
        )
        sizes.append(stage_bytes(routed, matrices=routed, adapters=added, size=size))
    return sizes


def _adapters(
    case: TrainingCase, candidates: Candidates, pipeline: Pipeline, *, routed: bool
) -> Sequence[Floats | None]:
    """Return the LoRA adapter parameters on one rank of each stage: those of routed experts if
    `routed`, else those of all other matrices.
    """
    model, lora = case.model, case.workload.lora
    if lora is None:
        return [None] * len(pipeline.stages)
    each = [
        layer_adapter_parameters(kind, lora, candidates, routed=routed) for _, kind in model.kinds
    ]
    return [stage.layer_sum(each) for stage in pipeline.stages]


def _frozen_parameters(
    case: TrainingCase, candidates: Candidates, pipeline: Pipeline
) -> list[Floats]:
    """Return the number of parameters of each stage that `workload.frozen` freezes.

    Frozen parameters are supported only in plain pipelines (`training.rules` rejects others).
    """
    model, workload, t = case.model, case.workload, candidates.tensor_parallel_size
    embedding: Floats = 0.0
    output: Floats = 0.0
    if "embedding" in workload.frozen:
        embedding = embedding_parameters(
            model, sequence_length=workload.sequence_length, tensor_parallel_size=t
        )
    if "output_layer" in workload.frozen:
        separate_output = (
            (candidates.pipeline_parallel_size > 1) if model.tie_word_embeddings else 1.0
        )
        output = output_parameters(model, tensor_parallel_size=t) * separate_output
    return [stage.embedding * embedding + stage.output * output for stage in pipeline.stages]


def _gathered_end_bytes(
    model: ModelSpec, c: Candidates, size: BytesPerParameter, workload: TrainingWorkload
) -> Floats:
    """Return the bytes of V h / t weights as ZeRO 3 gathers them. 0 if the framework frees the
    gathered embedding and output layer.

    If they are tied, each counts half.
    """
    if not framework_facts(workload.framework).gathers_ends:
        return 0.0
    each = size.communicated_weights * (0.5 if model.tie_word_embeddings else 1.0)
    sharded = (c.zero_stage >= 3) & (c.data_parallel_size > 1)
    return sharded * each * model.vocab_size * model.hidden_size / c.tensor_parallel_size


def _gathered_bytes(
    model: ModelSpec, candidates: Candidates, size: BytesPerParameter, workload: TrainingWorkload
) -> Floats:
    """Return the bytes of one layer's weights on one rank as ZeRO 3 gathers them; 0 below ZeRO 3.

    Includes the layer's unsharded gradient if torch's autograd writes it to a buffer separate from
    the shards.
    """
    sharded = candidates.zero_stage >= 3
    if not anywhere(sharded):
        return 0.0
    each = (
        size.communicated_weights + size.matrix_communicated
        if size.frozen_matrices is None
        else size.frozen_matrices
    )
    if framework_facts(workload.framework).pure_states and workload.lora is None:
        each = each + size.communicated_weights
    largest: Floats = functools.reduce(
        maximum, [layer_on_rank(kind, candidates) for _, kind in model.kinds]
    )
    return sharded * each * largest


def layer_on_rank(model: ModelSpec, candidates: Candidates) -> Floats:
    """Return the parameter count of one layer on one rank. If the model has MoE layers, this is the
    count for an MoE layer.
    """
    t = candidates.tensor_parallel_size
    if model.architecture == "encoder_decoder":
        return layer_parameters(model, tensor_parallel_size=t) + attention_parameters(
            model, tensor_parallel_size=t
        )
    if not model.num_experts:
        return layer_parameters(model, tensor_parallel_size=t)
    experts = expert_parameters(model) / (
        candidates.expert_parallel_size * candidates.expert_tensor_parallel_size
    )
    return moe_shared_parameters(model, tensor_parallel_size=t) + experts


# Sharding of states over the ranks with the same parameters, and the time of one step.


def _divide_states(
    stages: Sequence[StageBytes],
    *,
    case: TrainingCase,
    candidates: Candidates,
    pipeline: Pipeline,
    size: BytesPerParameter,
    sharding: Sharding,
    pieces: Floats,
    unsharded: Floats,
    added: Floats,
) -> tuple[list[StageStates], StateTimes]:
    """Return the states of each stage and the seconds of one step, for parameters whose states are
    split across a group of ranks.

    Gradients are all-reduced; from ZeRO 1 on (with Muon: ZeRO 2) they are reduce-scattered.
    Replicas reduce gradients in buckets, whose size is a fraction of the accumulated gradients.
    Each bucket is a separate collective: reduce-scatters and all-gathers use a ring, all-reduces
    use trees.

    Args:
        pieces: Number of collectives.
        unsharded: Fraction of the gradients that every rank also stores unsharded.
        added: Bytes per gradient byte that separate accumulation kernels move in a step.
    """
    profile, zero_stage = case.profile, candidates.zero_stage
    all_reduced_below = 2 if case.workload.optimizer == "muon" else 1
    framework = framework_facts(case.workload.framework)
    bucket_share = framework.bucket_bytes / size.gradients
    ranks = sharding.shards
    shard = 1.0 / ranks
    optimizer_share, gradient_share, weight_share = (
        where(zero_stage >= stage, shard, 1.0) for stage in (1, 2, 3)
    )
    stored_share = gradient_share + (bucket_share + unsharded) * (ranks > 1)
    gathered: Bools = False
    if framework.wide_weights:  # shards have a higher precision than gathered weights
        gathered = (zero_stage == 2) & (ranks > 1)
        weight_share = where(gathered, shard, weight_share)
    states = [
        StageStates(
            weights=stage.weights * weight_share + gathered * stage.communicated_weights,
            gradients=stage.gradients * stored_share,
            optimizer=stage.optimizer * optimizer_share,
            state=stage.optimizer * optimizer_share * (size.state / size.optimizer),
        )
        for stage in stages
    ]
    weights, gradients, optimizer, sent, sent_always = (
        _largest_over_stages([getattr(stage, name) for stage in stages], pipeline, candidates)
        for name in (
            "trained_weights",
            "gradients",
            "optimizer",
            "communicated_trained",
            "communicated_weights",
        )
    )
    data = group_ring(machine=case, group=sharding.shard_group)
    reduced = replace(
        data,
        latency_s=where(
            zero_stage >= all_reduced_below,
            data.latency_s,
            tree_latency(data, group=sharding.shard_group, machine=case),
        ),
    )
    hides = profile.framework.data_parallel_overlap > 0.0
    if framework.bucket_parameters and (hides or framework.buckets_without_overlap):
        bucket = maximum(
            framework.bucket_parameters,
            framework.bucket_parameters_per_rank * sharding.group.size,
        )
        buckets = maximum(gradients / size.gradients / bucket, 1.0)
        pieces = where(zero_stage >= 2, pieces, maximum(pieces, buckets))
    sent = where(zero_stage >= 3, sent_always, sent)
    traffic = (
        2.0 * optimizer + gradients + weights
    ) * optimizer_share + 2.0 * gradients * gradient_share
    reached = profile.gpu.memory_fraction * case.cluster.gpu.memory_bandwidth_bytes_per_second
    times = StateTimes(
        reduce_s=reduced.seconds(
            (1.0 - shard) * gradients * where(zero_stage >= all_reduced_below, 1.0, 2.0),
            pieces=pieces,
        ),
        replica_s=sharding.replica_seconds(gradients, machine=case),
        gather_s=data.seconds((1.0 - shard) * sent, pieces=pieces) * (zero_stage >= 1),
        update_s=traffic * (profile.framework.optimizer_traffic_factor / reached)
        + added * gradients / reached,
    )
    if not framework.broadcasts_weights:
        return states, times
    everyone, below = group_ring(machine=case, group=sharding.group), zero_stage < 2
    broadcast = replace(
        data,
        ramp_bytes=where(data.in_domain, data.ramp_bytes, profile.framework.broadcast_ramp_bytes),
    )
    all_reduce = everyone.seconds((2.0 - 2.0 / sharding.group.size) * gradients)
    return states, replace(
        times,
        reduce_s=where(below, all_reduce, times.reduce_s),
        replica_s=where(below, 0.0, times.replica_s),
        gather_s=where(below, 0.0, times.gather_s),
        broadcast_s=where(below, broadcast.seconds((1.0 - shard) * sent, pieces=1.0 * ranks), 0.0),
    )


def _largest_over_stages(
    columns: Sequence[Floats], pipeline: Pipeline, candidates: Candidates
) -> Floats:
    """Return the maximum of a quantity over the stages.

    The first and the last stage are compared. With several kinds of layers, the stages between them
    are compared, too.
    """
    ends = len(pipeline.ends)
    largest = functools.reduce(maximum, columns[:ends])
    if pipeline.work and len(columns) > ends:
        between = pipeline_between(candidates)
        largest = functools.reduce(
            maximum, (where(between, column, 0.0) for column in columns[ends:]), largest
        )
    return largest


def _largest_stages(pipeline: Pipeline) -> list[StageLayers]:
    """Return the stages that may have the maximum number of layers of a kind."""
    if pipeline.work:
        return [stage.layers for stage in pipeline.stages]
    count = functools.reduce(
        maximum, [end.layers.count for end in pipeline.ends], pipeline.critical.count
    )
    return [replace(pipeline.critical, count=count, kinds=(count,))]


def _with_offload(
    stages: Sequence[StageStates],
    times: StateTimes,
    *,
    case: TrainingCase,
    candidates: Candidates,
    pipeline: Pipeline,
    size: BytesPerParameter,
) -> tuple[list[StageStates], StateTimes]:
    """Return the states if a fraction f of the optimizer is on the host (see
    `optimizer.offloaded_update`).
    """
    share = case.workload.offloaded_share
    moved = [share * (stage.optimizer / size.optimizer) for stage in stages]
    update = offloaded_update(
        _largest_over_stages(moved, pipeline, candidates),
        workload=case.workload,
        gpu=case.cluster.gpu,
        size=size,
    )
    kept = [
        replace(
            stage,
            optimizer=(1.0 - share) * stage.optimizer,
            state=(1.0 - share) * stage.state,
            host=parameters * update.host_bytes_per_parameter,
        )
        for stage, parameters in zip(stages, moved, strict=True)
    ]
    on_device = maximum((1.0 - share) * times.update_s - update.update_s, 0.0)
    return kept, replace(times, update_s=on_device, offload_s=update.update_s + update.copy_s)
