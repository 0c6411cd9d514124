"""The training cost model: memory and step time of many candidates at once.

Sources: arXiv 2205.05198 (activations, sequence parallelism, selective recomputation), 2104.04473 (pipeline schedules),
1910.02054 (ZeRO); the constants come in with the efficiency profile.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, fields
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from hp_tool.cost.block import Column
from hp_tool.cost.candidates import BoolArray, Candidates, FloatArray
from hp_tool.cost.distinct import distinct_rows
from hp_tool.cost.elementwise import anywhere
from hp_tool.cost.encoder_decoder import (
    both_heads,
    counted_candidates,
    decoder_workload,
    mean_layer_bytes,
    mean_layer_time,
)
from hp_tool.cost.exchange_overlap import merged_share, merges_passes
from hp_tool.cost.head import HeadTime, head_time
from hp_tool.cost.layer import LayerBytes, LayerTime, layer_bytes, layer_time
from hp_tool.cost.memory import memory
from hp_tool.cost.middle import fuller, middle_stages
from hp_tool.cost.modules import layer_axes
from hp_tool.cost.pipeline import micro_batches
from hp_tool.cost.schedules.costs import splits_backward
from hp_tool.cost.shapes import spreading_axes
from hp_tool.cost.stages import stage_layers
from hp_tool.cost.states import state_costs
from hp_tool.cost.step import TIME_PARTS, time_parts
from hp_tool.domain.efficiency import EfficiencyProfile
from hp_tool.domain.hardware import ClusterSpec
from hp_tool.domain.model import ModelSpec
from hp_tool.domain.parallel import DEFAULT_STRATEGY, Strategy
from hp_tool.domain.workload import TrainingWorkload

_TOTALS = ("layer_activations_bytes", "worst_stage", "memory_total_bytes", "first_stage_bytes", "step_s")
Columns = TypeVar("Columns", HeadTime, LayerBytes, LayerTime)


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingCosts:
    """Predictions for n candidates: arrays of shape (n,), numbers of one alone, or what broadcasts to the shape of a grid;
    bytes and seconds.
    """

    memory_parts: dict[str, FloatArray]
    """By MEMORY_PARTS, on the worst stage."""
    layer_activations_bytes: FloatArray
    worst_stage: FloatArray
    memory_total_bytes: FloatArray
    first_stage_bytes: FloatArray
    """Allocated on the first stage: what a run reports whose first rank speaks for all."""
    capacity_bytes: FloatArray | float
    """Usable bytes of the device; of the kind that memory_parts are of, where there are two."""
    parts: dict[str, FloatArray]
    """By TIME_PARTS; exposed seconds."""
    step_s: FloatArray
    host_bytes: FloatArray | float = 0.0
    """Most that one rank keeps in host memory."""
    host_capacity_bytes: float = math.inf
    """A rank's share of the host's memory; infinite where nobody knows it, or nothing is kept there."""
    layers_by_kind: tuple[FloatArray, ...] = ()
    """Layers on each stage of either kind of GPU, where there are two."""

    @property
    def feasible(self) -> BoolArray:
        """Fits in memory; whether it is legal was decided before it became a candidate."""
        fits: BoolArray = self.memory_total_bytes <= self.capacity_bytes
        return fits & (self.host_bytes <= self.host_capacity_bytes) if math.isfinite(self.host_capacity_bytes) else fits

    def rows(self, shape: tuple[int, ...]) -> TrainingCosts:
        """Of a grid of this shape: a row for each of its candidates."""

        def each(column: FloatArray) -> FloatArray:
            return column if column.shape == (math.prod(shape),) else np.broadcast_to(column, shape).ravel()

        return TrainingCosts(
            memory_parts={name: each(column) for name, column in self.memory_parts.items()},
            parts={name: each(column) for name, column in self.parts.items()},
            capacity_bytes=self.capacity_bytes,
            layers_by_kind=self.layers_by_kind,
            host_bytes=each(self.host_bytes) if isinstance(self.host_bytes, np.ndarray) else self.host_bytes,
            host_capacity_bytes=self.host_capacity_bytes,
            **{name: each(getattr(self, name)) for name in _TOTALS},
        )

    def row(self, index: int) -> TrainingCosts:
        """One of the rows alone."""

        def numbers(columns: dict[str, Any]) -> dict[str, Any]:
            return {
                name: column[index].item() if isinstance(column, np.ndarray) else column for name, column in columns.items()
            }

        capacity = self.capacity_bytes
        return TrainingCosts(
            memory_parts=numbers(self.memory_parts),
            parts=numbers(self.parts),
            capacity_bytes=float(capacity[index] if isinstance(capacity, np.ndarray) else capacity),
            layers_by_kind=tuple(column[index].item() for column in self.layers_by_kind),
            host_bytes=numbers({"host": self.host_bytes})["host"],
            host_capacity_bytes=self.host_capacity_bytes,
            **numbers({name: getattr(self, name) for name in _TOTALS}),
        )


def training_costs(
    *,
    model: ModelSpec,
    cluster: ClusterSpec,
    workload: TrainingWorkload,
    profile: EfficiencyProfile,
    candidates: Candidates,
    strategy: Strategy = DEFAULT_STRATEGY,
    memory_headroom_fraction: float = 0.05,
) -> TrainingCosts:
    """Full memory and step-time parts of every candidate. One row runs the same formulas as ten million.

    Of a grid, what does not depend on one of its axes comes with a length of 1 there.
    """
    # Layers depend on few axes: compute them once for each combination that occurs.
    machine: dict[str, Any] = {"model": model, "cluster": cluster, "workload": workload, "profile": profile}
    stages = stage_layers(model, candidates, framework=workload.framework)
    kinds, kind_of = distinct_rows(candidates, (*layer_axes(candidates), *spreading_axes(cluster)))
    timing: dict[str, Any] = {"strategy": strategy, "split_backward": anywhere(splits_backward(candidates))}
    if model.architecture == "encoder_decoder":
        sizes = _spread(mean_layer_bytes(model=model, workload=workload, candidates=kinds), kind_of)
        times = _spread(mean_layer_time(**machine, candidates=kinds, strategy=strategy), kind_of)
        ends = _spread(both_heads(**machine, candidates=kinds), kind_of)
        candidates = counted_candidates(model, candidates)
        # What is left is the decoder's: its head and its loss.
        machine["workload"] = workload = decoder_workload(workload)
    else:
        sizes = _spread(layer_bytes(model=model, workload=workload, candidates=kinds), kind_of)
        times = _spread(layer_time(**machine, candidates=kinds, **timing), kind_of)
        ends = _spread(head_time(**machine, candidates=kinds), kind_of)
    m = micro_batches(candidates, workload=workload)
    first, last = sizes, sizes
    if model.num_experts:
        sparse = _spread(layer_bytes(model=model, workload=workload, candidates=kinds, moe=True), kind_of)
        first, last = (_mix(sizes, sparse, end.moe_fraction) for end in (stages.first, stages.last))
        sparse_times = _spread(layer_time(**machine, candidates=kinds, **timing, moe=True), kind_of)
        if merges_passes(workload):
            merged = _spread(layer_time(**machine, candidates=kinds, **timing, moe=True, merged=True), kind_of)
            sparse_times = _mix(sparse_times, merged, merged_share(candidates, micro_batches=m))
        times = _mix(times, sparse_times, stages.pace_moe_fraction)
    states = state_costs(**machine, candidates=candidates)

    asked: dict[str, Any] = {"model": model, "workload": workload, "profile": profile, "micro_batches": m}
    held = memory(**asked, candidates=candidates, layers=(first, last), stages=stages, states=states)
    between = middle_stages(model, workload, candidates, stages=stages)
    if between is not None:
        inner = stage_layers(model, between, framework=workload.framework)
        first, last = sizes, sizes
        if model.num_experts:
            first, last = (_mix(sizes, sparse, end.moe_fraction) for end in (inner.first, inner.last))
        held_between = memory(
            **asked,
            candidates=between,
            layers=(first, last),
            stages=inner,
            states=state_costs(**machine, candidates=between),
        )
        held = fuller(held, held_between, candidates=candidates)
    parts = time_parts(
        **machine,
        candidates=candidates,
        layer=times,
        stages=stages,
        head=ends,
        states=states,
        micro_batches=m,
        offloaded=held.offloaded,
    )
    return TrainingCosts(
        memory_parts=held.parts,
        layer_activations_bytes=held.layer_activations,
        worst_stage=held.worst_stage,
        memory_total_bytes=held.total,
        first_stage_bytes=held.first_stage,
        capacity_bytes=cluster.gpu.memory_bytes * (1.0 - memory_headroom_fraction),
        host_bytes=held.host_bytes,
        host_capacity_bytes=cluster.gpu.host_memory_bytes or math.inf if workload.offload else math.inf,
        parts=parts,
        step_s=sum((parts[name] for name in TIME_PARTS[1:]), parts[TIME_PARTS[0]]),
    )


def _spread(columns: Columns, kind_of: NDArray[np.intp] | None) -> Columns:
    """Each row's own entry of every column; None: every row is its own kind. Scalars stay scalars."""
    if kind_of is None:
        return columns
    values = {f.name: getattr(columns, f.name) for f in fields(columns)}
    return type(columns)(**{name: value[kind_of] if isinstance(value, np.ndarray) else value for name, value in values.items()})


def _mix(dense: Columns, sparse: Columns, moe_fraction: Column) -> Columns:
    """The mean layer of a stage with this share of mixture-of-experts layers, or of layers with other costs."""
    names = [f.name for f in fields(dense)]
    return type(dense)(**{n: getattr(dense, n) + moe_fraction * (getattr(sparse, n) - getattr(dense, n)) for n in names})
