"""One layer of each kind in a model, and its embedding and output layer, on one rank of each
candidate. Each combination of the candidates' axes is computed once.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from hp_tool.cost.arrays import Floats
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
from hp_tool.cost.encoder_decoder import ends_time, mean_layer_bytes, mean_layer_time
from hp_tool.cost.layer import layer_bytes, layer_time, mixer_bytes, mixer_time
from hp_tool.cost.moe import expert_kernels, merged_share, with_launches
from hp_tool.cost.pipeline_stages import Pipeline, mean_layer
from hp_tool.cost.recomputation import layer_axes
from hp_tool.cost.shared import Shared
from hp_tool.domain.model import ModelSpec

Columns = TypeVar("Columns", HeadTime, LayerBytes, LayerTime)


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelLayers:
    """Times and bytes of layers, embedding and output layer for one micro-batch on one rank of each
    candidate.

    Layers are in the order of `ModelSpec.kinds`; for an encoder-decoder model, there is one mean
    layer.
    """

    saved: tuple[LayerBytes, ...]
    times: tuple[LayerTime, ...]
    recorded_times: tuple[LayerTime, ...]
    """`times` with CUDA graphs, for a single candidate whose query does not set cuda_graphs."""
    head: HeadTime

    def mean_time(self, pipeline: Pipeline) -> LayerTime:
        """Return the mean layer of a stage with the maximum number of layers."""
        return mean_layer(self.times, pipeline.critical)

    def of_stages(self, pipeline: Pipeline) -> list[LayerBytes]:
        """Return the mean layer of each representative stage of the pipeline."""
        return [mean_layer(self.saved, stage.layers) for stage in pipeline.stages]


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerKinds:
    """One layer of each kind in a model, and its embedding and output layer; shape (k,) for k
    combinations of the axes on which they depend.
    """

    saved: tuple[LayerBytes, ...]
    times: tuple[LayerTime, ...]
    merged: tuple[LayerTime, ...]
    """Times with merged forward and backward passes; empty if no candidate merges passes."""
    recorded: tuple[LayerTime, ...]
    """Times with CUDA graphs, for a single candidate whose query does not set cuda_graphs."""
    recorded_merged: tuple[LayerTime, ...]
    head: HeadTime


_kinds: Shared[LayerKinds] = Shared()


def model_layers(
    *, case: TrainingCase, candidates: Candidates, micro_batches: Floats
) -> ModelLayers:
    """Return the layers, the embedding and the output layer of the model for legal candidates."""
    kinds, inverse = layer_kinds(case=case, candidates=candidates)

    def times(alone: tuple[LayerTime, ...], merged: tuple[LayerTime, ...]) -> tuple[LayerTime, ...]:
        own = tuple(expand_rows(each, inverse) for each in alone)
        if not merged:
            return own
        share = merged_share(
            candidates, micro_batches=micro_batches, merges=case.workload.merges_passes
        )
        return tuple(
            one
            if other is alone[place]
            else _weighted_mean(one, expand_rows(other, inverse), share)
            for place, (one, other) in enumerate(zip(own, merged, strict=True))
        )

    own = times(kinds.times, kinds.merged)
    return ModelLayers(
        saved=tuple(expand_rows(each, inverse) for each in kinds.saved),
        times=own,
        recorded_times=own
        if kinds.recorded is kinds.times
        else times(kinds.recorded, kinds.recorded_merged),
        head=expand_rows(kinds.head, inverse),
    )


def layer_kinds(
    *, case: TrainingCase, candidates: Candidates
) -> tuple[LayerKinds, NDArray[np.intp] | None]:
    """Return (LayerKinds of each combination of axes, index of each candidate's combination).

    `unique_rows` numbers the combinations.
    """
    axes = (*layer_axes(candidates), *further_axes(case))
    splits, merges = (
        candidates.names_schedules,
        case.workload.merges_passes or candidates.merges_passes,
    )
    if not candidates.is_alone:
        unique, inverse = unique_rows(candidates, axes)
        return _layer_kinds(case=case, candidates=unique, splits=splits, merges=merges), inverse
    parts = (case.model, case.cluster, case.workload, case.profile, case.strategy, case.recorded)
    numbers = (splits, merges, *axes, *(getattr(candidates, name) for name in axes))
    kinds = _kinds.get(
        parts,
        numbers,
        lambda: _layer_kinds(case=case, candidates=candidates, splits=splits, merges=merges),
    )
    return kinds, None


def _layer_kinds(
    *, case: TrainingCase, candidates: Candidates, splits: bool, merges: bool
) -> LayerKinds:
    """Return the LayerKinds of unique candidates. `splits` separates weight gradients; `merges`
    merges forward and backward passes.
    """
    if case.model.architecture == "encoder_decoder":
        mean = (mean_layer_time(case=case, candidates=candidates),)
        return LayerKinds(
            saved=(mean_layer_bytes(case=case, candidates=candidates),),
            times=mean,
            merged=(),
            recorded=mean,
            recorded_merged=(),
            head=ends_time(case=case, candidates=candidates),
        )
    s = shapes(case=case, candidates=candidates)
    opens_graphs = candidates.is_alone and case.recorded is not None
    mixers: dict[ModelSpec, tuple[BlockBytes, BlockTime]] = {}
    saved, each = [], []
    for _, kind in case.model.kinds:
        own, of_kind = case.of(kind), s
        if case.model.blocks is not None:
            attended = windowed_length(kind, case.workload.computed_attention_length)
            of_kind = replace(s, attended=attended)
        mixer = _mixer_of(kind) if len(case.model.kinds) > 1 else kind
        if mixer not in mixers:
            mixers[mixer] = (
                mixer_bytes(case=own, candidates=candidates, s=of_kind),
                mixer_time(case=own, candidates=candidates, s=of_kind),
            )
        of_bytes, of_time = mixers[mixer]
        saved.append(layer_bytes(case=own, candidates=candidates, s=of_kind, attention=of_bytes))
        timed = functools.partial(
            layer_time, candidates=candidates, split_backward=splits, s=of_kind, attention=of_time
        )
        if not kind.num_experts:
            each.append((timed(case=own),) * 4)
            continue
        kernels = expert_kernels(case=own, candidates=candidates, s=of_kind)

        def with_experts(
            case: TrainingCase,
            kernels: BlockTime = kernels,
            timed: Callable[..., LayerTime] = timed,
        ) -> tuple[LayerTime, LayerTime]:
            second = with_launches(kernels, case=case, candidates=candidates)
            plain = timed(case=case, second=second)
            return plain, timed(case=case, second=second, merged=True) if merges else plain

        plain = with_experts(own)
        each.append((*plain, *(with_experts(own.with_graphs) if opens_graphs else plain)))
    times, merged, recorded, recorded_merged = zip(*each, strict=True)
    if not case.model.num_experts:
        merges = opens_graphs = False
    return LayerKinds(
        saved=tuple(saved),
        times=times,
        merged=merged if merges else (),
        recorded=recorded if opens_graphs else times,
        recorded_merged=recorded_merged if merges else (),
        head=head_time(case=case, candidates=candidates, s=s),
    )


def _mixer_of(kind: ModelSpec) -> ModelSpec:
    """Return a one-layer model without the MLP. The result is equal for all layers with equal
    mixers.
    """
    return replace(
        kind.without_experts,
        num_hidden_layers=1,
        sliding_window_layers=None,
        intermediate_size=None,
        feed_forward="none" if kind.feed_forward == "none" else None,
    )


def expand_rows(columns: Columns, inverse: NDArray[np.intp] | None) -> Columns:
    """Return the columns with one entry per row. If `inverse` is None, every row is unique. Scalars
    stay scalars.
    """
    if inverse is None:
        return columns
    values = {name: getattr(columns, name) for name in columns.__slots__}
    return type(columns)(
        **{
            name: value[inverse] if isinstance(value, np.ndarray) else value
            for name, value in values.items()
        }
    )


def _weighted_mean(one: LayerTime, other: LayerTime, share: Floats) -> LayerTime:
    """Return the weighted mean of two layers; `other` has the weight `share`."""
    values = {}
    for name in one.__slots__:
        value = getattr(one, name)
        values[name] = value + share * (getattr(other, name) - value)
    return LayerTime(**values)
