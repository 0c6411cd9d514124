"""A model's layers and ends on one rank of each candidate, computed once per combination of the
axes they depend on.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from hp_tool.cost.arrays import Floats
from hp_tool.cost.block import LayerBytes, LayerTime, further_axes, shapes
from hp_tool.cost.candidates import Candidates, unique_rows
from hp_tool.cost.case import TrainingCase
from hp_tool.cost.embedding_and_head import HeadTime, head_time
from hp_tool.cost.encoder_decoder import both_heads, mean_layer_bytes, mean_layer_time
from hp_tool.cost.layer import layer_bytes, layer_time, mixer_bytes, mixer_time
from hp_tool.cost.moe import expert_kernels, merged_share, with_launches
from hp_tool.cost.pipeline_stages import Pipeline
from hp_tool.cost.recomputation import layer_axes
from hp_tool.cost.shared import Shared

Columns = TypeVar("Columns", HeadTime, LayerBytes, LayerTime)


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelLayers:
    """Layers and ends of the model for one micro-batch on one rank of each candidate."""

    dense: LayerBytes
    """A layer without experts; the mean layer of an encoder-decoder model."""
    sparse: LayerBytes | None
    """A layer with experts; None for models without."""
    times: tuple[LayerTime, ...]
    """Mean layer of a stage; for a model with two kinds of layers, a dense layer and one with
    experts.
    """
    recorded_times: tuple[LayerTime, ...]
    """`times` with CUDA graphs, for a single candidate whose query leaves them open."""
    head: HeadTime
    stages: tuple[LayerBytes, ...] = ()
    """For a model with `blocks`, the mean layer of each representative stage; `dense` is that of
    the critical stage.
    """

    def mean_time(self, pipeline: Pipeline) -> LayerTime:
        """Return the mean layer of the critical stage."""
        dense, *sparse = self.times
        return _mix_layers(dense, sparse[0], pipeline.critical.expert_share) if sparse else dense

    def of_stages(self, pipeline: Pipeline) -> list[LayerBytes]:
        """Return the mean layer of each representative stage."""
        if self.stages:
            return list(self.stages)
        if self.sparse is None:
            return [self.dense] * len(pipeline.stages)
        return [
            _mix_layers(self.dense, self.sparse, stage.layers.expert_share)
            for stage in pipeline.stages
        ]


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerKinds:
    """One layer of each kind in a model, and the ends of the model; shape (k,) for k combinations
    of their axes.
    """

    dense: LayerBytes
    time: LayerTime
    sparse: LayerBytes | None
    """A layer with experts, like the following fields."""
    sparse_time: LayerTime | None
    merged_time: LayerTime | None
    """Layer times with merged forward and backward passes; None if no candidate merges them."""
    head: HeadTime
    recorded: LayerKinds | None = None
    """The same with CUDA graphs, for a single candidate whose query leaves them open; None if
    graphs change nothing.
    """


_kinds: Shared[LayerKinds] = Shared()


def model_layers(
    *, case: TrainingCase, candidates: Candidates, pipeline: Pipeline, micro_batches: Floats
) -> ModelLayers:
    """Return the layers and ends of the model for legal candidates."""
    kinds, inverse = layer_kinds(case=case, candidates=candidates)

    def times(kinds: LayerKinds) -> tuple[LayerTime, ...]:
        dense = expand_rows(kinds.time, inverse)
        if kinds.sparse_time is None:
            return (dense,)
        sparse = expand_rows(kinds.sparse_time, inverse)
        if kinds.merged_time is not None:
            share = merged_share(
                candidates, micro_batches=micro_batches, merges=case.workload.merges_passes
            )
            sparse = _mix_layers(sparse, expand_rows(kinds.merged_time, inverse), share)
        both = pipeline.dense is not None
        return (
            (dense, sparse)
            if both
            else (_mix_layers(dense, sparse, pipeline.critical.expert_share),)
        )

    own = times(kinds)
    return ModelLayers(
        dense=expand_rows(kinds.dense, inverse),
        sparse=None if kinds.sparse is None else expand_rows(kinds.sparse, inverse),
        times=own,
        recorded_times=own if kinds.recorded is None else times(kinds.recorded),
        head=expand_rows(kinds.head, inverse),
    )


def layer_kinds(
    *, case: TrainingCase, candidates: Candidates
) -> tuple[LayerKinds, NDArray[np.intp] | None]:
    """Return the layers and ends for each combination of their axes, and the combination of each
    candidate.

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
    """Return the kinds of layers for unique candidates; `splits` separates their weight
    gradients.
    """
    if case.model.architecture == "encoder_decoder":
        return LayerKinds(
            dense=mean_layer_bytes(case=case, candidates=candidates),
            time=mean_layer_time(case=case, candidates=candidates),
            sparse=None,
            sparse_time=None,
            merged_time=None,
            head=both_heads(case=case, candidates=candidates),
        )
    s = shapes(case=case, candidates=candidates)
    attention = mixer_time(case=case, candidates=candidates, s=s)
    kept = mixer_bytes(case=case, candidates=candidates, s=s)

    timed = functools.partial(
        layer_time, candidates=candidates, split_backward=splits, s=s, attention=attention
    )
    head = head_time(case=case, candidates=candidates, s=s)
    plain = case.of(case.model.without_experts) if case.model.num_experts else case
    dense, dense_time = (
        layer_bytes(case=plain, candidates=candidates, s=s, attention=kept),
        timed(case=plain),
    )
    if not case.model.num_experts:
        return LayerKinds(
            dense=dense, time=dense_time, sparse=None, sparse_time=None, merged_time=None, head=head
        )
    kernels = expert_kernels(case=case, candidates=candidates, s=s)

    def with_experts(case: TrainingCase, *, recorded: LayerKinds | None = None) -> LayerKinds:
        second = with_launches(kernels, case=case, candidates=candidates)
        return LayerKinds(
            dense=dense,
            time=dense_time,
            sparse=sparse,
            sparse_time=timed(case=case, second=second),
            merged_time=timed(case=case, second=second, merged=True) if merges else None,
            head=head,
            recorded=recorded,
        )

    sparse = layer_bytes(case=case, candidates=candidates, s=s, attention=kept)
    opens_graphs = candidates.is_alone and case.recorded is not None
    return with_experts(case, recorded=with_experts(case.with_graphs) if opens_graphs else None)


def expand_rows(columns: Columns, inverse: NDArray[np.intp] | None) -> Columns:
    """Return the columns expanded to one entry per row; None means that every row is unique.
    Scalars stay scalars.
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


def _mix_layers(dense: Columns, sparse: Columns, moe_fraction: Floats) -> Columns:
    """Return the mean layer of a stage in which the fraction `moe_fraction` of the layers costs
    `sparse`.
    """
    values = {}
    for name in dense.__slots__:
        one = getattr(dense, name)
        values[name] = one + moe_fraction * (getattr(sparse, name) - one)
    return type(dense)(**values)
