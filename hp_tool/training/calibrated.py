"""What was learnt on a cluster, laid over predictions for it: the same costs and estimates with corrected numbers."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from hp_tool.calibration import Calibration, MemoryPrediction, StepPrediction, allocated_bytes, layer_passes, residual_features
from hp_tool.calibration.evidence import FloatArray
from hp_tool.cost.breakdown import estimate_row
from hp_tool.cost.candidates import Candidates
from hp_tool.cost.training import TrainingCosts
from hp_tool.domain.result import Estimate, Intervals
from hp_tool.training.limits import with_missed_targets
from hp_tool.training.problem import TrainingProblem
from hp_tool.units import counted

CONFIDENCE = 0.9
MEMORY_OVERHEAD = "overhead"
"""The memory part that the framework's allocator does not see: a calibration, fitted on allocated bytes, leaves it alone."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Correction:
    """A calibration and where it comes from."""

    calibration: Calibration
    provenance: dict[str, Any] = field(default_factory=dict)
    """Which stored calibration it is; empty for one that a running search has not stored yet."""


Corrections = Callable[[TrainingProblem], Correction | None]
"""Finds what is known about a problem's cluster, software and model family; None where that is nothing."""


def corrected_costs(
    costs: TrainingCosts, *, candidates: Candidates, problem: TrainingProblem, calibration: Calibration, residuals: bool = False
) -> TrainingCosts:
    """Costs of n candidates after calibration: medians of time and memory, in parts that still sum to the totals.
    `residuals`: also what was learnt about configurations alike, which is dear where n is large.
    """
    known = _known(costs, candidates=candidates, problem=problem, calibration=calibration, residuals=residuals)
    return _corrected(costs, known=known, calibration=calibration)


def corrected_estimate(
    index: int,
    *,
    costs: TrainingCosts,
    candidates: Candidates,
    problem: TrainingProblem,
    correction: Correction,
) -> Estimate:
    """Row `index` in full after calibration, from uncalibrated `costs`: verdict, rates and money follow from the new numbers,
    those of configurations alike among them.

    The intervals are the fit's own: what its measurements left unknown, and what no factor explains.
    """
    rows, one = np.array([index]), candidates.take(np.array([index]))
    alone = _row(costs, rows)
    calibration = correction.calibration
    known = _known(alone, candidates=one, problem=problem, calibration=calibration, residuals=True)
    found = estimate_row(0, case=problem, costs=_corrected(alone, known=known, calibration=calibration), candidates=one)
    return replace(
        with_missed_targets(found, problem),
        intervals=_intervals(known, outside_bytes=float(alone.memory_parts[MEMORY_OVERHEAD][0]), calibration=calibration),
        provenance={**found.provenance, "calibration": {**correction.provenance, **calibration.summary()}},
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class _Known:
    """What a calibration says of n candidates."""

    layer_passes: FloatArray
    step: StepPrediction
    allocated: MemoryPrediction


def _known(
    costs: TrainingCosts, *, candidates: Candidates, problem: TrainingProblem, calibration: Calibration, residuals: bool
) -> _Known:
    features = residual_features(case=problem, candidates=candidates) if residuals else None
    passes = layer_passes(case=problem, candidates=candidates)
    return _Known(
        layer_passes=passes,
        step=calibration.predict_step(parts_s=costs.parts, layer_passes=passes, features=features),
        allocated=calibration.predict_memory(memory_bytes=allocated_bytes(costs), features=features),
    )


def _corrected(costs: TrainingCosts, *, known: _Known, calibration: Calibration) -> TrainingCosts:
    """Time parts are scaled by their group's factor, and overheads become a part of their own. Memory that the allocator
    holds is scaled by one factor; bytes that every run needed on top join the overhead. What configurations alike needed
    scales all of it.
    """
    parts = calibration.step_time.calibrated_parts(parts_s=costs.parts, layer_passes=known.layer_passes, step=known.step)
    fit, allocated = calibration.memory, known.allocated.median_bytes
    shift = allocated / (fit.factor * allocated_bytes(costs) + fit.overhead_bytes)
    factor = fit.factor * shift
    memory = {name: size if name == MEMORY_OVERHEAD else size * factor for name, size in costs.memory_parts.items()}
    memory[MEMORY_OVERHEAD] = memory[MEMORY_OVERHEAD] + fit.overhead_bytes * shift
    return replace(
        costs,
        parts=parts,
        step_s=np.asarray(sum(parts.values())),
        memory_parts=memory,
        memory_total_bytes=allocated + costs.memory_parts[MEMORY_OVERHEAD],
        layer_activations_bytes=costs.layer_activations_bytes * factor,
    )


def _intervals(known: _Known, *, outside_bytes: float, calibration: Calibration) -> Intervals:
    """Of one row. Nothing uncertain is added for memory outside the allocator."""
    step = known.step.interval(confidence=CONFIDENCE)
    memory = known.allocated.interval(confidence=CONFIDENCE)
    return Intervals(
        confidence=CONFIDENCE,
        step_s=(float(step[0][0]), float(step[1][0])),
        memory_total_bytes=(float(memory[0][0]) + outside_bytes, float(memory[1][0]) + outside_bytes),
        source=f"{counted(len(calibration.measurement_ids), 'measurement')} on this cluster",
    )


def _row(costs: TrainingCosts, rows: np.ndarray) -> TrainingCosts:
    """The costs of some rows; numbers that all rows share stay as they are."""

    def some(columns: dict[str, FloatArray]) -> dict[str, FloatArray]:
        return {name: np.asarray(column)[rows] for name, column in columns.items()}

    names = ("layer_activations_bytes", "worst_stage", "memory_total_bytes", "step_s")
    return replace(
        costs,
        parts=some(costs.parts),
        memory_parts=some(costs.memory_parts),
        **{name: getattr(costs, name)[rows] for name in names},
    )
