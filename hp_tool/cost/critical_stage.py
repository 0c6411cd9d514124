"""What sets a pipeline's pace: one micro-batch on its slowest stage, through layers and what it holds of the model's ends."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

from hp_tool.cost.arrays import Floats, anywhere, maximum, minimum, where
from hp_tool.cost.block import LayerTime
from hp_tool.cost.candidates import Candidates
from hp_tool.cost.case import TrainingCase
from hp_tool.cost.embedding_and_head import HeadTime
from hp_tool.cost.pipeline_stages import Pipeline
from hp_tool.cost.recomputation import recomputed_layer_fraction, recomputed_seconds
from hp_tool.cost.schedules.bubble import is_folded, share_of_ends, split_bubble_share, splits_backward
from hp_tool.domain.efficiency import FrameworkEfficiency
from hp_tool.domain.model import ModelSpec


@dataclass(frozen=True, slots=True, kw_only=True)
class StageTime:
    """Seconds of one micro-batch through the layers of the stage that sets the pace; shape (n,)."""

    compute: Floats
    recompute: Floats
    tensor: Floats
    context: Floats
    expert: Floats
    forward: Floats
    """The forward pass's share of the five."""
    total: Floats
    """The five together."""
    host_waits: Floats
    """What the device waits for its host besides, in both passes."""
    held_forward: Floats
    """`forward` with its waits."""
    held: Floats
    """`total` with its waits: how long the stage is taken."""
    held_layer: Floats
    """One layer's part of `held`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EndsTime:
    """Seconds of one micro-batch in embedding and output layer; shape (n,)."""

    both: Floats
    pacing: Floats
    """What they add to the stage that sets the pace."""
    communication: Floats
    """Part of `pacing`: the output layer's tensor-parallel collectives."""


def stage_time(*, case: TrainingCase, candidates: Candidates, layer: LayerTime, pipeline: Pipeline) -> StageTime:
    """The stage's layers, each the mean `layer`."""
    layers = pipeline.critical.count
    forward_layer = layer.forward + layer.tensor + layer.context + layer.expert
    whole = recomputed_layer_fraction(candidates, layers_per_chunk=layers / candidates.virtual_pipeline_parallel_size)
    compute = layers * (layer.forward + layer.backward)
    recompute = layers * recomputed_seconds(candidates, layer=layer, forward=forward_layer, whole=whole)
    tensor = layers * (layer.tensor + layer.tensor_backward)
    context = layers * (layer.context + layer.context_backward)
    expert = layers * (layer.expert + layer.expert_backward)
    total = compute + recompute + tensor + context + expert
    forward = layers * forward_layer
    waits: Floats = 0.0
    held, held_forward = total, forward
    if case.profile.framework.host_layer_s:
        # A pass takes what its host takes; communication runs on meanwhile.
        launched = launched_layers(layers, moe_fraction=pipeline.critical.expert_share, recomputed_fraction=whole)
        in_forward, in_backward = host_waits(
            case=case,
            candidates=candidates,
            layers=launched,
            recomputed_fraction=whole,
            forward_s=forward,
            backward_s=total - forward,
        )
        waits = in_forward + in_backward
        held, held_forward = total + waits, forward + in_forward
    return StageTime(
        compute=compute,
        recompute=recompute,
        tensor=tensor,
        context=context,
        expert=expert,
        forward=forward,
        total=total,
        host_waits=waits,
        held_forward=held_forward,
        held=held,
        held_layer=held / layers,
    )


def ends_time(*, model: ModelSpec, candidates: Candidates, head: HeadTime, stage: StageTime, pipeline: Pipeline) -> EndsTime:
    """The ends add to the first and last stage. The longer one sets the pace, as far as it is longer than the layers that an
    uneven end leaves out; in a folded pipeline the rank that holds both does.

    Multi-token prediction: each depth is one more layer and one more pass through the output layer.
    """
    c, depths = candidates, model.num_nextn_predict_layers
    collectives = (1.0 + depths) * head.output_communication
    embedding, output = head.embedding, (1.0 + depths) * (head.output + head.output_communication)
    if pipeline.depths:
        output = output + pipeline.depths / pipeline.critical.count * stage.total
    if pipeline.part is not None:
        embedding, output = pipeline.embedding * embedding, pipeline.output * output
    both = embedding + output
    longer = maximum(embedding - pipeline.fewer_first * stage.held_layer, output - pipeline.fewer_last * stage.held_layer)
    pacing = where(c.pipeline_parallel_size > 1.0, maximum(longer, 0.0), both)
    communication = where(output >= embedding, minimum(pacing, collectives), 0.0)
    if anywhere(is_folded(c)):
        folded, share = is_folded(c), share_of_ends(c)
        pacing = where(folded, share * both, pacing)
        communication = where(folded, share * collectives, communication)
    return EndsTime(both=both, pacing=pacing, communication=communication)


def bubble_seconds(*, candidates: Candidates, layer: LayerTime, stage: StageTime, ends: EndsTime, pipeline: Pipeline) -> Floats:
    """What the other stages take for one micro-batch, divided by v: with equal stages (p-1)/v (t_f + t_b), arXiv 2104.04473
    section 2.2; `schedules.costs` has the share of it that is left where the backward pass is split. Of a part of the
    pipeline it is what all its stages take.
    """
    c, p = candidates, candidates.pipeline_parallel_size
    if pipeline.part is not None:
        others: Floats = pipeline.part * stage.held + ends.both
    else:
        others = (p - 1.0) * stage.held + ends.both - pipeline.fewer * stage.held_layer - ends.pacing
    bubble: Floats = others / c.virtual_pipeline_parallel_size
    if anywhere(splits_backward(c)):
        late = pipeline.critical.count * layer.weight_gradient
        share = split_bubble_share(c, forward=stage.forward, whole=stage.total, weight_gradient=late)
        # Folded ranks hold equally much, ends included.
        bubble = where(splits_backward(c), where(is_folded(c), (p - 1.0) * stage.held, others) * share, bubble)
    return bubble


# The host: a device can run no kernel before it was launched.


MOE_LAUNCHES = 58.0 / 31.0
"""Kernels of a layer with experts over those of a dense one, both passes, as attention.py (8 elementwise, 6 matmuls, 2 of the
core), mlp.py (9 and 6) and experts.py (36 and 6) count them."""
FORWARD_LAUNCHES = 12.0 / 31.0
"""Share of a layer's kernels that belong to the forward pass: what recomputing it launches again."""


def without_host(framework: FrameworkEfficiency) -> FrameworkEfficiency:
    """The constants where kernels are launched as recorded CUDA graphs: no device waits."""
    return dataclasses.replace(
        framework, host_layer_s=0.0, host_tensor_stall_s=0.0, host_pipeline_stall_s=0.0, expert_overhead_s=0.0
    )


def launched_layers(layers: Floats, *, moe_fraction: Floats, recomputed_fraction: Floats) -> Floats:
    """Dense layers without recomputation that have as many kernels as `layers` layers, of which these shares have experts
    and are recomputed whole.
    """
    return layers * (1.0 + (MOE_LAUNCHES - 1.0) * moe_fraction) * (1.0 + FORWARD_LAUNCHES * recomputed_fraction)


def host_waits(
    *,
    case: TrainingCase,
    candidates: Candidates,
    layers: Floats,
    recomputed_fraction: Floats,
    forward_s: Floats,
    backward_s: Floats,
) -> tuple[Floats, Floats]:
    """Seconds a device waits for its host in one micro-batch's forward and in its backward pass through `layers` layers (of
    launched_layers), which take the device `forward_s` and `backward_s`: max(0, f l (h + t s) - forward_s), f the forward
    pass's share of the launches, and the same of the backward pass, which repeats what is recomputed.

    h launches one layer's kernels, whatever their size. s is added for each of the t ranks of a tensor-parallel group, whose
    collectives wait for the rank that was held up longest, where hosts also serve a network: the group itself, or the
    pipeline, on several nodes. Not counted: launching the embedding, the output layer and the loss.
    """
    cluster = case.cluster
    framework = case.profile.framework
    t, domain = candidates.tensor_parallel_size, cluster.nvlink_domain_size
    stall = framework.host_tensor_stall_s * (t > domain)
    if cluster.num_gpus > domain:
        stall = stall + framework.host_pipeline_stall_s * (candidates.pipeline_parallel_size > 1)
    host_s = layers * (framework.host_layer_s + t * stall)
    forward = FORWARD_LAUNCHES / (1.0 + FORWARD_LAUNCHES * recomputed_fraction) * host_s
    return maximum(forward - forward_s, 0.0), maximum(host_s - forward - backward_s, 0.0)


def message_stalls(*, case: TrainingCase, candidates: Candidates) -> tuple[Floats, Floats]:
    """(seconds a micro-batch, seconds a step) by which blocking messages between stages are held up in large jobs.

    A stage between two others receives and sends in each direction, four messages a micro-batch; with two stages it is two.
    Filling and draining the pipeline adds two for each further stage.
    """
    cluster = case.cluster
    framework = case.profile.framework
    if not framework.message_stall_s or cluster.num_gpus <= framework.message_stall_nodes * cluster.gpus_per_node:
        return 0.0, 0.0
    others = candidates.pipeline_parallel_size - 1
    return 2.0 * framework.message_stall_s * minimum(others, 2), 2.0 * framework.message_stall_s * others
