"""The critical stage: seconds of one micro-batch on the slowest stage and on all other stages."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import NamedTuple

from hp_tool.cost.arrays import Bools, Floats, Ints, anywhere, maximum, minimum, where
from hp_tool.cost.block import LayerTime
from hp_tool.cost.candidates import DUALPIPE, Candidates
from hp_tool.cost.case import TrainingCase
from hp_tool.cost.dense_layers import DenseLayers
from hp_tool.cost.embedding_and_head import HeadTime
from hp_tool.cost.host import host_waits
from hp_tool.cost.pipeline_stages import Pipeline, StageLayers
from hp_tool.cost.recomputation import recomputed_layer_fraction, recomputed_seconds
from hp_tool.cost.schedules.bubble import share_of_ends, split_bubble_share
from hp_tool.domain.model import ModelSpec


@dataclass(frozen=True, slots=True, kw_only=True)
class StageTime:
    """Seconds of one micro-batch through the layers of a stage; shape (n,)."""

    compute: Floats
    """Compute excluding attention cores."""
    attention: Floats
    recompute: Floats
    tensor: Floats
    context: Floats
    expert: Floats
    forward: Floats
    """The forward pass's part of these six fields."""
    total: Floats
    """Sum of the six fields."""
    weight_gradient: Floats
    """Part of `compute` that split backward passes delay."""
    host_waits: Floats
    """Seconds that the device waits for its host, in both passes, in addition to `total`."""
    occupied_forward: Floats
    """`forward` including waits for the host."""
    occupied: Floats
    """`total` including waits for the host: the seconds during which the stage is busy."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CriticalStage:
    """Seconds of one micro-batch on the slowest stage and on the others; shape (n,)."""

    stage: StageTime
    """Layers of the slowest stage."""
    ends: Floats
    """Seconds that embedding and output layer add to the slowest stage."""
    ends_communication: Floats
    """Part of `ends`: the output layer's tensor-parallel collectives."""
    bubble: Floats
    """Seconds of the other stages divided by v; for a part of a pipeline, of all its stages."""


def critical_stage(
    *,
    case: TrainingCase,
    candidates: Candidates,
    layers: Sequence[LayerTime],
    pipeline: Pipeline,
    head: HeadTime,
) -> CriticalStage:
    """Return the seconds of one micro-batch on the slowest stage and on the others.

    `layers` is the mean layer of the full stages; for a model with two kinds of layers, a dense one
    and one with experts. The bubble is the time of one micro-batch on the other stages, divided by
    v. With equal stages this is (p-1)/v (t_f + t_b), arXiv 2104.04473 section 2.2.
    `schedules.bubble` returns the fraction that remains with a split backward pass.
    """
    c = candidates
    if pipeline.dense is None:
        (layer,) = layers
        stage = stage_time(case=case, candidates=c, layer=layer, stage=pipeline.critical)
        slowest = _with_ends(
            model=case.model, candidates=c, head=head, stage=stage, pipeline=pipeline
        )
    else:
        slowest = _slowest_stage(
            case=case,
            candidates=c,
            kinds=layers,
            head=head,
            pipeline=pipeline,
            leading=pipeline.dense,
        )
    bubble: Floats = slowest.others / c.virtual_pipeline_parallel_size
    if c.names_schedules:
        stage = slowest.stage
        share = split_bubble_share(
            c, forward=stage.forward, whole=stage.total, weight_gradient=stage.weight_gradient
        )
        bubble = where(
            c.splits_backward,
            where(c.is_folded, slowest.folded_others, slowest.others) * share,
            bubble,
        )
    return CriticalStage(
        stage=slowest.stage,
        ends=slowest.ends,
        ends_communication=slowest.ends_communication,
        bubble=bubble,
    )


def stage_time(
    *, case: TrainingCase, candidates: Candidates, layer: LayerTime, stage: StageLayers
) -> StageTime:
    """Return the seconds of one micro-batch in the layers of a full stage, each equal to the mean
    `layer`.
    """
    layers = stage.count
    forward_layer = layer.forward + layer.tensor + layer.context + layer.expert
    whole = recomputed_layer_fraction(
        candidates, layers_per_chunk=layers / candidates.virtual_pipeline_parallel_size
    )
    attention = layers * (layer.attention + layer.attention_backward)
    compute = layers * (layer.forward + layer.backward) - attention
    recompute = layers * recomputed_seconds(
        candidates, layer=layer, forward=forward_layer, whole=whole
    )
    tensor = layers * (layer.tensor + layer.tensor_backward)
    context = layers * (layer.context + layer.context_backward)
    expert = layers * (layer.expert + layer.expert_backward)
    total = compute + attention + recompute + tensor + context + expert
    forward = layers * forward_layer
    waits: Floats = 0.0
    occupied, occupied_forward = total, forward
    if case.profile.framework.host_launch_s:
        # A pass takes at least as long as its host's launches; communication continues during the
        # wait.
        in_forward, in_backward = host_waits(
            case=case,
            candidates=candidates,
            layers=stage,
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
        weight_gradient=layers * layer.weight_gradient,
        host_waits=waits,
        occupied_forward=occupied_forward,
        occupied=occupied,
    )


class _Slowest(NamedTuple):
    """The slowest stage, and the seconds of one micro-batch on the others."""

    stage: StageTime
    ends: Floats
    ends_communication: Floats
    others: Floats
    folded_others: Floats
    """The same for a folded pipeline, where each rank has one stage of each half and all ranks are
    equal, including the ends.
    """


# Layers of one kind: stages differ only in their number of layers and in the ends of the model.


def _with_ends(
    *,
    model: ModelSpec,
    candidates: Candidates,
    head: HeadTime,
    stage: StageTime,
    pipeline: Pipeline,
) -> _Slowest:
    """Return a full stage, and the seconds that embedding and output layer add to the first and
    last stage.

    The longer end is critical if its extra time exceeds that of the layers which an uneven end
    lacks. In a folded pipeline, this applies to the rank with both ends. Each depth of multi-token
    prediction adds one layer and one pass through the output layer.
    """
    c, p, depths = candidates, candidates.pipeline_parallel_size, model.num_nextn_predict_layers
    layer_s = stage.occupied / pipeline.critical.count
    collectives = (1.0 + depths) * head.output_communication
    embedding, output = head.embedding, (1.0 + depths) * (head.output + head.output_communication)
    if anywhere(pipeline.depths):
        output = output + pipeline.depths / pipeline.critical.count * stage.total
    if pipeline.part is not None:
        embedding, output = pipeline.embedding * embedding, pipeline.output * output
    both = embedding + output
    longer = maximum(
        embedding - pipeline.fewer_first * layer_s, output - pipeline.fewer_last * layer_s
    )
    critical = where(p > 1.0, maximum(longer, 0.0), both)
    communication = where(output >= embedding, minimum(critical, collectives), 0.0)
    if c.names_schedules:
        folded, share = c.is_folded, share_of_ends(c)
        left_out = (
            pipeline.fewer_first - (1.0 - share) * (pipeline.fewer_first - pipeline.fewer_last)
        ) * layer_s
        critical = where(folded, maximum(share * both - left_out, 0.0), critical)
        communication = where(folded, share * collectives, communication)
    if pipeline.part is not None:
        others: Floats = pipeline.part * stage.occupied + both
    else:
        others = (p - 1.0) * stage.occupied + both - pipeline.fewer * layer_s - critical
    return _Slowest(stage, critical, communication, others, (p - 1.0) * stage.occupied)


# Layers of two kinds: which stage is slowest depends on which kind takes longer.


class _Contents(NamedTuple):
    """Layers and ends of the model on one stage."""

    layers: Floats
    """Number of layers, including those of multi-token prediction, which have experts."""
    dense: Floats
    embedding: Floats
    """Fraction of the micro-batches for which the stage runs the embedding."""
    output: Floats


def _slowest_stage(
    *,
    case: TrainingCase,
    candidates: Candidates,
    kinds: Sequence[LayerTime],
    head: HeadTime,
    pipeline: Pipeline,
    leading: DenseLayers,
) -> _Slowest:
    """Return the slowest of these stages: those with the most and fewest dense layers, and both
    ends.

    The time of a stage is the sum over its layers, each with the time of its kind on a full stage,
    plus its ends of the model. For one micro-batch, all stages together take the sum over all
    layers.
    """
    c, p, depths = (
        candidates,
        candidates.pipeline_parallel_size,
        case.model.num_nextn_predict_layers,
    )
    each = pipeline.critical.count
    dense, experts = (
        stage_time(
            case=case, candidates=c, layer=layer, stage=StageLayers(count=each, expert_share=share)
        )
        for layer, share in zip(kinds, (0.0, 1.0), strict=True)
    )
    embedding = pipeline.embedding * head.embedding
    collectives = pipeline.output * (1.0 + depths) * head.output_communication
    output = pipeline.output * (1.0 + depths) * head.output + collectives

    experts_s, dense_s = experts.occupied / each, dense.occupied / each

    def layers_s(layers: Floats, dense_layers: Floats) -> Floats:
        return (layers - dense_layers) * experts_s + dense_layers * dense_s

    def seconds(contents: _Contents) -> Floats:
        ends = contents.embedding * embedding + contents.output * output
        return layers_s(contents.layers, contents.dense) + ends

    first, *others = _stage_contents(c, pipeline, leading, depths=pipeline.depths * pipeline.output)
    slowest, slowest_s = first, seconds(first)
    for contents, exists in zip(others, (True, leading.between, leading.between), strict=True):
        if not anywhere(exists):
            continue
        each_s = seconds(contents)
        longer: Bools = exists & (each_s > slowest_s)
        slowest = _Contents(
            *(where(longer, one, other) for one, other in zip(contents, slowest, strict=True))
        )
        slowest_s = where(longer, each_s, slowest_s)
    with_experts, without = (slowest.layers - slowest.dense) / each, slowest.dense / each
    stage = StageTime(
        **{
            f.name: with_experts * getattr(experts, f.name) + without * getattr(dense, f.name)
            for f in fields(StageTime)
        }
    )
    of_part = pipeline.part is not None
    all_layers = pipeline.part * each if pipeline.part is not None else p * each - pipeline.fewer
    all_s = (
        layers_s(all_layers + pipeline.depths * pipeline.output, leading.total) + embedding + output
    )
    return _Slowest(
        stage,
        slowest.embedding * embedding + slowest.output * output,
        slowest.output * collectives,
        all_s if of_part else all_s - slowest_s,
        (p - 1.0) * each * layers_s(all_layers, leading.total) / all_layers
        if c.names_schedules
        else 0.0,
    )


def _stage_contents(
    c: Candidates, pipeline: Pipeline, leading: DenseLayers, *, depths: Floats | Ints
) -> Sequence[_Contents]:
    """Return the contents of both ends and of the full stages with the fewest and the most dense
    layers.

    The `depths` layers of multi-token prediction are on the stage of the output layer. The first
    rank of a V has both ends. DualPipe's ranks have two stages each and run half of the
    micro-batches on each.
    """
    each = pipeline.critical.count
    counts = each - pipeline.fewer_first, each - pipeline.fewer_last
    of_dense = leading.first, leading.last
    here: Floats = 1.0
    output_first: Floats = 1.0 * (
        (c.pipeline_parallel_size if pipeline.part is None else pipeline.part) == 1
    )
    if c.names_schedules and pipeline.part is None:
        dual = (c.pipeline_schedule == DUALPIPE) & (c.pipeline_parallel_size > 1)
        counts, of_dense = (
            (where(dual, 0.5 * (one + other), one), where(dual, 0.5 * (one + other), other))
            for one, other in (counts, of_dense)
        )
        here = where(dual, 0.5, 1.0)
        output_first = where(dual, 0.5, where(c.is_v, 1.0, output_first))
    return (
        _Contents(counts[0] + output_first * depths, of_dense[0], here, output_first),
        _Contents(
            counts[1] + (1.0 - output_first) * depths, of_dense[1], 1.0 - here, 1.0 - output_first
        ),
        _Contents(leading.full, leading.fewest, 0.0, 0.0),
        _Contents(leading.full, leading.most, 0.0, 0.0),
    )
