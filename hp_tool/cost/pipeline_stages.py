"""Representative stages of each candidate's pipeline, which determine memory and time."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from hp_tool.cost.arrays import Bools, Floats, Ints, anywhere, maximum, minimum, where
from hp_tool.cost.candidates import DUALPIPE, ZBV, Candidates
from hp_tool.cost.case import TrainingCase
from hp_tool.cost.dense_layers import DenseLayers, dense_layers, has_both_kinds
from hp_tool.cost.filled_stages import split_candidates
from hp_tool.cost.shared import Shared
from hp_tool.domain.frameworks import framework_facts
from hp_tool.domain.model import ModelSpec
from hp_tool.domain.pipeline_layout import stage_layers, v_stage_layers

NO_LAYERS = 1e-9
"""Number of layers assumed for an empty stage, because formulas divide by the number of layers."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StageLayers:
    """Number of layers of one stage, by kind; shape (n,) or common to all candidates."""

    count: Floats
    """Number of layers, including those of multi-token prediction."""
    expert_share: Floats = 0.0
    """Fraction of the layers with experts."""
    kinds: tuple[Floats, ...] = ()
    """For a model with `blocks`: number of layers of each kind."""

    def sum(self, *, dense: Floats, more: Floats) -> Floats:
        """Return the sum of a quantity over the layers: `dense` per layer, plus `more` per layer
        with experts.
        """
        return self.count * (dense + self.expert_share * more)


def stage_of(model: ModelSpec, counts: Sequence[Floats]) -> StageLayers:
    """Return the layers of a stage with these numbers of layers of each kind."""
    count = maximum(sum(counts, 0.0), NO_LAYERS)
    with_experts: Floats = sum(
        layers for layers, (_, kind) in zip(counts, model.kinds, strict=True) if kind.num_experts
    )
    return StageLayers(count=count, expert_share=with_experts / count, kinds=tuple(counts))


@dataclass(frozen=True, slots=True, kw_only=True)
class PipelineStage:
    """One stage of each candidate's pipeline; shape (n,) or common to all candidates."""

    rank: Ints | Floats
    """Pipeline rank, 0-based."""
    layers: StageLayers
    mirrored: StageLayers | None = None
    """Layers of another stage whose weights this stage stores too (DualPipe)."""
    chunk_layers: Floats
    """Layers of one model chunk: the mean over the chunks whose activations the stage stores at its
    peak.
    """
    embedding: Bools | Ints | Floats
    """1 if the stage has the embedding, else 0."""
    embedding_copies: Bools | Ints | Floats
    """Copies of the embedding's weights: multi-token prediction needs one with the output layer
    (Megatron Core, gpt_model.py), unless the output layer's weights are the copy.
    """
    output: Bools | Ints | Floats
    """1 if the stage has the output layer and loss, else 0."""
    extra_layers: Ints | Floats
    """Layers of multi-token prediction on the stage, each with a projection and two norms."""

    def layer_sum(self, *, dense: Floats, more: Floats) -> Floats:
        """Return `StageLayers.sum` over all layers whose weights the stage stores."""
        own = self.layers.sum(dense=dense, more=more)
        return own if self.mirrored is None else own + self.mirrored.sum(dense=dense, more=more)

    def kinds_sum(self, of_kinds: Sequence[Floats]) -> Floats:
        """Return the sum over all layers of a quantity given for each kind of layer."""
        counted = zip(self.layers.kinds, of_kinds, strict=True)
        return sum(
            (
                count * value
                for count, value in counted
                if not (isinstance(count, float) and count == 0.0)
            ),
            0.0,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Pipeline:
    """Representative stages of each candidate's pipeline, or of a part of it.

    All stages except the first and last have equally many layers.
    """

    stages: tuple[PipelineStage, ...]
    """The first stage and the one with the output layer (the same stage if there is only one).

    If these have fewer layers, the list also contains the fullest stages between them: the second
    and the last but one. The second has one micro-batch fewer in flight than the first but may have
    one layer more (Llama 3.1 405B at TP 8 and PP 16 needs 6% more memory there). With two kinds of
    layers, they are the stages of `dense_layers.fullest_ranks`.
    """
    critical: StageLayers
    """Layers of the slowest stage: one between the ends, if there is any; with two kinds of layers,
    the full stage with the fewest dense layers.
    """
    dense: DenseLayers | None = None
    """Positions of the dense layers if other layers have experts, which determine the slowest
    stage; None for layers of one kind.
    """
    fewer_first: Floats | Ints = 0
    """Number of layers by which the first stage has fewer than `critical`; for layers of different
    cost, the equivalent number of mean layers.
    """
    fewer_last: Floats | Ints = 0
    """The same for the stage with the output layer."""
    fewer: Floats | Ints = 0
    """The same for all stages together."""
    part: Floats | Ints | None = None
    """Number of stages of the part; None for the whole pipeline."""
    embedding: Bools | Floats = 1
    """0 if the part does not start with the embedding."""
    output: Bools | Floats = 1
    """0 if the part does not end with the output layer."""
    depths: Floats | Ints = 0
    """Depths of multi-token prediction on the output layer's stage that `critical` does not
    include.
    """

    @property
    def ends(self) -> tuple[PipelineStage, ...]:
        """The stages with the most weights; those between them have fewer layers or neither end of
        the model.
        """
        return self.stages[:2]

    def between(self, c: Candidates) -> Bools:
        """Whether there are stages between the ends, so that stages[2:] count."""
        lie: Bools = (c.pipeline_parallel_size > 2) & (c.pipeline_schedule != ZBV)
        return lie


_pipelines: Shared[Pipeline] = Shared()


def whole_pipeline(case: TrainingCase, c: Candidates) -> Pipeline:
    """Return the stages of the whole pipeline, with L/p layers each.

    If p v does not divide L, some stages have fewer layers, starting with the ends
    (`domain.pipeline_layout`); those in between count as full. If the framework balances blocks,
    stages are divided by weight.
    """
    if not c.is_alone:
        return _whole_pipeline(case, c)
    sizes = (c.pipeline_parallel_size, c.virtual_pipeline_parallel_size, c.pipeline_schedule)
    return _pipelines.get(
        (case.model,), (case.workload.framework, *sizes), lambda: _whole_pipeline(case, c)
    )


def _whole_pipeline(case: TrainingCase, c: Candidates) -> Pipeline:
    model, p, depths = case.model, c.pipeline_parallel_size, case.model.num_nextn_predict_layers
    framework = framework_facts(case.workload.framework)
    if framework.balances_blocks:
        return _filled_pipeline(model, c)
    chunks = c.virtual_pipeline_parallel_size
    split: dict[str, Any] = {"num_layers": model.total_layers, "stages": p, "chunks": chunks}
    split["begins_dense"] = model.begins_dense
    on_ends = stage_layers(**split, late=framework.late_layers)
    if c.names_schedules:  # In a V, the first and the last chunk are on the same rank.
        on_v_ends = v_stage_layers(**split)
        on_ends = tuple(
            where(c.is_v, folded, plain) for folded, plain in zip(on_v_ends, on_ends, strict=True)
        )
    first_layers, last_layers, each = on_ends
    fewer_first, fewer_last, fewer = (
        each - first_layers,
        each - last_layers,
        p * each - model.total_layers,
    )
    # Multi-token prediction runs with the output layer, which ZB-V has on its first rank.
    on_v = depths * c.is_v if depths else 0
    counts = each - fewer_first + ((p == 1) * depths + on_v), each - fewer_last + (depths - on_v)
    dense = dense_layers(model, c, late=framework.late_layers) if has_both_kinds(model) else None
    first, last = (
        _layers_of_kinds(model, count, dense=leading)
        for count, leading in zip(
            counts, (dense.first, dense.last) if dense else (0, 0), strict=True
        )
    )
    fewest = (
        0 if dense is None else where(dense.between, dense.fewest, minimum(dense.first, dense.last))
    )
    stages: tuple[PipelineStage, ...] = whole_ends(model, c, (first, last))
    if anywhere(((fewer_first > 0) | (dense is not None)) & (p > 2) & (c.pipeline_schedule != ZBV)):
        stages = (*stages, *_between_ends(model, c, each, dense=dense))
    return Pipeline(
        stages=stages,
        critical=_layers_of_kinds(model, each, dense=fewest),
        dense=dense,
        fewer_first=fewer_first,
        fewer_last=fewer_last,
        fewer=fewer,
        depths=depths,
    )


def _between_ends(
    model: ModelSpec, c: Candidates, each: Floats, *, dense: DenseLayers | None
) -> tuple[PipelineStage, ...]:
    """Return the fullest stages between the ends, with `each` layers."""
    if dense is None:
        middle = maximum(c.pipeline_parallel_size - 2, 1)
        return pipeline_part(
            model, c, first_rank=1, layers_before=0.0, stages=middle, layers=each
        ).stages
    return tuple(
        PipelineStage(
            rank=stage.rank,
            layers=_layers_of_kinds(model, each, dense=stage.dense),
            mirrored=_mirrored_layers(c, _layers_of_kinds(model, each, dense=stage.mirrored)),
            chunk_layers=each / c.virtual_pipeline_parallel_size,
            embedding=0,
            embedding_copies=0,
            output=0,
            extra_layers=0,
        )
        for stage in dense.fullest
    )


def pipeline_part(
    model: ModelSpec,
    c: Candidates,
    *,
    first_rank: Ints | Floats,
    layers_before: Floats,
    stages: Ints | Floats,
    layers: Floats,
    dense: Floats | None = None,
    embedding: bool | int = 0,
    output: bool | int = 0,
) -> Pipeline:
    """Return consecutive stages of a pipeline, with `layers` layers each.

    `dense` of these layers have no experts; None: as many as are leading dense layers of the model
    after the first `layers_before` layers. `embedding` and `output` state whether the part starts
    and ends the model.
    """
    depths = model.num_nextn_predict_layers if output else 0
    alone = stages == 1
    kinds = None
    if has_both_kinds(model):
        left = maximum(model.num_hidden_layers - model.moe_layers - layers_before, 0)
        on_first, on_last = (
            minimum(maximum(left - place * layers, 0), layers) for place in (0, stages - 1)
        )
        if dense is not None:
            on_first = on_last = left = dense
        kinds = DenseLayers(
            first=on_first,
            last=on_last,
            between=False,
            full=layers,
            most=on_first,
            fewest=on_last,
            total=minimum(left, stages * layers),
        )
    first, last = (
        _layers_of_kinds(model, layers + extra, dense=leading)
        for extra, leading in zip(
            (alone * depths, depths), (kinds.first, kinds.last) if kinds else (0, 0), strict=True
        )
    )
    return Pipeline(
        stages=_ends(
            model,
            c,
            (first, last),
            ranks=(first_rank, first_rank + stages - 1),
            embedding=(embedding, alone * embedding),
            output=(alone * output, output),
        ),
        critical=StageLayers(count=layers, expert_share=last.expert_share),
        dense=kinds,
        part=stages,
        embedding=embedding,
        output=output,
        depths=model.num_nextn_predict_layers,
    )


def _mirrored_layers(c: Candidates, layers: StageLayers) -> StageLayers | None:
    """Return the layers of the mirrored stage, which DualPipe stores too; None under other
    schedules.
    """
    if not (c.names_schedules and anywhere(c.pipeline_schedule == DUALPIPE)):
        return None
    return StageLayers(
        count=(c.pipeline_schedule == DUALPIPE) * layers.count, expert_share=layers.expert_share
    )


def _layers_of_kinds(model: ModelSpec, count: Floats, *, dense: Floats) -> StageLayers:
    """Return a stage of `count` layers, including multi-token prediction, of which `dense` have no
    experts.
    """
    if not model.num_experts:
        return StageLayers(count=count)
    return StageLayers(count=count, expert_share=1.0 - dense / maximum(count, NO_LAYERS))


def whole_ends(
    model: ModelSpec,
    c: Candidates,
    layers: tuple[StageLayers, StageLayers],
    *,
    output_from_end: Ints = 0,
) -> tuple[PipelineStage, PipelineStage]:
    """Return the stage with the embedding and the stage with the output layer.

    Without a pipeline they are the same. In a folded pipeline, both ends of the model are on the
    first rank, and under DualPipe also on the last.
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
    """Return two stages with these layers; under DualPipe, each also stores the layers of the
    other.
    """
    chunks, depths = c.virtual_pipeline_parallel_size, model.num_nextn_predict_layers
    counts = layers[0].count, layers[1].count
    if c.names_schedules:  # Micro-batches in flight are on either stage.
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
    """Return a pipeline whose dense layers and output layer are divided by weight."""
    p, split = c.pipeline_parallel_size, split_candidates(model, c.pipeline_parallel_size)
    first, last = StageLayers(count=split.first), StageLayers(count=split.output)
    return Pipeline(
        stages=whole_ends(model, c, (first, last), output_from_end=split.output_from_end),
        critical=StageLayers(count=split.most),
        fewer_first=split.most - split.first,
        fewer_last=split.most - split.output,
        fewer=p * split.most - model.num_hidden_layers,
        depths=model.num_nextn_predict_layers,
    )
