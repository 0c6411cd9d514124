"""Find the critical (slowest) stage: seconds of one micro-batch on it and on all other stages."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, fields, replace
from typing import NamedTuple

from hp_tool.cost.arrays import Bools, Floats, anywhere, maximum, minimum, where
from hp_tool.cost.block import LayerTime
from hp_tool.cost.candidates import Candidates
from hp_tool.cost.case import TrainingCase
from hp_tool.cost.embedding_and_head import HeadTime
from hp_tool.cost.host import HostLoad, host_load
from hp_tool.cost.pipeline_stages import (
    Pipeline,
    StageLayers,
    StageWork,
    stage_of,
)
from hp_tool.cost.recomputation import recomputed_layer_fraction, recomputed_seconds
from hp_tool.cost.schedules.bubble import share_of_ends, split_bubble_share
from hp_tool.domain.model import ModelSpec


@dataclass(frozen=True, slots=True, kw_only=True)
class StageTime:
    """Seconds of one micro-batch through the layers of a stage; shape (n,)."""

    compute: Floats
    """Compute, excluding the attention cores."""
    attention: Floats
    recompute: Floats
    tensor: Floats
    context: Floats
    expert: Floats
    forward: Floats
    """Part of `total` in the forward pass."""
    total: Floats
    """Sum of the six component fields."""
    weight_gradient: Floats
    """Part of `compute` that schedules with a split backward pass delay."""
    host_waits: Floats
    """Seconds that the device waits for its host in both passes. Not included in `total`."""
    occupied_forward: Floats
    """`forward` including waits for the host."""
    occupied: Floats
    """`total` including waits for the host: the seconds during which the stage is busy."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CriticalStage:
    """Seconds of one micro-batch on the slowest stage and on all other stages; shape (n,)."""

    stage: StageTime
    """Layers of the slowest stage."""
    ends: Floats
    """Seconds that the embedding and the output layer add to the slowest stage."""
    ends_communication: Floats
    """Part of `ends`: the output layer's tensor-parallel collectives."""
    bubble: Floats
    """Seconds of one micro-batch on the other stages, divided by v. For a part of a pipeline, all
    of its stages count.
    """


def critical_stage(
    *,
    case: TrainingCase,
    candidates: Candidates,
    layers: Sequence[LayerTime],
    pipeline: Pipeline,
    head: HeadTime,
) -> CriticalStage:
    """Return the times of the slowest stage.

    `layers` contains one layer of each kind. The bubble is the time of the other stages for one
    micro-batch, divided by v. With identical stages it is (p-1)/v (t_f + t_b), arXiv 2104.04473
    section 2.2. With a split backward pass, `schedules.bubble` returns the fraction of this bubble
    that remains.
    """
    c = candidates
    if pipeline.work:
        slowest = _slowest_stage(
            case=case, candidates=c, kinds=layers, head=head, pipeline=pipeline
        )
    else:
        (layer,) = layers
        stage = stage_time(case=case, candidates=c, layer=layer, stage=pipeline.critical)
        slowest = _with_ends(
            model=case.model, candidates=c, head=head, stage=stage, pipeline=pipeline
        )
    bubble: Floats = slowest.others / c.virtual_pipeline_parallel_size
    if c.names_schedules:
        stage = slowest.stage
        share = split_bubble_share(
            c, forward=stage.forward, total=stage.total, weight_gradient=stage.weight_gradient
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
    """Return the time in seconds of one micro-batch on a stage with the maximum number of layers,
    all identical to the mean `layer`.
    """
    return _with_waits(*_device_time(case=case, candidates=candidates, layer=layer, stage=stage))


def _with_waits(stage: StageTime, load: HostLoad) -> StageTime:
    """Add the waits for the host to a stage.

    A pass takes at least as long as its launches. Communication continues during the wait.
    """
    in_forward, in_backward = load.waits()
    waits = in_forward + in_backward
    return replace(
        stage,
        host_waits=waits,
        occupied_forward=stage.forward + in_forward,
        occupied=stage.total + waits,
    )


def _device_time(
    *, case: TrainingCase, candidates: Candidates, layer: LayerTime, stage: StageLayers
) -> tuple[StageTime, HostLoad]:
    """Return (time of a stage without waits for the host, load of its host).

    Both are proportional to the number of layers of each kind.
    """
    layers = stage.count
    forward_layer = layer.forward + layer.tensor + layer.context + layer.expert
    full_fraction = recomputed_layer_fraction(
        candidates, layers_per_chunk=layers / candidates.virtual_pipeline_parallel_size
    )
    attention = layers * (layer.attention + layer.attention_backward)
    compute = layers * (layer.forward + layer.backward) - attention
    recompute = layers * recomputed_seconds(
        candidates, layer=layer, forward=forward_layer, full_fraction=full_fraction
    )
    tensor = layers * (layer.tensor + layer.tensor_backward)
    context = layers * (layer.context + layer.context_backward)
    expert = layers * (layer.expert + layer.expert_backward)
    total = compute + attention + recompute + tensor + context + expert
    forward = layers * forward_layer
    load = NO_LOAD
    if case.profile.framework.host_launch_s:
        load = host_load(
            case=case,
            candidates=candidates,
            layers=stage,
            recomputed_fraction=full_fraction,
            forward_s=forward,
            backward_s=total - forward,
        )
    seconds = StageTime(
        compute=compute,
        attention=attention,
        recompute=recompute,
        tensor=tensor,
        context=context,
        expert=expert,
        forward=forward,
        total=total,
        weight_gradient=layers * layer.weight_gradient,
        host_waits=0.0,
        occupied_forward=forward,
        occupied=total,
    )
    return seconds, load


NO_LOAD = HostLoad(excess=(0.0, 0.0), idle=(0.0, 0.0))
"""Load of a host whose kernel launches take no time."""


class _Slowest(NamedTuple):
    """The slowest stage, and the time in seconds of one micro-batch on all other stages."""

    stage: StageTime
    ends: Floats
    ends_communication: Floats
    others: Floats
    folded_others: Floats
    """Seconds on the other stages of a folded pipeline. Each rank has one stage of each half, and
    all ranks are identical, including those with the embedding and output layer.
    """


# Layers of one kind: stages differ only in their number of layers and in whether they have the
# embedding or the output layer.


def _with_ends(
    *,
    model: ModelSpec,
    candidates: Candidates,
    head: HeadTime,
    stage: StageTime,
    pipeline: Pipeline,
) -> _Slowest:
    """Return a stage with the maximum number of layers, and the seconds that the embedding and the
    output layer add to the first and last stage.

    An end stage (first or last) is critical if its extra time exceeds the time of the layers by
    which it is shorter. In a folded pipeline, the rank with both embedding and output layer is
    compared instead. Each depth of multi-token prediction adds one layer and one pass through the
    output layer.
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


# Layers of several kinds: which stage is slowest depends on its contents.


def _slowest_stage(
    *,
    case: TrainingCase,
    candidates: Candidates,
    kinds: Sequence[LayerTime],
    head: HeadTime,
    pipeline: Pipeline,
) -> _Slowest:
    """Return the slowest of the stages in `pipeline.work`.

    The time of a stage is the sum over its layers, its embedding or output layer, and the complete
    stage's waits for the host.
    """
    c, p, depths = (
        candidates,
        candidates.pipeline_parallel_size,
        case.model.num_nextn_predict_layers,
    )
    each = pipeline.critical.count
    alone = [
        _device_time(case=case, candidates=c, layer=layer, stage=stage_of(case.model, counts))
        for layer, counts in zip(kinds, _stages_of_kinds(len(kinds), each), strict=True)
    ]
    embedding = pipeline.embedding * head.embedding
    collectives = pipeline.output * (1.0 + depths) * head.output_communication
    output = pipeline.output * (1.0 + depths) * head.output + collectives

    def over_kinds(work: StageWork, values: Iterable[Floats]) -> Floats:
        counts = StageLayers(count=each, kinds=work.kinds, expert_share=0.0)
        return counts.sum(list(values)) / each

    def load_of(work: StageWork) -> HostLoad:
        (forward, backward), (idle, idle_backward) = (
            [over_kinds(work, (load[field][one] for _, load in alone)) for one in (0, 1)]
            for field in (0, 1)
        )
        return HostLoad(excess=(forward, backward), idle=(idle, idle_backward))

    def layers_s(work: StageWork) -> Floats:
        busy = over_kinds(work, (stage.total for stage, _ in alone))
        return busy + sum(load_of(work).waits())

    def ends_s(work: StageWork) -> Floats:
        return work.embedding * embedding + work.output * output

    slowest, *others = pipeline.work
    of_layers = slowest.ranks * layers_s(slowest)
    number: Floats = slowest.ranks * sum(slowest.kinds, 0.0)
    slowest_s = layers_s(slowest) + ends_s(slowest)
    all_ends = slowest.ranks * ends_s(slowest)
    for work in others:
        if not anywhere(work.ranks > 0):
            continue
        layer_seconds = layers_s(work)
        of_layers = of_layers + work.ranks * layer_seconds
        number = number + work.ranks * sum(work.kinds, 0.0)
        all_ends = all_ends + work.ranks * ends_s(work)
        work_s = layer_seconds + ends_s(work)
        longer: Bools = (work.ranks > 0) & (work_s > slowest_s)
        slowest = StageWork(
            kinds=tuple(
                where(longer, one, other)
                for one, other in zip(work.kinds, slowest.kinds, strict=True)
            ),
            embedding=where(longer, work.embedding, slowest.embedding),
            output=where(longer, work.output, slowest.output),
        )
        slowest_s = where(longer, work_s, slowest_s)
    stage = StageTime(
        **{
            f.name: over_kinds(slowest, (getattr(stage, f.name) for stage, _ in alone))
            for f in fields(StageTime)
        }
    )
    all_s = of_layers + all_ends
    return _Slowest(
        _with_waits(stage, load_of(slowest)),
        ends_s(slowest),
        slowest.output * collectives,
        all_s if pipeline.part is not None else all_s - slowest_s,
        (p - 1.0) * each * of_layers / number if c.names_schedules else 0.0,
    )


def _stages_of_kinds(kinds: int, count: Floats) -> list[list[Floats]]:
    """Return, for each kind, the layers of stages that have `count` layers of that kind only."""
    return [[count if other == place else 0.0 for other in range(kinds)] for place in range(kinds)]
