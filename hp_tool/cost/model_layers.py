"""What the model's layers and ends cost on each candidate's ranks. They depend on few axes: each combination is costed once."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from hp_tool.cost.arrays import Floats, anywhere
from hp_tool.cost.block import LayerBytes, LayerTime, spreading_axes
from hp_tool.cost.candidates import Candidates
from hp_tool.cost.case import TrainingCase
from hp_tool.cost.embedding_and_head import HeadTime, head_time
from hp_tool.cost.encoder_decoder import both_heads, mean_layer_bytes, mean_layer_time
from hp_tool.cost.layer import layer_bytes, layer_time
from hp_tool.cost.moe import merged_share, merges_passes
from hp_tool.cost.pipeline_stages import Pipeline
from hp_tool.cost.recomputation import layer_axes
from hp_tool.cost.schedules.bubble import splits_backward
from hp_tool.cost.unique_rows import distinct_rows

Columns = TypeVar("Columns", HeadTime, LayerBytes, LayerTime)


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelLayers:
    """Of one micro-batch on one rank of each candidate."""

    dense: LayerBytes
    """A layer without experts; of an encoder-decoder model the mean one."""
    sparse: LayerBytes | None
    """A layer with experts, where the model has any."""
    time: LayerTime
    """The mean layer of the stage that sets the pace."""
    head: HeadTime

    def of_stages(self, pipeline: Pipeline) -> list[LayerBytes]:
        """The mean layer of each representative stage."""
        if self.sparse is None:
            return [self.dense] * len(pipeline.stages)
        return [_mix(self.dense, self.sparse, stage.layers.expert_share) for stage in pipeline.stages]


def model_layers(*, case: TrainingCase, candidates: Candidates, pipeline: Pipeline, micro_batches: Floats) -> ModelLayers:
    """The costs of layers and ends of legal candidates."""
    model, cluster, workload = case.model, case.cluster, case.workload
    kinds, kind_of = distinct_rows(candidates, (*layer_axes(candidates), *spreading_axes(cluster)))
    if model.architecture == "encoder_decoder":
        return ModelLayers(
            dense=_spread(mean_layer_bytes(case=case, candidates=kinds), kind_of),
            sparse=None,
            time=_spread(mean_layer_time(case=case, candidates=kinds), kind_of),
            head=_spread(both_heads(case=case, candidates=kinds), kind_of),
        )
    split = anywhere(splits_backward(candidates))
    times = _spread(layer_time(case=case, candidates=kinds, split_backward=split), kind_of)
    sparse = None
    if model.num_experts:
        sparse = _spread(layer_bytes(case=case, candidates=kinds, moe=True), kind_of)
        sparse_times = _spread(layer_time(case=case, candidates=kinds, split_backward=split, moe=True), kind_of)
        if merges_passes(workload):
            merged = _spread(layer_time(case=case, candidates=kinds, split_backward=split, moe=True, merged=True), kind_of)
            sparse_times = _mix(sparse_times, merged, merged_share(candidates, micro_batches=micro_batches))
        times = _mix(times, sparse_times, pipeline.critical.expert_share)
    return ModelLayers(
        dense=_spread(layer_bytes(case=case, candidates=kinds), kind_of),
        sparse=sparse,
        time=times,
        head=_spread(head_time(case=case, candidates=kinds), kind_of),
    )


def _spread(columns: Columns, kind_of: NDArray[np.intp] | None) -> Columns:
    """Each row's own entry of every column; None: every row is its own kind. Scalars stay scalars."""
    if kind_of is None:
        return columns
    values = {f.name: getattr(columns, f.name) for f in fields(columns)}
    return type(columns)(**{name: value[kind_of] if isinstance(value, np.ndarray) else value for name, value in values.items()})


def _mix(dense: Columns, sparse: Columns, moe_fraction: Floats) -> Columns:
    """The mean layer of a stage with this share of mixture-of-experts layers, or of layers with other costs."""
    names = [f.name for f in fields(dense)]
    return type(dense)(**{n: getattr(dense, n) + moe_fraction * (getattr(sparse, n) - getattr(dense, n)) for n in names})
