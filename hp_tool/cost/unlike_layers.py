"""Models whose layers differ (`ModelSpec.blocks`): what each pipeline stage holds by kind of layer, and its mean layer.

Layers lie on stages in order, as many on each as `domain.pipeline_layout` says of any model. Each kind of layer is costed once
for a combination of the few axes it depends on, and each pipeline is laid out once, so that a candidate costs as much with a
hundred layers as with ten.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass, fields, is_dataclass
from itertools import accumulate
from typing import Any, NamedTuple, TypeVar

import numpy as np
from numpy.typing import NDArray

from hp_tool.cost.arrays import Floats, Ints, anywhere, where
from hp_tool.cost.block import LayerBytes, LayerTime, spreading_axes
from hp_tool.cost.candidates import Candidates, unique_rows
from hp_tool.cost.case import TrainingCase
from hp_tool.cost.embedding_and_head import HeadTime
from hp_tool.cost.model_layers import ModelLayers, layer_kinds, spread
from hp_tool.cost.model_states import layer_on_rank
from hp_tool.cost.pipeline_stages import Pipeline, PipelineStage, StageLayers, stage_of, whole_ends
from hp_tool.cost.recomputation import layer_axes
from hp_tool.domain.frameworks import facts
from hp_tool.domain.model import ModelSpec
from hp_tool.domain.pipeline_layout import chunk_layers

Columns = TypeVar("Columns", LayerBytes, LayerTime)
Counts = tuple[int, ...]
"""Layers of each kind, in the order of `ModelSpec.kinds`."""
STAGE_AXES = ("pipeline_parallel_size", "virtual_pipeline_parallel_size")
"""Candidate fields on which the contents of stages depend."""


class Kinds(NamedTuple):
    """A layer of each kind, and the model's ends."""

    kept: list[LayerBytes]
    times: list[LayerTime]
    recorded: list[LayerTime]
    """With CUDA graphs recorded, where a lone candidate's query leaves these open."""
    head: HeadTime


def unlike_layers(
    *, case: TrainingCase, candidates: Candidates, pipeline: Pipeline | None = None
) -> tuple[Pipeline, ModelLayers]:
    """The stages, unless these are given, and the mean layer of each."""
    if pipeline is not None:
        return pipeline, _mean_layers(_kinds(case, candidates), pipeline)
    names = (*layer_axes(candidates), *spreading_axes(case.cluster), *STAGE_AXES)
    unique, inverse = unique_rows(candidates, names)
    kinds = _kinds(case, unique)
    whole = _pipeline(case, unique, kinds)
    layers = _mean_layers(kinds, whole)
    return (whole, layers) if inverse is None else (_spread(whole, inverse), _spread(layers, inverse))


def _kinds(case: TrainingCase, candidates: Candidates) -> Kinds:
    each = [layer_kinds(case=case.of(kind), candidates=candidates) for _, kind in case.model.kinds]
    recorded = [(kinds.recorded or kinds, inverse) for kinds, inverse in each]
    return Kinds(
        kept=[spread(kinds.sparse or kinds.dense, inverse) for kinds, inverse in each],
        times=[spread(kinds.sparse_time or kinds.time, inverse) for kinds, inverse in each],
        recorded=[spread(kinds.sparse_time or kinds.time, inverse) for kinds, inverse in recorded],
        head=spread(each[0][0].head, each[0][1]),
    )


def _mean_layers(kinds: Kinds, pipeline: Pipeline) -> ModelLayers:
    critical = pipeline.critical
    return ModelLayers(
        dense=_mean(kinds.kept, critical),
        sparse=None,
        times=(_mean(kinds.times, critical),),
        recorded_times=(_mean(kinds.recorded, critical),),
        head=kinds.head,
        stages=tuple(_mean(kinds.kept, stage.layers) for stage in pipeline.stages),
    )


def _mean(kinds: Sequence[Columns], layers: StageLayers) -> Columns:
    """The mean layer of a stage."""
    shares = [count / layers.count for count in layers.kinds]
    return type(kinds[0])(
        **{each.name: _sum(shares, [getattr(kind, each.name) for kind in kinds]) for each in fields(kinds[0])}
    )


def _spread(value: Any, inverse: NDArray[np.intp]) -> Any:
    """The value with each row's own entry in every array."""
    if isinstance(value, np.ndarray):
        return value[inverse]
    if isinstance(value, tuple):
        return tuple(_spread(each, inverse) for each in value)
    if is_dataclass(value) and not isinstance(value, type):
        return type(value)(**{each.name: _spread(getattr(value, each.name), inverse) for each in fields(value)})
    return value


def _sum(counts: Sequence[Floats], values: Sequence[Floats]) -> Floats:
    """The sum over all kinds of layers."""
    return sum((count * value for count, value in zip(counts, values, strict=True)), 0.0)


# The stages of a whole pipeline.


@dataclass(frozen=True, slots=True)
class _Laid:
    """The stages of each candidate's pipeline, as rows of tables with the layers of each kind in the last axis."""

    model: ModelSpec
    row: Ints
    """The pipeline of each candidate in the tables."""
    ends: NDArray[np.float64]
    """(pipelines, 2, kinds): the first and the last stage, with the layers of multi-token prediction."""
    different: NDArray[np.float64]
    """(pipelines, stages, kinds): stages of unlike contents, without those layers; one of them is repeated where another
    pipeline has more."""
    between: NDArray[np.float64]
    """The same of the stages between the ends."""
    ranks: NDArray[np.float64]
    """(pipelines, stages): the first rank with the contents of `between`."""

    def counts(self, table: NDArray[np.float64], place: Any) -> list[Floats]:
        """Layers of each kind on the stage at a place of each candidate's row."""
        chosen = table[self.row, place]
        return [
            chosen[..., kind] if isinstance(self.row, np.ndarray) else float(chosen[kind]) for kind in range(chosen.shape[-1])
        ]

    def rank(self, place: Any) -> Floats:
        ranks: Any = self.ranks[self.row, place]
        return ranks if isinstance(self.row, np.ndarray) else float(ranks)

    def stage(self, table: NDArray[np.float64], place: Any) -> StageLayers:
        return stage_of(self.model, self.counts(table, place))


def _pipeline(case: TrainingCase, c: Candidates, kinds: Kinds) -> Pipeline:
    """The stages of each candidate's pipeline: the ends, and between them the one that keeps most activations and the one with
    most weights.

    The slowest stage counts as full. The others hold as many layers like its mean layer as their own take seconds, shares of
    recomputation and of waits for the host being alike.
    """
    model, p, depths = case.model, c.pipeline_parallel_size, case.model.num_nextn_predict_layers
    laid = _laid_out(model, c, late=facts(case.workload.framework).late_layers)
    seconds = [_seconds(time) for time in kinds.times]
    places = range(laid.different.shape[1])
    critical = laid.stage(laid.different, _largest([_sum(laid.counts(laid.different, place), seconds) for place in places]))
    mean_s = _sum(critical.kinds, seconds) / critical.count
    extra = depths * _sum([float(count) for count in model.mtp_kinds], seconds) / mean_s if depths else 0
    all_layers = _sum([float(count) for count, _ in model.kinds], seconds) / mean_s
    alone: Any = p == 1
    first, last = laid.stage(laid.ends, 0), laid.stage(laid.ends, 1)
    on_first, on_last = (_sum(end.kinds, seconds) / mean_s for end in (first, last))
    stages: tuple[PipelineStage, ...] = whole_ends(model, c, (first, last))
    if anywhere(p > 2):
        stages = (*stages, *_between_ends(case, c, laid, kinds))
    return Pipeline(
        stages=stages,
        critical=critical,
        fewer_first=where(alone, 0.0, critical.count - on_first),
        fewer_last=where(alone, 0.0, critical.count - on_last + extra),
        fewer=where(alone, 0.0, p * critical.count - all_layers),
        depths=extra,
    )


def _between_ends(case: TrainingCase, c: Candidates, laid: _Laid, kinds: Kinds) -> list[PipelineStage]:
    """The stages between the ends among which memory is the fullest; activations are those of p - r micro-batches."""
    parameters, saved = [layer_on_rank(kind, c) for _, kind in case.model.kinds], [layer.saved for layer in kinds.kept]
    places = range(laid.ranks.shape[1])
    activations = [
        (c.pipeline_parallel_size - laid.rank(place)) * _sum(laid.counts(laid.between, place), saved) for place in places
    ]
    fullest = [_largest(activations), _largest([_sum(laid.counts(laid.between, place), parameters) for place in places])]
    if not anywhere(fullest[0] != fullest[1]):
        fullest.pop()
    stages = []
    for place in fullest:
        layers = laid.stage(laid.between, place)
        stages.append(
            PipelineStage(
                rank=laid.rank(place),
                layers=layers,
                chunk_layers=layers.count / c.virtual_pipeline_parallel_size,
                embedding=0,
                embedding_copies=0,
                output=0,
                extra_layers=0,
            )
        )
    return stages


def _seconds(layer: LayerTime) -> Floats:
    """Seconds of one layer there and back, without recomputation."""
    forward = layer.forward + layer.tensor + layer.context + layer.expert
    return forward + layer.backward + layer.tensor_backward + layer.context_backward + layer.expert_backward


def _largest(values: Sequence[Floats]) -> Ints:
    """The place of the largest value of each row."""
    largest, best = values[0], np.zeros(np.shape(values[0]), dtype=np.intp)
    for place, value in enumerate(values[1:], start=1):
        better: Any = value > largest
        best, largest = np.where(better, place, best), where(better, value, largest)
    return best if best.shape else int(best)


def _laid_out(model: ModelSpec, c: Candidates, *, late: bool) -> _Laid:
    """The tables of all candidates' pipelines; each pair of stages and chunks is laid out once."""
    unique, inverse = unique_rows(c, STAGE_AXES)
    pairs = np.stack([np.ravel(getattr(unique, name)) for name in STAGE_AXES]).T.tolist()
    each = [stage_contents(model.pattern, len(model.kinds), p, v, late=late, begins_dense=model.begins_dense) for p, v in pairs]
    extra = model.num_nextn_predict_layers * np.array(model.mtp_kinds, dtype=np.float64)
    ends = np.array([[stages[0], stages[-1]] for stages in each], dtype=np.float64)
    ends[:, 1] += extra
    ends[[len(stages) == 1 for stages in each], 0] += extra
    first_ranks = [{counts: rank for rank, counts in reversed(list(enumerate(stages)))} for stages in each]
    inner = [
        {counts: rank for rank, counts in reversed(list(enumerate(stages[1:-1], start=1)))} or {stages[0]: 0} for stages in each
    ]
    row: Any = 0 if c.is_alone else np.zeros(np.shape(c.pipeline_parallel_size), np.intp) if inverse is None else inverse
    return _Laid(model, row, ends, _padded(first_ranks), _padded(inner), _ranks(inner))


def _padded(tables: Sequence[dict[Counts, int]]) -> NDArray[np.float64]:
    most = max(map(len, tables))
    rows = [[*table, *[next(iter(table))] * (most - len(table))] for table in tables]
    return np.array(rows, dtype=np.float64)


def _ranks(tables: Sequence[dict[Counts, int]]) -> NDArray[np.float64]:
    most = max(map(len, tables))
    rows = [[*table.values(), *[next(iter(table.values()))] * (most - len(table))] for table in tables]
    return np.array(rows, dtype=np.float64)


@functools.lru_cache(maxsize=4096)
def stage_contents(
    pattern: tuple[int, ...], kinds: int, stages: int, chunks: int, *, late: bool = False, begins_dense: bool = False
) -> tuple[Counts, ...]:
    """Layers of each kind on each stage; `pattern` has the kind of each layer in order, chunk i is on stage i mod p."""
    sizes = chunk_layers(num_layers=len(pattern), stages=stages, chunks=chunks, late=late, begins_dense=begins_dense)
    starts = list(accumulate([0, *sizes]))
    held: list[list[int]] = [[0] * kinds for _ in range(stages)]
    for chunk, size in enumerate(sizes):
        for kind in pattern[starts[chunk] : starts[chunk] + size]:
            held[chunk % stages][kind] += 1
    return tuple(tuple(counts) for counts in held)
