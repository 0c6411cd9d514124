"""Pipelines with unequal stages: over two kinds of GPU, or with a pipeline layout.

Each part with identical stages is costed like a pipeline on its own devices. The parts are then
combined: the fullest stage determines the memory; the slowest stage and the time of all other
stages determine the step time.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, NamedTuple, cast

import numpy as np
from numpy.typing import NDArray

from hp_tool.cost.arrays import (
    FloatArray,
    Floats,
    Ints,
    Numbers,
    ceil,
    floor,
    maximum,
    minimum,
    where,
)
from hp_tool.cost.candidates import Candidates
from hp_tool.cost.case import TrainingCase
from hp_tool.cost.pipeline_stages import (
    NO_LAYERS,
    Pipeline,
    PipelineStage,
    StageWork,
    pipeline_part,
    stage_of,
)
from hp_tool.cost.step_time import micro_batches, transfer_seconds
from hp_tool.cost.training import TrainingCosts, training_costs
from hp_tool.domain.efficiency import EfficiencyProfile
from hp_tool.domain.model import ModelSpec
from hp_tool.domain.parts import PER_MICRO_BATCH, STEP_KEYS
from hp_tool.domain.pipeline_layout import LayoutChunk, PipelineLayout

CRITICAL_PARTS = (*PER_MICRO_BATCH, "overhead")
"""Step-time parts of the critical stage, including waits for the host."""


def stage_seconds(
    costs: TrainingCosts, *, profile: EfficiencyProfile, micro_batches: Floats
) -> Floats:
    """Return the time in seconds of one micro-batch on the slowest stage of a part, including waits
    for its host.
    """
    waits = costs.parts["overhead"] - profile.framework.step_overhead_s
    return (sum(costs.parts[name] for name in PER_MICRO_BATCH) + waits) / micro_batches


def _join_parts(
    each: Sequence[TrainingCosts], seconds: Sequence[Floats]
) -> tuple[TrainingCosts, dict[str, Floats], Floats]:
    """Return (memory of the part nearest to its capacity, step-time parts without the bubble,
    seconds of the slowest stage).
    """
    fullest, slowest, slowest_s = each[0], each[0], seconds[0]
    largest: dict[str, Floats] = {name: each[0].parts[name] for name in STEP_KEYS}
    for one, stage_s in zip(each[1:], seconds[1:], strict=True):
        fuller = (
            one.memory_total_bytes / one.capacity_bytes
            > fullest.memory_total_bytes / fullest.capacity_bytes
        )
        fullest, slowest = (
            _select_costs(fuller, one, fullest),
            _select_costs(stage_s > slowest_s, one, slowest),
        )
        slowest_s = maximum(stage_s, slowest_s)
        largest = {name: maximum(so_far, one.parts[name]) for name, so_far in largest.items()}
    parts = largest | {name: slowest.parts[name] for name in CRITICAL_PARTS}
    return replace(fullest, first_stage_bytes=each[0].first_stage_bytes), parts, slowest_s


def _with_times(costs: TrainingCosts, parts: dict[str, Floats], *, bubble: Floats) -> TrainingCosts:
    parts = parts | {"pipeline_bubble": bubble}
    return replace(
        costs,
        parts=cast(dict[str, FloatArray], parts),
        step_s=cast(FloatArray, sum(parts.values())),
    )


def _select_costs(condition: Numbers, yes: TrainingCosts, no: TrainingCosts) -> TrainingCosts:
    """Return the costs row by row: `yes` if the condition is true, else `no`."""

    def columns(one: dict[str, Any], other: dict[str, Any]) -> dict[str, Any]:
        return {name: where(condition, column, other[name]) for name, column in one.items()}

    of_memory = (
        "layer_activations_bytes",
        "worst_stage",
        "memory_total_bytes",
        "first_stage_bytes",
    )
    names = (*of_memory, "capacity_bytes", "device_bytes", "step_s")
    totals = columns(*({name: getattr(costs, name) for name in names} for costs in (yes, no)))
    return TrainingCosts(
        memory_parts=columns(yes.memory_parts, no.memory_parts),
        parts=columns(yes.parts, no.parts),
        layers_by_kind=tuple(
            cast(FloatArray, where(condition, one, other))
            for one, other in zip(yes.layers_by_kind, no.layers_by_kind, strict=True)
        ),
        **totals,
    )


def _as_rows(candidates: Candidates) -> Candidates:
    return candidates.take(slice(None)) if len(candidates.shape) > 1 else candidates


# Two kinds of GPU in one cluster: the first kind runs the first pipeline stages, the second kind
# runs the others.
#
# Replicas and tensor-parallel groups are inside a stage and therefore use one kind of GPU. Only the
# pipeline spans both kinds. Layers are split so that stages of both kinds take equally long
# (Megatron Core's pipeline_model_parallel_layout). Stages have complete layers; those of one kind
# have the same number, rounded up.


def mixed_costs(
    kinds: tuple[TrainingCase, TrainingCase],
    candidates: Candidates,
    *,
    memory_headroom_fraction: float,
) -> TrainingCosts:
    """Return the memory on the kind of GPU that is nearest to its capacity, and the step time of
    the pipeline.

    `kinds` lists the case on each kind of GPU and the number of devices of that kind, in the order
    of their stages.
    """
    c = _as_rows(candidates)
    layers, p = kinds[0].model.num_hidden_layers, c.pipeline_parallel_size
    first, second = stages_by_kind(kinds, c)

    def each_kind(layers: tuple[Floats, Floats]) -> list[TrainingCosts]:
        return [
            training_costs(
                case=kind,
                candidates=c,
                pipeline=pipeline,
                memory_headroom_fraction=memory_headroom_fraction,
            )
            for kind, pipeline in zip(kinds, _parts_by_kind(kinds, c, layers), strict=True)
        ]

    def split(on_first: Floats) -> TrainingCosts:
        """Return the pipeline with `on_first` layers on each stage of the first kind."""
        on_second = ceil((layers - first * on_first) / second)
        each = each_kind((on_first, on_second))
        costs, parts, slowest_s = _join_parts(each, _seconds_by_kind(kinds, c, each))
        bubble = _bubble(kinds, c, each, slowest_s=slowest_s)
        return replace(
            _with_times(costs, parts, bubble=bubble),
            layers_by_kind=(cast(FloatArray, on_first), cast(FloatArray, on_second)),
        )

    # An equal split gives the seconds per layer on each kind, including embedding and output layer.
    seconds = _seconds_by_kind(kinds, c, each_kind((layers / p, layers / p)))
    balanced = layers * seconds[1] / (first * seconds[1] + second * seconds[0])
    fewest = c.virtual_pipeline_parallel_size
    most_layers = maximum((layers - second * fewest) // first, fewest)
    down, up = (
        split(minimum(maximum(count, fewest), most_layers))
        for count in (floor(balanced), ceil(balanced))
    )
    better = (up.feasible > down.feasible) | (
        (up.feasible == down.feasible) & (up.step_s < down.step_s)
    )
    return _select_costs(better, up, down)


def stages_by_kind(kinds: Sequence[TrainingCase], c: Candidates) -> tuple[Ints, Ints]:
    """Return the number of stages on each kind, in proportion to its devices."""
    p = c.pipeline_parallel_size
    first = p * kinds[0].cluster.num_gpus // sum(kind.cluster.num_gpus for kind in kinds)
    return first, p - first


def _parts_by_kind(
    kinds: tuple[TrainingCase, TrainingCase], c: Candidates, layers: tuple[Floats, Floats]
) -> tuple[Pipeline, Pipeline]:
    """Return the part of the pipeline on each kind of GPU, with the given numbers of layers per
    stage.
    """
    model, (first, second) = kinds[0].model, stages_by_kind(kinds, c)
    return (
        pipeline_part(
            model,
            c,
            first_rank=0,
            layers_before=0.0,
            stages=first,
            layers=layers[0],
            embedding=True,
            output=False,
        ),
        pipeline_part(
            model,
            c,
            first_rank=first,
            layers_before=first * layers[0],
            stages=second,
            layers=layers[1],
            embedding=False,
            output=True,
        ),
    )


def _seconds_by_kind(
    kinds: tuple[TrainingCase, TrainingCase], c: Candidates, each: Sequence[TrainingCosts]
) -> list[Floats]:
    m = micro_batches(c, workload=kinds[0].workload)
    return [
        stage_seconds(one, profile=kind.profile, micro_batches=m)
        for one, kind in zip(each, kinds, strict=True)
    ]


def _bubble(
    kinds: tuple[TrainingCase, TrainingCase],
    c: Candidates,
    each: Sequence[TrainingCosts],
    *,
    slowest_s: Floats,
) -> Floats:
    """Return the time in seconds of one micro-batch on all stages except the slowest, divided by v,
    plus the transfers in both directions.

    The bubble of each part includes the time of all its stages and its transfers.
    """
    transfers = [
        2.0 * (c.pipeline_parallel_size - 1.0) * transfer_seconds(case=kind, candidates=c)
        for kind in kinds
    ]
    stages: Floats = sum(
        one.parts["pipeline_bubble"] - own for one, own in zip(each, transfers, strict=True)
    )
    return stages - slowest_s / c.virtual_pipeline_parallel_size + maximum(*transfers)


# Pipelines with a layout: stages with identical contents are costed once, as a part of one stage.
#
# Step time: the slowest stage runs m micro-batches. As with identical stages, the bubble is the
# time of one micro-batch on all other stages, divided by v. Not counted are the waits with
# interleaving if neighbouring ranks have different chunks but the same total, the lookup in the
# copy of the embedding for multi-token prediction, and the reduction of that copy's gradients.


class StageKind(NamedTuple):
    """A group of stages with identical contents."""

    ranks: float
    """Number of stages in the group."""
    rank: float
    """Rank of the group's first stage, which has the most micro-batches in flight."""
    extra_layers: float
    """Number of multi-token-prediction layers."""
    embedding: float
    embedding_copies: float
    output: float
    chunk_layers: float
    kinds: tuple[float, ...]
    """Number of layers of each kind, including multi-token prediction."""

    def pipeline(self, model: ModelSpec) -> Pipeline:
        """Return one stage of the group as a part of a pipeline."""
        layers = stage_of(model, self.kinds)
        stage = PipelineStage(
            rank=self.rank,
            layers=layers,
            chunk_layers=self.chunk_layers,
            embedding=self.embedding,
            embedding_copies=self.embedding_copies,
            output=self.output,
            extra_layers=self.extra_layers,
        )
        several = len(self.kinds) > 1
        return Pipeline(
            stages=(stage,),
            critical=replace(layers, count=maximum(layers.count, NO_LAYERS)),
            work=(StageWork(kinds=self.kinds, embedding=1.0, output=1.0),) if several else (),
            part=1,
            embedding=self.embedding,
            output=self.output,
        )


def laid_out_costs(
    case: TrainingCase,
    candidates: Candidates,
    *,
    layout: PipelineLayout,
    memory_headroom_fraction: float,
) -> TrainingCosts:
    """Return the costs of candidates whose number of chunks matches the layout."""
    c = _as_rows(candidates)
    kinds = _kinds(layout, c.pipeline_parallel_size, model=case.model)
    each = [
        training_costs(
            case=case,
            candidates=c,
            pipeline=kind.pipeline(case.model),
            memory_headroom_fraction=memory_headroom_fraction,
        )
        for kind in kinds
    ]
    m, v = micro_batches(c, workload=case.workload), c.virtual_pipeline_parallel_size
    seconds = [stage_seconds(one, profile=case.profile, micro_batches=m) for one in each]
    costs, parts, slowest_s = _join_parts(each, seconds)
    all_s: Floats = sum(kind.ranks * stage_s for kind, stage_s in zip(kinds, seconds, strict=True))
    # A stage's own bubble consists of its time and the transfers, which are equal for all stages.
    return _with_times(
        costs, parts, bubble=each[0].parts["pipeline_bubble"] + (all_s - slowest_s - seconds[0]) / v
    )


def _kinds(layout: PipelineLayout, stages: Ints, *, model: ModelSpec) -> list[StageKind]:
    """Return the groups of identical stages for each candidate's number of stages. If `stages` is
    an array, the fields are arrays too.

    Candidates with fewer groups than others repeat their last group with 0 ranks.
    """
    if not isinstance(stages, np.ndarray):
        return stage_kinds(layout, stages=int(stages), model=model)
    if not stages.size:
        return stage_kinds(layout, stages=len(layout.chunks), model=model)
    sizes, inverse = np.unique(stages, return_inverse=True)
    tables = [stage_kinds(layout, stages=int(p), model=model) for p in sizes]
    most_groups = max(len(table) for table in tables)
    padded = [
        table + [table[-1]._replace(ranks=0.0)] * (most_groups - len(table)) for table in tables
    ]
    return [_as_columns([table[k] for table in padded], inverse) for k in range(most_groups)]


def _as_columns(kinds: Sequence[StageKind], inverse: NDArray[np.intp]) -> StageKind:
    plain = len(StageKind._fields) - 1
    columns = np.array([(*kind[:plain], *kind.kinds) for kind in kinds])[inverse].T
    fields = dict(zip(StageKind._fields[:plain], columns, strict=False))
    return kinds[0]._replace(kinds=tuple(columns[plain:]), **fields)


def stage_kinds(layout: PipelineLayout, *, stages: int, model: ModelSpec) -> list[StageKind]:
    """Return the groups of identical stages in a pipeline of `stages` stages, in the order of their
    first ranks.
    """
    kinds: dict[tuple[Any, ...], StageKind] = {}
    for rank in range(stages):
        chunks = layout.stage(rank, stages=stages)
        contents = (
            _counts(model, chunks),
            *((chunk.embedding, chunk.layers, chunk.mtp_layers, chunk.loss) for chunk in chunks),
        )
        kind = kinds.get(contents)
        kinds[contents] = (
            kind._replace(ranks=kind.ranks + 1) if kind else _kind(model, chunks, rank, stages)
        )
    return list(kinds.values())


def rank_contents(layout: PipelineLayout, *, rank: int, stages: int, model: ModelSpec) -> StageKind:
    """Return the contents of one rank in a pipeline of `stages` stages."""
    return _kind(model, layout.stage(rank, stages=stages), rank, stages)


def _kind(model: ModelSpec, chunks: tuple[LayoutChunk, ...], rank: int, stages: int) -> StageKind:
    embedding, output, extra = (
        sum(getattr(chunk, name) for chunk in chunks)
        for name in ("embedding", "loss", "mtp_layers")
    )
    # If weights are tied, the output layer stores the copy.
    copied = extra > 0 and not (model.tie_word_embeddings and output)
    return StageKind(
        ranks=1.0,
        rank=rank,
        extra_layers=extra,
        embedding=embedding,
        embedding_copies=max(embedding, copied),
        output=output,
        kinds=_counts(model, chunks),
        chunk_layers=_layers_in_flight(
            [chunk.layers + chunk.mtp_layers for chunk in chunks], rank, stages
        ),
    )


def _counts(model: ModelSpec, chunks: tuple[LayoutChunk, ...]) -> tuple[float, ...]:
    if len(model.kinds) == 1:
        return (float(sum(chunk.layers + chunk.mtp_layers for chunk in chunks)),)
    counts = [float(sum(chunk.mtp_layers for chunk in chunks) * count) for count in model.mtp_kinds]
    for chunk in chunks:
        for kind in model.pattern[chunk.layers_before : chunk.layers_before + chunk.layers]:
            counts[kind] += 1.0
    return tuple(counts)


def _layers_in_flight(layers: list[int], rank: int, stages: int) -> float:
    """Return the mean number of layers in the chunks that `schedules.bubble.chunks_in_flight`
    counts.

    When the first backward pass of the last chunk begins, p micro-batches have passed through each
    chunk except the last, and 2(p - r - 1) + 1 more follow. Those in excess of p are in the first
    chunk.
    """
    more = 2 * (stages - rank - 1) + 1
    passes = [stages] * (len(layers) - 1) + [min(more, stages)]
    passes[0] += max(more - stages, 0)
    if len(layers) == 1:
        return float(layers[0])
    return sum(
        count * layers_held for count, layers_held in zip(passes, layers, strict=True)
    ) / sum(passes)
