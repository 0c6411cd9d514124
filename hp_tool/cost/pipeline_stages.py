"""Representative stages of each candidate's pipeline. They determine memory and step time."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple, TypeVar

from hp_tool.cost.arrays import Bools, Floats, Ints, anywhere, maximum, minimum, where
from hp_tool.cost.block import LayerBytes, LayerTime
from hp_tool.cost.candidates import DUALPIPE, ZBV, Candidates
from hp_tool.cost.case import TrainingCase
from hp_tool.cost.filled_stages import split_candidates
from hp_tool.cost.shared import Shared
from hp_tool.cost.stage_contents import Between, Contents, Kinds, pipeline_contents
from hp_tool.domain.frameworks import framework_facts
from hp_tool.domain.model import ModelSpec
from hp_tool.domain.pipeline_layout import stage_layers, v_stage_layers

Columns = TypeVar("Columns", LayerBytes, LayerTime)
NO_LAYERS = 1e-9
"""Number of layers assumed for an empty stage. It is not 0, because formulas divide by the number
of layers.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class StageLayers:
    """Layers of one stage; shape (n,), or plain numbers common to all candidates."""

    count: Floats
    """Number of layers, including multi-token-prediction layers."""
    kinds: Kinds
    """Number of layers of each kind."""
    expert_share: Floats
    """Fraction of the layers with experts."""

    def sum(self, of_kinds: Sequence[Floats]) -> Floats:
        """Return the sum of a per-layer quantity over the stage's layers. `of_kinds` has its value
        for each kind of layer.
        """
        return sum(
            (
                count * value
                for count, value in zip(self.kinds, of_kinds, strict=True)
                if not (isinstance(count, float) and count == 0.0)
            ),
            0.0,
        )

    def times(self, number: Floats) -> StageLayers:
        """Multiply the number of layers by `number`."""
        return StageLayers(
            count=number * self.count,
            kinds=tuple(number * count for count in self.kinds),
            expert_share=self.expert_share,
        )


def stage_of(model: ModelSpec, counts: Sequence[Floats]) -> StageLayers:
    """Build a stage from its layer count per layer kind."""
    kinds = [kind for _, kind in model.kinds]
    if len(kinds) == 1:
        (count,) = counts
        return StageLayers(
            count=count, kinds=(count,), expert_share=1.0 if kinds[0].num_experts else 0.0
        )
    count = maximum(sum(counts, 0.0), NO_LAYERS)
    with_experts: Floats = sum(
        layers for layers, kind in zip(counts, kinds, strict=True) if kind.num_experts
    )
    return StageLayers(count=count, expert_share=with_experts / count, kinds=tuple(counts))


def mean_layer(kinds: Sequence[Columns], layers: StageLayers) -> Columns:
    """Return the mean of a stage's layers; `kinds` has one layer of each kind."""
    if len(kinds) == 1:
        return kinds[0]
    shares = [
        (count / layers.count, kind)
        for count, kind in zip(layers.kinds, kinds, strict=True)
        if not (isinstance(count, float) and count == 0.0)
    ]
    return type(kinds[0])(
        **{
            name: sum((share * getattr(kind, name) for share, kind in shares), 0.0)
            for name in kinds[0].__slots__
        }
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class PipelineStage:
    """One stage of each candidate's pipeline; shape (n,) or common to all candidates."""

    rank: Ints | Floats
    """Pipeline rank, 0-based."""
    layers: StageLayers
    mirrored: StageLayers | None = None
    """Layers of the mirrored stage, whose weights this stage stores too (DualPipe)."""
    chunk_layers: Floats
    """Layers of one model chunk: the mean over the chunks whose activations the stage stores at its
    peak.
    """
    embedding: Bools | Ints | Floats
    """1 if the stage has the embedding, else 0."""
    embedding_copies: Bools | Ints | Floats
    """Number of copies of the embedding's weights. Multi-token prediction needs one on the stage of
    the output layer (Megatron Core, gpt_model.py), unless the output layer's weights are the copy.
    """
    output: Bools | Ints | Floats
    """1 if the stage has the output layer and loss, else 0."""
    extra_layers: Ints | Floats
    """Number of multi-token-prediction layers on the stage. Each has a projection and two norms in
    addition.
    """

    def layer_sum(self, of_kinds: Sequence[Floats]) -> Floats:
        """Return `StageLayers.sum` over all layers whose weights the stage stores."""
        own = self.layers.sum(of_kinds)
        return own if self.mirrored is None else own + self.mirrored.sum(of_kinds)


@dataclass(frozen=True, slots=True, kw_only=True)
class StageWork:
    """Work of one stage for a micro-batch; shape (n,), or plain numbers common to all
    candidates.
    """

    kinds: Kinds
    """Number of layers of each kind that the stage runs, including multi-token prediction. Under
    DualPipe, it is half of the layers of both stages.
    """
    embedding: Floats
    """Fraction of the micro-batches for which the stage runs the embedding."""
    output: Floats
    ranks: Floats | Bools = 1
    """Number of stages with identical work."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Pipeline:
    """Representative stages of each candidate's pipeline, or of a part of it.

    All stages except the first and last have equally many layers.
    """

    stages: tuple[PipelineStage, ...]
    """The first stage and the stage with the output layer (the same stage if the part has only
    one).

    If these have fewer layers than other stages, the fullest stages between them are included, too.
    These are the last but one, and the second stage, which has one micro-batch in flight fewer than
    the first but may have one layer more (Llama 3.1 405B at TP 8 and PP 16 needs 6% more memory
    there). With several kinds of layers, the stages that `_fullest` returns are included.
    """
    critical: StageLayers
    """Layers of a stage with the maximum number of layers. This is a stage between the first and
    the last, if there is one.
    """
    work: tuple[StageWork, ...] = ()
    """The work of all stages, with identical stages grouped. Empty if all layers are of one kind,
    because `critical` is then the slowest stage.
    """
    fewer_first: Floats | Ints = 0
    """Difference in number of layers between `critical` and the first stage, if all layers are of
    one kind.
    """
    fewer_last: Floats | Ints = 0
    """Difference in number of layers between `critical` and the stage with the output layer."""
    fewer: Floats | Ints = 0
    """Sum of this difference over all stages."""
    part: Floats | Ints | None = None
    """Number of stages of the part; None for the complete pipeline."""
    embedding: Bools | Floats = 1
    """0 if the part does not start with the embedding."""
    output: Bools | Floats = 1
    """0 if the part does not end with the output layer."""
    depths: Floats | Ints = 0
    """Number of multi-token-prediction depths on the stage with the output layer that `critical`
    does not include.
    """

    @property
    def ends(self) -> tuple[PipelineStage, ...]:
        """Return the stages with the most weights. The stages between them have fewer layers, or
        neither the embedding nor the output layer.
        """
        return self.stages[:2]


class LayerSizes(NamedTuple):
    """Sizes of a layer of each kind on one rank."""

    saved: Sequence[Floats]
    """Activation bytes saved for one micro-batch."""
    parameters: Sequence[Floats]


MAX_BETWEEN = 4
"""Maximum number of stages between the first and the last whose memory is computed."""
_pipelines: Shared[Pipeline] = Shared()


def complete_pipeline(
    case: TrainingCase, c: Candidates, *, sizes: LayerSizes | None = None
) -> Pipeline:
    """Return the stages of the complete pipeline, with L/p layers each.

    If p v does not divide L, some stages have fewer layers, starting with the first and the last
    (`domain.pipeline_layout`). If all layers are identical, the stages between them count as full.
    If the framework balances blocks, stages have equal weight. With several kinds of layers,
    `sizes` determines which stages may be the fullest; without `sizes`, all stages are returned.
    """
    if not c.is_alone or len(case.model.kinds) > 1:
        return _complete_pipeline(case, c, sizes)
    axes = (c.pipeline_parallel_size, c.virtual_pipeline_parallel_size, c.pipeline_schedule)
    return _pipelines.get(
        (case.model,), (case.workload.framework, *axes), lambda: _complete_pipeline(case, c, None)
    )


def _complete_pipeline(case: TrainingCase, c: Candidates, sizes: LayerSizes | None) -> Pipeline:
    model, p = case.model, c.pipeline_parallel_size
    framework = framework_facts(case.workload.framework)
    if framework.balances_blocks:
        return _filled_pipeline(model, c)
    chunks = c.virtual_pipeline_parallel_size
    split: dict[str, Any] = {"num_layers": model.total_layers, "stages": p, "chunks": chunks}
    split["begins_dense"] = model.begins_dense
    on_ends = stage_layers(**split, late=framework.late_layers)
    if c.names_schedules:  # in a V the first and the last chunks are on the same ranks
        on_v_ends = v_stage_layers(**split)
        on_ends = tuple(
            where(c.is_v, folded, plain) for folded, plain in zip(on_v_ends, on_ends, strict=True)
        )
    if len(model.kinds) > 1:
        contents = pipeline_contents(model, c, late=framework.late_layers)
        return _pipeline_with_contents(model, c, contents, sizes=sizes, each=on_ends[2])
    first_layers, last_layers, each = on_ends
    fewer_first, fewer_last, fewer = (
        each - first_layers,
        each - last_layers,
        p * each - model.total_layers,
    )
    depths = model.num_nextn_predict_layers
    on_first, on_last = _prediction_layers(model, c)
    first = stage_of(model, [each - fewer_first + on_first])
    last = stage_of(model, [each - fewer_last + on_last])
    stages: tuple[PipelineStage, ...] = whole_ends(model, c, (first, last))
    if anywhere((fewer_first > 0) & (p > 2) & (c.pipeline_schedule != ZBV)):
        middle = maximum(p - 2, 1)
        fullest = pipeline_part(
            model, c, first_rank=1, layers_before=0.0, stages=middle, layers=each
        )
        stages = (*stages, *fullest.stages)
    return Pipeline(
        stages=stages,
        critical=stage_of(model, [each]),
        fewer_first=fewer_first,
        fewer_last=fewer_last,
        fewer=fewer,
        depths=depths,
    )


def _prediction_layers(model: ModelSpec, c: Candidates) -> tuple[Floats | Ints, Floats | Ints]:
    """Return the number of multi-token-prediction layers on the first and on the last stage.

    They are on the stage with the output layer, which is on the first rank under ZB-V.
    """
    depths = model.num_nextn_predict_layers
    on_v = depths * c.is_v if depths else 0
    return (c.pipeline_parallel_size == 1) * depths + on_v, depths - on_v


# Models with several kinds of layers: which stage is slowest or fullest depends on its contents.


def _pipeline_with_contents(
    model: ModelSpec,
    c: Candidates,
    contents: Contents,
    *,
    sizes: LayerSizes | None,
    each: Floats,
) -> Pipeline:
    """Return the pipeline with these stage contents. `each` is the number of layers of its fullest
    stage.
    """
    p, dual = c.pipeline_parallel_size, _is_dual(c)
    depths, mtp = model.num_nextn_predict_layers, model.mtp_kinds
    ends = tuple(
        stage_of(
            model, [count + extra * of_kind for count, of_kind in zip(counts, mtp, strict=True)]
        )
        for counts, extra in zip(
            (contents.first, contents.last), _prediction_layers(model, c), strict=True
        )
    )
    stages: tuple[PipelineStage, ...] = whole_ends(model, c, (ends[0], ends[1]))
    if anywhere(pipeline_between(c)):
        stages = (
            *stages,
            *(_stage_between(model, c, stage) for stage in _fullest(model, c, contents, sizes)),
        )
    output_first: Floats = 1.0 * (p == 1)
    work_share: Floats = 1.0
    first, last = contents.first, contents.last
    if c.names_schedules:
        halves = dual & (p > 1)
        work_share = where(halves, 0.5, 1.0)
        output_first = where(halves, 0.5, where(c.is_v, 1.0, output_first))
        middle = _mean_of(first, last)
        first, last = _select(halves, middle, first), _select(halves, middle, last)

    def end(kinds: Kinds, embedding: Floats, output: Floats, ranks: Bools = True) -> StageWork:
        with_depths = tuple(
            count + output * (depths * of_kind) if depths and of_kind else count
            for count, of_kind in zip(kinds, mtp, strict=True)
        )
        return StageWork(kinds=with_depths, embedding=embedding, output=output, ranks=ranks)

    def between(stage: Between) -> StageWork:
        kinds = stage.layers
        if c.names_schedules:
            kinds = _select(dual, _mean_of(kinds, stage.mirrored), kinds)
        return StageWork(kinds=kinds, embedding=0.0, output=0.0, ranks=stage.ranks)

    critical = stage_of(model, contents.fullest)
    return Pipeline(
        stages=stages,
        critical=replace(critical, count=each),
        work=(
            end(first, work_share, output_first),
            end(last, 1.0 - work_share, 1.0 - output_first, p > 1),
            *map(between, contents.between),
        ),
        depths=depths,
    )


def _fullest(
    model: ModelSpec, c: Candidates, contents: Contents, sizes: LayerSizes | None
) -> Sequence[Between]:
    """Return the stages between the first and the last that may need the most memory.

    If there are many, two are returned: the stage with the most activations (rank r stores those of
    p - r micro-batches), and the stage with the most weights, which is the fullest with full
    recomputation.
    """
    if sizes is None or len(contents.between) <= MAX_BETWEEN:
        return contents.between

    def largest(size: Callable[[Between], Floats]) -> Between:
        best = contents.between[0]
        for stage in contents.between[1:]:
            fuller = size(stage) > size(best)
            best = Between(
                rank=where(fuller, stage.rank, best.rank),
                layers=_select(fuller, stage.layers, best.layers),
                mirrored=_select(fuller, stage.mirrored, best.mirrored),
                ranks=best.ranks,
            )
        return best

    def activations(stage: Between) -> Floats:
        return (c.pipeline_parallel_size - stage.rank) * stage_of(model, stage.layers).sum(
            sizes.saved
        )

    return [
        largest(activations),
        largest(lambda stage: stage_of(model, stage.layers).sum(sizes.parameters)),
    ]


def _select(condition: Bools, one: Kinds, other: Kinds) -> Kinds:
    return tuple(where(condition, *each) for each in zip(one, other, strict=True))


def _mean_of(one: Kinds, other: Kinds) -> Kinds:
    return tuple(0.5 * (count + more) for count, more in zip(one, other, strict=True))


def _stage_between(model: ModelSpec, c: Candidates, stage: Between) -> PipelineStage:
    own = stage_of(model, stage.layers)
    mirrored = _mirrored_layers(c, stage_of(model, stage.mirrored))
    count = own.count
    if mirrored is not None:
        count = where(_is_dual(c), 0.5 * (own.count + mirrored.count), own.count)
    return PipelineStage(
        rank=stage.rank,
        layers=own,
        mirrored=mirrored,
        chunk_layers=count / c.virtual_pipeline_parallel_size,
        embedding=0,
        embedding_copies=0,
        output=0,
        extra_layers=0,
    )


def _is_dual(c: Candidates) -> Bools:
    dual: Bools = c.pipeline_schedule == DUALPIPE
    return dual


def pipeline_between(c: Candidates) -> Bools:
    """Return whether there are stages between the first and the last."""
    lie: Bools = (c.pipeline_parallel_size > 2) & (c.pipeline_schedule != ZBV)
    return lie


# Parts of a pipeline.


def pipeline_part(
    model: ModelSpec,
    c: Candidates,
    *,
    first_rank: Ints | Floats,
    layers_before: Floats,
    stages: Ints | Floats,
    layers: Floats,
    kinds: Kinds | None = None,
    embedding: bool | int = 0,
    output: bool | int = 0,
) -> Pipeline:
    """Return consecutive stages of a pipeline, with `layers` layers each.

    `kinds` is the number of layers of each kind on a single stage. If None, the layers are those
    after the first `layers_before` layers of a model whose first layers are dense. `embedding` and
    `output` are 1 if the part includes the model's embedding and output layer.
    """
    depths = model.num_nextn_predict_layers if output else 0
    alone = stages == 1
    contents: list[Kinds] = [(layers,), (layers,)]
    predicted: tuple[int, ...] = (1,)
    if len(model.kinds) > 1:
        predicted = model.mtp_kinds
        contents = [
            kinds or _leading_kinds(model, layers_before + place * layers, layers)
            for place in (0, stages - 1)
        ]
    first, last = (
        stage_of(
            model,
            [count + extra * of_kind for count, of_kind in zip(counts, predicted, strict=True)],
        )
        for counts, extra in zip(contents, (alone * depths, depths), strict=True)
    )
    part = Pipeline(
        stages=_ends(
            model,
            c,
            (first, last),
            ranks=(first_rank, first_rank + stages - 1),
            embedding=(embedding, alone * embedding),
            output=(alone * output, output),
        ),
        critical=replace(stage_of(model, contents[1]), count=layers),
        part=stages,
        embedding=embedding,
        output=output,
        depths=model.num_nextn_predict_layers,
    )
    if len(model.kinds) == 1:
        return part
    whole, between = 1.0 * alone, maximum(stages - 2, 0)
    total = kinds or _leading_kinds(model, layers_before, stages * layers)
    middle = tuple(
        maximum(count - one - (1 - alone) * other, 0.0) / maximum(between, 1)
        for count, one, other in zip(total, *contents, strict=True)
    )
    return replace(
        part,
        work=(
            StageWork(kinds=first.kinds, embedding=1.0, output=whole),
            StageWork(kinds=last.kinds, embedding=0.0, output=1.0 - whole, ranks=stages > 1),
            StageWork(kinds=middle, embedding=0.0, output=0.0, ranks=between),
        ),
    )


def _leading_kinds(model: ModelSpec, before: Floats, layers: Floats) -> Kinds:
    """Return the number of layers of each kind among `layers` layers that follow the first `before`
    layers. The model's first layers are dense.
    """
    leading = model.num_hidden_layers - model.moe_layers
    dense = minimum(maximum(leading - before, 0.0), layers)
    return dense, layers - dense


def _mirrored_layers(c: Candidates, layers: StageLayers) -> StageLayers | None:
    """Return the layers of the mirrored stage, which DualPipe stores in addition; None under other
    schedules.
    """
    if not (c.names_schedules and anywhere(_is_dual(c))):
        return None
    return layers.times(1.0 * _is_dual(c))


def whole_ends(
    model: ModelSpec,
    c: Candidates,
    layers: tuple[StageLayers, StageLayers],
    *,
    output_from_end: Ints = 0,
) -> tuple[PipelineStage, PipelineStage]:
    """Return the stage with the embedding and the stage with the output layer.

    Without a pipeline, they are the same stage. In a folded pipeline, embedding and output layer
    are on the first rank, and under DualPipe also on the last.
    """
    p = c.pipeline_parallel_size
    alone: Bools = p == 1
    embedding: tuple[Bools, Bools] = (True, alone)
    output: tuple[Bools, Bools] = (alone, True)
    if c.names_schedules:
        embedding = (True, alone | (c.pipeline_schedule == DUALPIPE))
        output = (alone | c.is_folded, c.is_v ^ True)
    return _ends(
        model, c, layers, ranks=(0, p - 1 - output_from_end), embedding=embedding, output=output
    )


def _ends(
    model: ModelSpec,
    c: Candidates,
    layers: tuple[StageLayers, StageLayers],
    *,
    ranks: tuple[Ints | Floats, Ints | Floats],
    embedding: tuple[Bools | Ints, Bools | Ints],
    output: tuple[Bools | Ints, Bools | Ints],
) -> tuple[PipelineStage, PipelineStage]:
    """Return two stages with these layers; under DualPipe, each also stores the layers of the other
    stage.
    """
    chunks, depths = c.virtual_pipeline_parallel_size, model.num_nextn_predict_layers
    counts = layers[0].count, layers[1].count
    if c.names_schedules:  # micro-batches in flight are on either stage
        dual, mean = c.pipeline_schedule == DUALPIPE, 0.5 * (counts[0] + counts[1])
        counts = where(dual, mean, counts[0]), where(dual, mean, counts[1])
    copied = bool(depths) and not model.tie_word_embeddings
    first, last = (
        PipelineStage(
            rank=ranks[end],
            layers=layers[end],
            mirrored=_mirrored_layers(c, layers[1 - end]),
            chunk_layers=counts[end] / chunks,
            embedding=embedding[end],
            embedding_copies=maximum(embedding[end], output[end] * copied),
            output=output[end],
            extra_layers=output[end] * depths,
        )
        for end in (0, 1)
    )
    return first, last


def _filled_pipeline(model: ModelSpec, c: Candidates) -> Pipeline:
    """Return a pipeline whose layers and output layer are split into stages of equal weight."""
    p, split = c.pipeline_parallel_size, split_candidates(model, c.pipeline_parallel_size)
    first, last = stage_of(model, [split.first]), stage_of(model, [split.output])
    return Pipeline(
        stages=whole_ends(model, c, (first, last), output_from_end=split.output_from_end),
        critical=stage_of(model, [split.most]),
        fewer_first=split.most - split.first,
        fewer_last=split.most - split.output,
        fewer=p * split.most - model.num_hidden_layers,
        depths=model.num_nextn_predict_layers,
    )
