"""Models with layers of different kinds (`ModelSpec.blocks`): contents of pipeline stages, and
their mean layers.

Layers are assigned to stages in order, with the counts of `domain.pipeline_layout`. Each kind of
layer is computed once per combination of the few axes on which it depends, and each pipeline is
laid out once. The time per candidate therefore does not depend on the number of layers.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Sequence
from dataclasses import dataclass, fields, is_dataclass, replace
from itertools import accumulate
from typing import Any, NamedTuple, TypeVar

import numpy as np
from numpy.typing import NDArray

from hp_tool.cost.arrays import FloatArray, Floats, Ints, anywhere, where
from hp_tool.cost.block import (
    BlockBytes,
    BlockTime,
    LayerBytes,
    LayerTime,
    further_axes,
    shapes,
    windowed_length,
)
from hp_tool.cost.candidates import Candidates, unique_rows
from hp_tool.cost.case import TrainingCase
from hp_tool.cost.embedding_and_head import HeadTime, head_time
from hp_tool.cost.layer import layer_bytes, layer_time, mixer_bytes, mixer_time
from hp_tool.cost.model_layers import ModelLayers
from hp_tool.cost.model_states import layer_on_rank
from hp_tool.cost.pipeline_stages import Pipeline, PipelineStage, StageLayers, stage_of, whole_ends
from hp_tool.cost.recomputation import layer_axes
from hp_tool.cost.shared import Shared
from hp_tool.domain.frameworks import framework_facts
from hp_tool.domain.model import ModelSpec
from hp_tool.domain.parallel import ParallelConfig
from hp_tool.domain.pipeline_layout import PipelineLayout, chunk_layers

Columns = TypeVar("Columns", LayerBytes, LayerTime)
Counts = tuple[int, ...]
"""Number of layers of each kind, in the order of `ModelSpec.kinds`."""
STAGE_AXES = ("pipeline_parallel_size", "virtual_pipeline_parallel_size")
"""Candidate fields that determine the contents of stages."""


class Kinds(NamedTuple):
    """One layer of each kind, and the ends of the model."""

    kept: tuple[LayerBytes, ...]
    times: tuple[LayerTime, ...]
    recorded: tuple[LayerTime, ...]
    """Layer times with CUDA graphs, for a single candidate whose query leaves them open."""
    head: HeadTime


def unlike_layers(
    *, case: TrainingCase, candidates: Candidates, pipeline: Pipeline | None = None
) -> tuple[Pipeline, ModelLayers]:
    """Return the stages (computed unless given), and the mean layer of each."""
    if pipeline is not None:
        return pipeline, _mean_layers(_kinds(case, candidates), pipeline)
    unique, inverse = candidates, None
    if len(candidates.shape) == 1:  # A grid contains each of these axes only once.
        unique, inverse = unique_rows(
            candidates,
            (
                *layer_axes(candidates),
                *further_axes(case),
                *STAGE_AXES,
                "recompute_method",
            ),
        )
    kinds = _kinds(case, unique)
    whole = _pipeline(case, unique, kinds)
    layers = _mean_layers(kinds, whole)
    return (
        (whole, layers) if inverse is None else (_spread(whole, inverse), _spread(layers, inverse))
    )


_each_stage: Shared[Kinds] = Shared()


def _kinds(case: TrainingCase, candidates: Candidates) -> Kinds:
    axes = (*layer_axes(candidates), *further_axes(case))
    if candidates.is_alone:
        parts = (
            case.model,
            case.cluster,
            case.workload,
            case.profile,
            case.strategy,
            case.recorded,
        )
        numbers = (candidates.names_schedules, *axes, *(getattr(candidates, name) for name in axes))
        return _each_stage.get(parts, numbers, lambda: _unique_kinds(case, candidates))
    # The first axis of a grid has few more rows than distinct ones.
    if not candidates.names_modules:
        return _unique_kinds(case, candidates)
    unique, inverse = unique_rows(candidates, axes)
    kinds = _unique_kinds(case, unique)
    return kinds if inverse is None else Kinds(*_spread(tuple(kinds), inverse))


def _unique_kinds(case: TrainingCase, c: Candidates) -> Kinds:
    """Return the layers and ends of the model for unique candidates."""
    s = shapes(case=case, candidates=c)
    kept, times, recorded = [], [], []
    mixers: dict[ModelSpec, tuple[BlockBytes, BlockTime]] = {}
    for _, kind in case.model.kinds:
        own = case.of(kind)
        of_kind = replace(
            s, attended=windowed_length(kind, case.workload.computed_attention_length)
        )
        alike = replace(
            kind, num_hidden_layers=1, intermediate_size=None
        )  # Except for the width of their dense MLP.
        if alike not in mixers:
            mixers[alike] = (
                mixer_bytes(case=own, candidates=c, s=of_kind),
                mixer_time(case=own, candidates=c, s=of_kind),
            )
        of_bytes, of_time = mixers[alike]
        kept.append(layer_bytes(case=own, candidates=c, s=of_kind, attention=of_bytes))
        timed = functools.partial(
            layer_time, candidates=c, split_backward=c.names_schedules, s=of_kind, attention=of_time
        )
        times.append(timed(case=own))
        recorded.append(
            timed(case=own.with_graphs)
            if kind.num_experts and c.is_alone and case.recorded is not None
            else times[-1]
        )
    return Kinds(
        tuple(kept), tuple(times), tuple(recorded), head_time(case=case, candidates=c, s=s)
    )


def _mean_layers(kinds: Kinds, pipeline: Pipeline) -> ModelLayers:
    stages = tuple(_mean(kinds.kept, stage.layers) for stage in pipeline.stages)
    times = (_mean(kinds.times, pipeline.critical),)
    return ModelLayers(
        dense=stages[0],
        sparse=None,
        times=times,
        recorded_times=times
        if all(map(operator.is_, kinds.recorded, kinds.times))
        else (_mean(kinds.recorded, pipeline.critical),),
        head=kinds.head,
        stages=stages,
    )


def _mean(kinds: Sequence[Columns], layers: StageLayers) -> Columns:
    """Return the mean layer of a stage."""
    shares = [count / layers.count for count in layers.kinds]
    return type(kinds[0])(
        **{
            field.name: _sum(shares, [getattr(kind, field.name) for kind in kinds])
            for field in fields(kinds[0])
        }
    )


def _spread(value: Any, inverse: NDArray[np.intp]) -> Any:
    """Return the value with one entry per row in every array."""
    if isinstance(value, np.ndarray):
        return value[inverse]
    if isinstance(value, tuple):
        return tuple(_spread(each, inverse) for each in value)
    if is_dataclass(value) and not isinstance(value, type):
        return type(value)(
            **{field.name: _spread(getattr(value, field.name), inverse) for field in fields(value)}
        )
    return value


def _sum(counts: Sequence[Floats], values: Sequence[Floats]) -> Floats:
    """Return the sum over all kinds of layers, skipping kinds that no candidate has."""
    there = (
        (count, value) for count, value in zip(counts, values, strict=True) if not _is_zero(count)
    )
    return sum((count * value for count, value in there), 0.0)


def _is_zero(count: Floats) -> bool:
    return isinstance(count, float) and count == 0.0


# The stages of a whole pipeline.


class _Tables(NamedTuple):
    """Layers of each kind on the stages of several pipelines: arrays of shape (pipelines, stages,
    kinds).

    Shorter pipelines repeat a stage.
    """

    ends: FloatArray
    """First and last stage, including layers of multi-token prediction."""
    different: FloatArray
    """Distinct stages, excluding those layers."""
    between: FloatArray
    """Distinct stages between the ends."""
    ranks: FloatArray
    """(pipelines, stages): the first rank with the contents of `between`."""


@dataclass(frozen=True, slots=True)
class _Laid:
    """The stages of each candidate's pipeline, as an index into the tables."""

    model: ModelSpec
    tables: _Tables
    row: Ints
    """Index of each candidate's pipeline in the tables."""

    def stage(self, table: FloatArray, place: Any) -> StageLayers:
        """Return the stage at an index for each candidate."""
        if not isinstance(self.row, np.ndarray):
            return stage_of(self.model, table[self.row, place].tolist())
        stages = table[:, place] if isinstance(place, int) else table
        there: list[bool] = np.atleast_1d(stages.any(axis=tuple(range(stages.ndim - 1)))).tolist()
        return stage_of(
            self.model,
            [table[self.row, place, kind] if some else 0.0 for kind, some in enumerate(there)],
        )

    def sums(self, table: FloatArray, of_kinds: Sequence[Floats]) -> FloatArray:
        """Return (..., stages): the sum over the layers of each stage of each candidate."""
        values = np.stack(np.broadcast_arrays(*of_kinds), axis=-1)
        sums: FloatArray = np.einsum("...jk,...k->...j", table[self.row], values)
        return sums

    def largest(self, values: FloatArray) -> Ints:
        """Return the index of the largest value for each candidate."""
        places = np.argmax(values, axis=-1)
        return places if isinstance(self.row, np.ndarray) else int(places)


def _pipeline(case: TrainingCase, c: Candidates, kinds: Kinds) -> Pipeline:
    """Return the stages of each candidate's pipeline: the ends, and those of `_between_ends`.

    The slowest stage counts as full. Every other stage counts as the number of the slowest stage's
    mean layers that would take as long as its own, with equal fractions of recomputation and of
    waits for the host.
    """
    model, p, depths = case.model, c.pipeline_parallel_size, case.model.num_nextn_predict_layers
    laid = _lay_out(model, c, late=framework_facts(case.workload.framework).late_layers)
    seconds = [_seconds(time) for time in kinds.times]
    slowest = laid.largest(laid.sums(laid.tables.different, seconds))
    critical = laid.stage(laid.tables.different, slowest)
    mean_s = _sum(critical.kinds, seconds) / critical.count
    extra = (
        depths * _sum([float(count) for count in model.mtp_kinds], seconds) / mean_s
        if depths
        else 0
    )
    all_layers = _sum([float(count) for count, _ in model.kinds], seconds) / mean_s
    alone: Any = p == 1
    first, last = laid.stage(laid.tables.ends, 0), laid.stage(laid.tables.ends, 1)
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


def _between_ends(
    case: TrainingCase, c: Candidates, laid: _Laid, kinds: Kinds
) -> list[PipelineStage]:
    """Return two stages between the ends: the one with the most activations, and the one with the
    most weights.

    The former stores activations of p - r micro-batches; the latter matters under full
    recomputation.
    """
    table, ranks = laid.tables.between, laid.tables.ranks[laid.row]
    activations = laid.sums(table, [layer.saved for layer in kinds.kept])
    weights = laid.sums(table, [layer_on_rank(kind, c) for _, kind in case.model.kinds])
    in_flight = np.asarray(c.pipeline_parallel_size)[..., None] - ranks
    places = [laid.largest(in_flight * activations), laid.largest(weights)]
    if not anywhere(places[0] != places[1]):
        places.pop()
    stages = []
    for place in places:
        layers, rank = laid.stage(table, place), laid.tables.ranks[laid.row, place]
        stages.append(
            PipelineStage(
                rank=rank if isinstance(laid.row, np.ndarray) else float(rank),
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
    """Return the seconds of one layer, forward and backward, without recomputation."""
    forward = layer.forward + layer.tensor + layer.context + layer.expert
    return (
        forward
        + layer.backward
        + layer.tensor_backward
        + layer.context_backward
        + layer.expert_backward
    )


def _lay_out(model: ModelSpec, c: Candidates, *, late: bool) -> _Laid:
    """Return the stages of all candidates' pipelines; each pair of stages and chunks is laid out
    once.
    """
    unique, inverse = unique_rows(c, STAGE_AXES)
    columns = np.broadcast_arrays(*(getattr(unique, name) for name in STAGE_AXES))
    pairs = tuple(zip(*(np.ravel(column).tolist() for column in columns), strict=True)) or (
        (1, 1),
    )  # No candidates.
    tables = _tables(
        model.pattern,
        model.mtp_kinds,
        model.num_nextn_predict_layers,
        pairs,
        late=late,
        begins_dense=model.begins_dense,
    )
    row: Any = (
        0
        if c.is_alone
        else np.zeros(np.shape(c.pipeline_parallel_size), np.intp)
        if inverse is None
        else inverse
    )
    return _Laid(model, tables, row)


@functools.lru_cache(maxsize=256)
def _tables(
    pattern: tuple[int, ...],
    mtp: Counts,
    depths: int,
    pairs: tuple[tuple[int, int], ...],
    *,
    late: bool,
    begins_dense: bool,
) -> _Tables:
    """Return the tables for these pairs of stages and chunks."""
    each = [
        stage_contents(pattern, len(mtp), p, v, late=late, begins_dense=begins_dense)
        for p, v in pairs
    ]
    ends = np.array([[stages[0], stages[-1]] for stages in each], dtype=np.float64)
    extra = depths * np.array(mtp, dtype=np.float64)
    ends[:, 1] += extra
    ends[[len(stages) == 1 for stages in each], 0] += extra
    inner = [
        {counts: rank for rank, counts in reversed([*enumerate(stages[1:-1], 1)])} or {stages[0]: 0}
        for stages in each
    ]
    ranks = _pad_rows([list(table.values()) for table in inner])
    return _Tables(
        ends,
        _pad_rows([list(dict.fromkeys(stages)) for stages in each]),
        _pad_rows([list(table) for table in inner]),
        ranks,
    )


def _pad_rows(rows: Sequence[Sequence[Any]]) -> FloatArray:
    """Return the rows padded to the longest by repeating their first entries."""
    most = max(map(len, rows))
    return np.array([[*row, *[row[0]] * (most - len(row))] for row in rows], dtype=np.float64)


def blocks_by_stage(
    model: ModelSpec, config: ParallelConfig, layout: PipelineLayout | None
) -> list[str]:
    """Return the contents of each pipeline stage: `12 x mamba2, 11 x experts, 3 x attention`.

    `layout` is the pipeline layout, if there is one.
    """
    p, v = config.pipeline_parallel_size, config.virtual_pipeline_parallel_size
    names = [kind_words(kind) for _, kind in model.kinds]
    if layout is None:
        each = stage_contents(model.pattern, len(names), p, v, begins_dense=model.begins_dense)
    else:
        chunks = [layout.stage(rank, stages=p) for rank in range(p)]
        layers = [
            [kind for c in stage for kind in model.pattern[c.layers_before :][: c.layers]]
            for stage in chunks
        ]
        each = tuple(tuple(map(kinds.count, range(len(names)))) for kinds in layers)
    return [
        ", ".join(f"{count} x {name}" for count, name in zip(stage, names, strict=True) if count)
        for stage in each
    ]


def kind_words(kind: ModelSpec) -> str:
    """Return the name of a kind of layer: `windowed attention and experts`."""
    mixer = (
        "windowed attention" if kind.mixer == "attention" and kind.sliding_window else kind.mixer
    )
    return (
        " and ".join(word for word in (mixer, kind.feed_forward or "dense") if word != "none")
        or "nothing"
    )


@functools.lru_cache(maxsize=4096)
def stage_contents(
    pattern: tuple[int, ...],
    kinds: int,
    stages: int,
    chunks: int,
    *,
    late: bool = False,
    begins_dense: bool = False,
) -> tuple[Counts, ...]:
    """Return the number of layers of each kind on each stage.

    `pattern` has the kind of each layer in order; chunk i is on stage i mod p.
    """
    sizes = chunk_layers(
        num_layers=len(pattern), stages=stages, chunks=chunks, late=late, begins_dense=begins_dense
    )
    starts = list(accumulate([0, *sizes]))
    counts: list[list[int]] = [[0] * kinds for _ in range(stages)]
    for chunk, size in enumerate(sizes):
        for kind in pattern[starts[chunk] : starts[chunk] + size]:
            counts[chunk % stages][kind] += 1
    return tuple(map(tuple, counts))
