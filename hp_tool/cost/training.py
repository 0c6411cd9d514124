"""The training cost model: memory and step time of many candidates at once.

Sources: arXiv 2205.05198 (activations, sequence parallelism, selective recomputation), 2104.04473 (pipeline schedules),
1910.02054 (ZeRO); the constants come in with the efficiency profile.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from hp_tool.cost.candidates import BoolArray, Candidates, FloatArray, IntArray
from hp_tool.cost.distinct import distinct_rows
from hp_tool.cost.head import HeadTime, head_time
from hp_tool.cost.layer import LayerBytes, LayerTime, layer_bytes, layer_time
from hp_tool.cost.memory import MEMORY_PARTS, StageMemory, stage_memory
from hp_tool.cost.pipeline import micro_batches
from hp_tool.cost.step import TIME_PARTS, time_parts
from hp_tool.domain.efficiency import EfficiencyProfile
from hp_tool.domain.hardware import ClusterSpec
from hp_tool.domain.model import ModelSpec
from hp_tool.domain.workload import TrainingWorkload

Columns = TypeVar("Columns", HeadTime, LayerBytes, LayerTime)


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingCosts:
    """Predictions for n candidates; arrays of shape (n,), bytes and seconds."""

    memory_parts: dict[str, FloatArray]
    """By MEMORY_PARTS, on the worst stage."""
    layer_activations_bytes: FloatArray
    worst_stage: IntArray
    memory_total_bytes: FloatArray
    capacity_bytes: float
    parts: dict[str, FloatArray]
    """By TIME_PARTS; exposed seconds."""
    step_s: FloatArray

    @property
    def feasible(self) -> BoolArray:
        """Fits in memory; whether it is legal was decided before it became a candidate."""
        return self.memory_total_bytes <= self.capacity_bytes

    def __len__(self) -> int:
        return len(self.step_s)


def training_costs(
    *,
    model: ModelSpec,
    cluster: ClusterSpec,
    workload: TrainingWorkload,
    profile: EfficiencyProfile,
    candidates: Candidates,
    memory_headroom_fraction: float = 0.05,
) -> TrainingCosts:
    """Full memory and step-time parts of every candidate. One row runs the same formulas as ten million."""
    # What happens inside a layer depends on few axes: compute it once for each combination that occurs.
    kinds, kind_of = distinct_rows(
        candidates, ("tensor_parallel_size", "context_parallel_size", "micro_batch_size", "sequence_parallel")
    )
    machine = {"model": model, "cluster": cluster, "workload": workload, "profile": profile}
    times = _spread(layer_time(**machine, candidates=kinds), kind_of)
    ends = _spread(head_time(**machine, candidates=kinds), kind_of)
    sizes = _spread(layer_bytes(model=model, workload=workload, candidates=kinds), kind_of)

    m = micro_batches(candidates, workload=workload)
    memory, worst_stage, parameters = _worst_stage(
        model=model, workload=workload, profile=profile, candidates=candidates, layer=sizes, m=m
    )
    parts = time_parts(**machine, candidates=candidates, layer=times, head=ends, parameters=parameters, micro_batches=m)
    return TrainingCosts(
        memory_parts=memory.parts,
        layer_activations_bytes=memory.layer_activations,
        worst_stage=worst_stage,
        memory_total_bytes=memory.total,
        capacity_bytes=cluster.gpu.memory_bytes * (1.0 - memory_headroom_fraction),
        parts=parts,
        step_s=sum((parts[name] for name in TIME_PARTS[1:]), parts[TIME_PARTS[0]]),
    )


def _worst_stage(
    *,
    model: ModelSpec,
    workload: TrainingWorkload,
    profile: EfficiencyProfile,
    candidates: Candidates,
    layer: LayerBytes,
    m: FloatArray,
) -> tuple[StageMemory, IntArray, FloatArray]:
    """Memory of the fullest stage, its index, and the largest parameter count of any stage.

    With equal numbers of layers a middle stage holds fewer micro-batches than the first and no embedding, so only the
    first and the last stage can be the worst.
    """
    last_stage = candidates.pipeline_parallel_size - 1
    stages = [
        stage_memory(
            model=model, workload=workload, profile=profile, candidates=candidates, layer=layer, stage=stage, micro_batches=m
        )
        for stage in (np.zeros_like(last_stage), last_stage)
    ]
    first, last = stages
    later = last.total > first.total
    worst = StageMemory(
        parts={name: np.where(later, last.parts[name], first.parts[name]) for name in MEMORY_PARTS},
        layer_activations=np.where(later, last.layer_activations, first.layer_activations),
        parameters=np.where(later, last.parameters, first.parameters),
    )
    return worst, np.where(later, last_stage, 0), np.maximum(first.parameters, last.parameters)


def _spread(columns: Columns, kind_of: NDArray[np.intp]) -> Columns:
    """Each row's own entry of every column."""
    return type(columns)(**{f.name: getattr(columns, f.name)[kind_of] for f in fields(columns)})
