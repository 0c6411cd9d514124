"""Step time: the critical stage, the bubble, transfers between stages, and what data parallelism and the optimizer add."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

from hp_tool.cost import attention, mlp, moe
from hp_tool.cost.arrays import Floats, Ints, maximum, minimum, where
from hp_tool.cost.block import Kernels, LayerTime
from hp_tool.cost.candidates import Candidates
from hp_tool.cost.case import TrainingCase
from hp_tool.cost.embedding_and_head import HeadTime
from hp_tool.cost.lora import added_launches
from hp_tool.cost.network import dense_group, send_seconds
from hp_tool.cost.optimizer import activation_seconds
from hp_tool.cost.pipeline_stages import Pipeline
from hp_tool.cost.recomputation import recomputed_layer_fraction, recomputed_seconds
from hp_tool.cost.schedules.bubble import share_of_ends, split_bubble_share
from hp_tool.cost.zero import StateTimes, data_parallel_seconds
from hp_tool.domain.efficiency import FrameworkEfficiency
from hp_tool.domain.model import ModelSpec
from hp_tool.domain.workload import TrainingWorkload


def micro_batches(candidates: Candidates, *, workload: TrainingWorkload) -> Floats:
    """m = B / (d b): micro-batches that each replica runs in one step; fractional if illegal."""
    return workload.global_batch_size / (candidates.data_parallel_size * candidates.micro_batch_size)


def transfer_seconds(*, case: TrainingCase, candidates: Candidates) -> Floats:
    """Seconds to send one micro-batch's activations to the next stage: each tensor-parallel rank sends its share, e T h / t.

    This is Megatron's scatter-gather (arXiv 2104.04473 section 4.1); with SP activations are already sharded. If one NVLink
    domain does not hold all stages, some neighbours are in different domains, and the slowest decide.
    """
    cluster, workload = case.cluster, case.workload
    c = candidates
    t = c.tensor_parallel_size
    tokens = workload.sequence_length * c.micro_batch_size / c.context_parallel_size
    message = tokens * case.model.hidden_size * workload.activation_element_bytes / t
    group = dense_group(c, "pp", cluster=cluster)
    (stages,) = group.axes
    crosses = stages.size * stages.stride > group.domain.size
    seconds = send_seconds(message, machine=case, distance=stages.stride, crosses=crosses)
    return (stages.size > 1) * seconds


# Exposed seconds by part.


TIME_PARTS = (
    "compute",
    "attention",
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
    case: TrainingCase,
    candidates: Candidates,
    layer: LayerTime,
    pipeline: Pipeline,
    head: HeadTime,
    states: StateTimes,
    micro_batches: Floats,
    offloaded: Floats = 0.0,
) -> dict[str, Floats]:
    """Exposed seconds of a step by TIME_PARTS: the slowest stage runs m micro-batches, then waits for the others to fill and
    drain.

    `layer` is the mean layer of that stage; `offloaded` the bytes that a micro-batch on it sends to the host. Transfers between
    stages count twice: once for each micro-batch, as far as they are not hidden, and for the first one both ways.
    """
    profile = case.profile
    c, m, framework = candidates, micro_batches, profile.framework
    p = c.pipeline_parallel_size
    stage = stage_time(case=case, candidates=c, layer=layer, pipeline=pipeline)
    ends = ends_time(model=case.model, candidates=c, head=head, stage=stage, pipeline=pipeline)
    bubble = bubble_seconds(candidates=c, layer=layer, stage=stage, ends=ends, pipeline=pipeline)
    transfer = transfer_seconds(case=case, candidates=c)
    stalled, stalled_once = message_stalls(case=case, candidates=c)
    nothing = 0.0 * p
    overhead = nothing + framework.step_overhead_s
    if framework.host_launch_s:
        overhead = overhead + m * stage.host_waits
    parts = {
        "compute": m * (stage.compute + ends.critical - ends.communication),
        "attention": m * stage.attention,
        "recompute": m * stage.recompute,
        "tensor_parallel": m * (stage.tensor + ends.communication),
        "context_parallel": m * stage.context + nothing,
        "expert_parallel": m * stage.expert + nothing,
        "pipeline_bubble": bubble + 2.0 * (p - 1.0) * transfer + stalled_once,
        "pipeline_p2p": (2.0 * (1.0 - framework.pipeline_overlap)) * m * c.virtual_pipeline_parallel_size * transfer
        + m * stalled,
        "data_parallel": data_parallel_seconds(
            profile=profile,
            candidates=c,
            states=states,
            micro_batches=m,
            forward=stage.occupied_forward,
            stage=stage.occupied,
            layers=pipeline.critical.count,
        ),
        "optimizer": states.update_s,
        "offload": nothing + _offload_seconds(case, states=states, stage=stage, offloaded=offloaded, micro_batches=m),
        "overhead": overhead,
    }
    return parts if profile.release_factor == 1.0 else {name: profile.release_factor * part for name, part in parts.items()}


def _offload_seconds(
    case: TrainingCase, *, states: StateTimes, stage: StageTime, offloaded: Floats, micro_batches: Floats
) -> Floats:
    """Exposed seconds per step of the host's update, or of copying activations both ways."""
    workload = case.workload
    if workload.offload == "optimizer":
        return states.offload_s
    if workload.offload == "activations":
        forward, backward = stage.occupied_forward, stage.occupied - stage.occupied_forward
        return micro_batches * activation_seconds(offloaded, forward=forward, backward=backward, gpu=case.cluster.gpu)
    return 0.0


# The critical stage: one micro-batch through the layers and the model's ends on the slowest stage.


@dataclass(frozen=True, slots=True, kw_only=True)
class StageTime:
    """Seconds of one micro-batch through the layers of the critical stage; shape (n,)."""

    compute: Floats
    """Without attention cores."""
    attention: Floats
    recompute: Floats
    tensor: Floats
    context: Floats
    expert: Floats
    forward: Floats
    """The forward pass's share of these six."""
    total: Floats
    """The sum of the six."""
    host_waits: Floats
    """Seconds that the device additionally waits for its host, in both passes."""
    occupied_forward: Floats
    """`forward` with its waits."""
    occupied: Floats
    """`total` with its waits: how long the stage is busy."""
    occupied_layer: Floats
    """One layer's share of `occupied`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EndsTime:
    """Seconds of one micro-batch in embedding and output layer; shape (n,)."""

    both: Floats
    critical: Floats
    """Seconds that they add to the critical stage."""
    communication: Floats
    """Part of `critical`: the output layer's tensor-parallel collectives."""


def stage_time(*, case: TrainingCase, candidates: Candidates, layer: LayerTime, pipeline: Pipeline) -> StageTime:
    """Seconds of the critical stage's layers, each the mean `layer`."""
    layers = pipeline.critical.count
    forward_layer = layer.forward + layer.tensor + layer.context + layer.expert
    whole = recomputed_layer_fraction(candidates, layers_per_chunk=layers / candidates.virtual_pipeline_parallel_size)
    attention = layers * (layer.attention + layer.attention_backward)
    compute = layers * (layer.forward + layer.backward) - attention
    recompute = layers * recomputed_seconds(candidates, layer=layer, forward=forward_layer, whole=whole)
    tensor = layers * (layer.tensor + layer.tensor_backward)
    context = layers * (layer.context + layer.context_backward)
    expert = layers * (layer.expert + layer.expert_backward)
    total = compute + attention + recompute + tensor + context + expert
    forward = layers * forward_layer
    waits: Floats = 0.0
    occupied, occupied_forward = total, forward
    if case.profile.framework.host_launch_s:
        # A pass takes at least as long as its host; communication continues meanwhile.
        in_forward, in_backward = host_waits(
            case=case,
            candidates=candidates,
            layers=layers,
            moe_fraction=pipeline.critical.expert_share,
            recomputed_fraction=whole,
            forward_s=forward,
            backward_s=total - forward,
        )
        waits = in_forward + in_backward
        occupied, occupied_forward = total + waits, forward + in_forward
    return StageTime(
        compute=compute,
        attention=attention,
        recompute=recompute,
        tensor=tensor,
        context=context,
        expert=expert,
        forward=forward,
        total=total,
        host_waits=waits,
        occupied_forward=occupied_forward,
        occupied=occupied,
        occupied_layer=occupied / layers,
    )


def ends_time(*, model: ModelSpec, candidates: Candidates, head: HeadTime, stage: StageTime, pipeline: Pipeline) -> EndsTime:
    """Seconds that embedding and output layer add to the first and last stage.

    The longer end is critical, as far as it exceeds the layers that an uneven end leaves out; in a folded pipeline the rank
    with both ends is, as far as it exceeds what both leave out. Multi-token prediction: each depth is one more layer and one
    more pass through the output layer.
    """
    c, depths = candidates, model.num_nextn_predict_layers
    collectives = (1.0 + depths) * head.output_communication
    embedding, output = head.embedding, (1.0 + depths) * (head.output + head.output_communication)
    if pipeline.depths:
        output = output + pipeline.depths / pipeline.critical.count * stage.total
    if pipeline.part is not None:
        embedding, output = pipeline.embedding * embedding, pipeline.output * output
    both = embedding + output
    longer = maximum(
        embedding - pipeline.fewer_first * stage.occupied_layer, output - pipeline.fewer_last * stage.occupied_layer
    )
    critical = where(c.pipeline_parallel_size > 1.0, maximum(longer, 0.0), both)
    communication = where(output >= embedding, minimum(critical, collectives), 0.0)
    if c.names_schedules:
        folded, share = c.is_folded, share_of_ends(c)
        left_out = (pipeline.fewer_first - (1.0 - share) * (pipeline.fewer_first - pipeline.fewer_last)) * stage.occupied_layer
        critical = where(folded, maximum(share * both - left_out, 0.0), critical)
        communication = where(folded, share * collectives, communication)
    return EndsTime(both=both, critical=critical, communication=communication)


def bubble_seconds(*, candidates: Candidates, layer: LayerTime, stage: StageTime, ends: EndsTime, pipeline: Pipeline) -> Floats:
    """Seconds that the other stages take for one micro-batch, divided by v.

    With equal stages (p-1)/v (t_f + t_b), arXiv 2104.04473 section 2.2; `schedules.bubble` has the share that remains if the
    backward pass is split. For a part of the pipeline it is the time of all its stages.
    """
    c, p = candidates, candidates.pipeline_parallel_size
    if pipeline.part is not None:
        others: Floats = pipeline.part * stage.occupied + ends.both
    else:
        others = (p - 1.0) * stage.occupied + ends.both - pipeline.fewer * stage.occupied_layer - ends.critical
    bubble: Floats = others / c.virtual_pipeline_parallel_size
    if c.names_schedules:
        late = pipeline.critical.count * layer.weight_gradient
        share = split_bubble_share(c, forward=stage.forward, whole=stage.total, weight_gradient=late)
        # Folded ranks hold equally much, ends included.
        bubble = where(c.splits_backward, where(c.is_folded, (p - 1.0) * stage.occupied, others) * share, bubble)
    return bubble


# The host: a device runs no kernel before it is launched.


def _launches(second: Kernels) -> Kernels:
    """All kernels of a layer of attention and this second block: two matmuls per block, each with two more in the backward
    pass, and attention's core.
    """
    return Kernels(
        forward=attention.KERNELS.forward + second.forward + 2 * 2 + 1,
        backward=attention.KERNELS.backward + second.backward + 2 * 4 + 1,
    )


_DENSE, _EXPERTS = _launches(mlp.KERNELS), _launches(moe.KERNELS)
_COLLECTIVES = Kernels(forward=4.0, backward=6.0)
"""Of the two tensor-parallel regions of a layer, as with sequence parallelism."""
DENSE_LAUNCHES = _DENSE.forward + _DENSE.backward
"""Kernels of a dense layer on one rank, both passes."""


def without_host(framework: FrameworkEfficiency, *, modules: tuple[str, ...] | None = None) -> FrameworkEfficiency:
    """The constants with recorded CUDA graphs: no device waits for its host.

    Graphs of single `modules` leave out the experts' own kernels, whose shapes follow the tokens; without attention's also most
    other launches, but not the preparation of the dispatch.
    """
    if modules is not None and "attn" not in modules:
        prepared = "moe_preprocess" in modules
        return dataclasses.replace(framework, expert_overhead_s=0.0 if prepared else framework.expert_overhead_s)
    return dataclasses.replace(
        framework, host_launch_s=0.0, host_tensor_stall_s=0.0, host_pipeline_stall_s=0.0, expert_overhead_s=0.0,
        expert_launch_s=0.0 if modules is None else framework.expert_launch_s,
    )  # fmt: skip


def launches(
    layers: Floats,
    *,
    tensor_parallel_size: Ints,
    moe_fraction: Floats = 0.0,
    recomputed_fraction: Floats = 0.0,
    added: tuple[float, float] = (0.0, 0.0),
) -> tuple[Floats, Floats]:
    """(forward, backward) kernels and collectives that one micro-batch launches on `layers` layers.

    The shares `moe_fraction` and `recomputed_fraction` of these have experts and are recomputed whole, which launches the
    forward pass again; `added` are a layer's further kernels by pass.
    """
    spread = tensor_parallel_size > 1

    def of_layer(dense: float, experts: float, collectives: float) -> Floats:
        return dense + (experts - dense) * moe_fraction + collectives * spread

    forward = layers * (added[0] + of_layer(_DENSE.forward, _EXPERTS.forward, _COLLECTIVES.forward))
    backward = layers * (added[1] + of_layer(_DENSE.backward, _EXPERTS.backward, _COLLECTIVES.backward))
    return forward, backward + recomputed_fraction * forward


def host_waits(
    *,
    case: TrainingCase,
    candidates: Candidates,
    layers: Floats,
    moe_fraction: Floats,
    recomputed_fraction: Floats,
    forward_s: Floats,
    backward_s: Floats,
) -> tuple[Floats, Floats]:
    """(forward, backward) seconds per micro-batch that a device waits for its host: max(0, launches x seconds each - pass).

    A launch takes `host_launch_s` whatever its kernel's size, so large kernels hide it. Stalls of a layer, spread over its
    launches, are added for each of the t ranks of a tensor-parallel group, whose collectives wait for the slowest rank, if
    hosts also serve a network: the group itself, or the pipeline, on several nodes. Launching the embedding, the output layer
    and the loss is not counted.
    """
    cluster = case.cluster
    framework = case.profile.framework
    t, domain = candidates.tensor_parallel_size, cluster.nvlink_domain_size
    stall = framework.host_tensor_stall_s * (t > domain)
    if cluster.num_gpus > domain:
        stall = stall + framework.host_pipeline_stall_s * (candidates.pipeline_parallel_size > 1)
    each = framework.host_launch_s + t * stall / DENSE_LAUNCHES
    forward, backward = launches(
        layers,
        tensor_parallel_size=t,
        moe_fraction=moe_fraction,
        recomputed_fraction=recomputed_fraction,
        added=_added_launches(case, candidates),
    )
    return maximum(each * forward - forward_s, 0.0), maximum(each * backward - backward_s, 0.0)


def _added_launches(case: TrainingCase, candidates: Candidates) -> tuple[float, float]:
    """(forward, backward) kernels of a layer that other workloads do not launch."""
    workload = case.workload
    forward, backward = (0.0, 0.0) if workload.lora is None else added_launches(case.model, workload.lora, candidates)
    if workload.kernel_fusion:
        return forward, backward
    core = float(workload.attention == "unfused")
    return forward + 6.0 + 6.0 * core, backward + 5.0 * core


def message_stalls(*, case: TrainingCase, candidates: Candidates) -> tuple[Floats, Floats]:
    """(seconds per micro-batch, seconds per step) by which blocking messages between stages stall in large jobs.

    A stage between two others receives and sends in each direction, four messages per micro-batch; with two stages it is two.
    Filling and draining the pipeline adds two for each further stage.
    """
    cluster = case.cluster
    framework = case.profile.framework
    if not framework.message_stall_s or cluster.num_gpus <= framework.message_stall_nodes * cluster.gpus_per_node:
        return 0.0, 0.0
    others = candidates.pipeline_parallel_size - 1
    return 2.0 * framework.message_stall_s * minimum(others, 2), 2.0 * framework.message_stall_s * others
