"""Predictions corrected by what was measured on a cluster: the same costs and estimates with calibrated numbers."""

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
from hp_tool.training.problem import TrainingProblem
from hp_tool.units import counted

CONFIDENCE = 0.9
MEMORY_OVERHEAD = "overhead"
"""The memory part outside the framework's allocator. A calibration is fitted on allocated bytes and leaves it alone."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CalibratedPredictor:
    """Corrects costs and estimates by a calibration."""

    calibration: Calibration
    provenance: dict[str, Any] = field(default_factory=dict)
    """Which stored calibration it is; empty for one that a running search has not stored yet."""

    def costs(
        self, costs: TrainingCosts, *, candidates: Candidates, problem: TrainingProblem, residuals: bool = False
    ) -> TrainingCosts:
        """Costs of n candidates after calibration: medians of time and memory, in parts that still sum to the totals.
        `residuals`: also apply what was learnt about similar configurations, which is slow for large n.
        """
        return self._corrected(costs, self._predict(costs, candidates=candidates, problem=problem, residuals=residuals))

    def estimate(self, index: int, *, costs: TrainingCosts, candidates: Candidates, problem: TrainingProblem) -> Estimate:
        """Row `index` in full after calibration, residuals included, from uncalibrated `costs`.

        Verdict, rates and money follow from the new numbers. The intervals are the fit's own: what its measurements left
        unknown, and what no factor explains.
        """
        one = candidates.take(np.array([index]))
        alone = costs.row(index).each(lambda number: np.array([number]))
        predicted = self._predict(alone, candidates=one, problem=problem, residuals=True)
        estimate = estimate_row(0, case=problem, costs=self._corrected(alone, predicted), candidates=one)
        return replace(
            problem.with_missed_targets(estimate),
            intervals=self._intervals(predicted, outside_bytes=float(alone.memory_parts[MEMORY_OVERHEAD][0])),
            provenance={**estimate.provenance, "calibration": {**self.provenance, **self.calibration.summary()}},
        )

    def _predict(
        self, costs: TrainingCosts, *, candidates: Candidates, problem: TrainingProblem, residuals: bool
    ) -> _Predicted:
        features = residual_features(case=problem, candidates=candidates) if residuals else None
        passes = layer_passes(case=problem, candidates=candidates)
        return _Predicted(
            layer_passes=passes,
            step=self.calibration.step_time.predict(parts_s=costs.parts, layer_passes=passes, features=features),
            allocated=self.calibration.memory.predict(memory_bytes=allocated_bytes(costs), features=features),
        )

    def _corrected(self, costs: TrainingCosts, predicted: _Predicted) -> TrainingCosts:
        """Costs with time parts scaled by their group's factor, and overheads as a part of their own. Allocated memory is
        scaled by one factor; bytes that every run needed on top join the overhead. Residuals scale both.
        """
        parts = self.calibration.step_time.calibrated_parts(
            parts_s=costs.parts, layer_passes=predicted.layer_passes, step=predicted.step
        )
        fit, allocated = self.calibration.memory, predicted.allocated.median_bytes
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

    def _intervals(self, predicted: _Predicted, *, outside_bytes: float) -> Intervals:
        """Intervals of a single row. Memory outside the allocator adds no uncertainty."""
        step = predicted.step.interval(confidence=CONFIDENCE)
        memory = predicted.allocated.interval(confidence=CONFIDENCE)
        return Intervals(
            confidence=CONFIDENCE,
            step_s=(float(step[0][0]), float(step[1][0])),
            memory_total_bytes=(float(memory[0][0]) + outside_bytes, float(memory[1][0]) + outside_bytes),
            source=f"{counted(len(self.calibration.measurement_ids), 'measurement')} on this cluster",
        )


Calibrations = Callable[[TrainingProblem], CalibratedPredictor | None]
"""Finds what was learnt about a problem's cluster, software and model family; None if nothing was."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Predicted:
    """A calibration's predictions for n candidates."""

    layer_passes: FloatArray
    step: StepPrediction
    allocated: MemoryPrediction
