"""What sets a pipeline's pace: one micro-batch on its slowest stage, through layers and what it holds of the model's ends."""

from __future__ import annotations

from dataclasses import dataclass

from hp_tool.cost.block import LayerTime
from hp_tool.cost.candidates import Candidates
from hp_tool.cost.elementwise import Column, anywhere, maximum, minimum, where
from hp_tool.cost.head import HeadTime
from hp_tool.cost.host import host_waits, launched_layers
from hp_tool.cost.recomputation import recomputed_layer_fraction, recomputed_seconds
from hp_tool.cost.schedules.costs import is_folded, split_bubble_share, splits_backward
from hp_tool.cost.schedules.folded import share_of_ends
from hp_tool.cost.section import Section, Stage
from hp_tool.cost.stages import StageLayers
from hp_tool.domain.efficiency import EfficiencyProfile
from hp_tool.domain.hardware import ClusterSpec
from hp_tool.domain.model import ModelSpec


@dataclass(frozen=True, slots=True, kw_only=True)
class StageTime:
    """Seconds of one micro-batch through the layers of the stage that sets the pace; shape (n,)."""

    compute: Column
    recompute: Column
    tensor: Column
    context: Column
    expert: Column
    forward: Column
    """The forward pass's share of the five."""
    total: Column
    """The five together."""
    host_waits: Column
    """What the device waits for its host besides, in both passes."""
    held_forward: Column
    """`forward` with its waits."""
    held: Column
    """`total` with its waits: how long the stage is taken."""
    held_layer: Column
    """One layer's part of `held`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EndsTime:
    """Seconds of one micro-batch in embedding and output layer; shape (n,)."""

    both: Column
    pacing: Column
    """What they add to the stage that sets the pace."""
    communication: Column
    """Part of `pacing`: the output layer's tensor-parallel collectives."""


def stage_time(
    *, cluster: ClusterSpec, profile: EfficiencyProfile, candidates: Candidates, layer: LayerTime, stages: StageLayers
) -> StageTime:
    """The stage's layers, each the mean `layer`."""
    layers = stages.pace
    forward_layer = layer.forward + layer.tensor + layer.context + layer.expert
    whole = recomputed_layer_fraction(candidates, layers_per_chunk=layers / candidates.virtual_pipeline_parallel_size)
    compute = layers * (layer.forward + layer.backward)
    recompute = layers * recomputed_seconds(candidates, layer=layer, forward=forward_layer, whole=whole)
    tensor = layers * (layer.tensor + layer.tensor_backward)
    context = layers * (layer.context + layer.context_backward)
    expert = layers * (layer.expert + layer.expert_backward)
    total = compute + recompute + tensor + context + expert
    forward = layers * forward_layer
    waits: Column = 0.0
    held, held_forward = total, forward
    if profile.framework.host_layer_s:
        # A pass takes what its host takes; communication runs on meanwhile.
        launched = launched_layers(layers, moe_fraction=stages.pace_moe_fraction, recomputed_fraction=whole)
        in_forward, in_backward = host_waits(
            profile=profile, cluster=cluster, candidates=candidates, layers=launched, recomputed_fraction=whole,
            forward_s=forward, backward_s=total - forward,
        )  # fmt: skip
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


def ends_time(*, model: ModelSpec, candidates: Candidates, head: HeadTime, stage: StageTime, stages: StageLayers) -> EndsTime:
    """The ends add to the first and last stage. The longer one sets the pace, as far as it is longer than the layers that an
    uneven end leaves out; in a folded pipeline the rank that holds both does.

    Multi-token prediction: each depth is one more layer and one more pass through the output layer.
    """
    c, depths = candidates, model.num_nextn_predict_layers
    collectives = (1.0 + depths) * head.output_communication
    embedding, output = head.embedding, (1.0 + depths) * (head.output + head.output_communication)
    if depths and not isinstance(c, Stage):  # which counts them among its layers
        output = output + depths / stages.pace * stage.total
    if isinstance(c, Section):
        embedding, output = c.holds_embedding * embedding, c.holds_output * output
    both = embedding + output
    longer = maximum(embedding - stages.fewer_first * stage.held_layer, output - stages.fewer_last * stage.held_layer)
    pacing = where(c.pipeline_parallel_size > 1.0, maximum(longer, 0.0), both)
    communication = where(output >= embedding, minimum(pacing, collectives), 0.0)
    if anywhere(is_folded(c)):
        folded, share = is_folded(c), share_of_ends(c)
        pacing = where(folded, share * both, pacing)
        communication = where(folded, share * collectives, communication)
    return EndsTime(both=both, pacing=pacing, communication=communication)


def bubble_seconds(
    *, candidates: Candidates, layer: LayerTime, stage: StageTime, ends: EndsTime, stages: StageLayers
) -> Column:
    """What the other stages take for one micro-batch, divided by v: with equal stages (p-1)/v (t_f + t_b), arXiv 2104.04473
    section 2.2; `schedules.costs` has the share of it that is left where the backward pass is split. Of a section of the
    pipeline it is what all its stages take.
    """
    c, p = candidates, candidates.pipeline_parallel_size
    if isinstance(c, Section):
        others = c.stages * stage.held + ends.both
    else:
        others = (p - 1.0) * stage.held + ends.both - stages.fewer * stage.held_layer - ends.pacing
    bubble = others / c.virtual_pipeline_parallel_size
    if anywhere(splits_backward(c)):
        late = stages.pace * layer.weight_gradient
        share = split_bubble_share(c, forward=stage.forward, whole=stage.total, weight_gradient=late)
        # Folded ranks hold equally much, ends included.
        bubble = where(splits_backward(c), where(is_folded(c), (p - 1.0) * stage.held, others) * share, bubble)
    return bubble
