"""Corrected costs and estimates of a training problem, by a calibration that others fitted."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import reduce
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from hp_tool.cost.arrays import FloatArray, IntArray
from hp_tool.cost.breakdown import estimate_row
from hp_tool.cost.candidates import Candidates
from hp_tool.cost.training import TrainingCosts
from hp_tool.domain.digests import problem_digest
from hp_tool.domain.fit import fit_of
from hp_tool.domain.result import Estimate, Intervals, Reason
from hp_tool.domain.units import counted
from hp_tool.questions.training.links import Links, with_links
from hp_tool.questions.training.problem import TrainingProblem

if TYPE_CHECKING:
    from hp_tool.loop.calibration import Calibration, MemoryPrediction, StepPrediction

CONFIDENCE = 0.9
SAME = 1e-9
"""Of a step time: what is nearer was not corrected."""
CRASHED = "crashed"
"""Code of the reason against what was seen to fail."""
MEMORY_OVERHEAD = "overhead"
"""The memory part outside the framework's allocator. A calibration is fitted on allocated bytes and
leaves it alone.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class KnownRow:
    """What a search knows of one configuration by the calibration and its own runs; each prediction
    has one row.
    """

    step: StepPrediction
    memory: MemoryPrediction
    """Of what is allocated."""
    ran: bool
    """A whole run of it worked, so that it fits."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CalibratedPredictor:
    """Corrects costs and estimates by a calibration."""

    calibration: Calibration
    provenance: dict[str, Any] = field(default_factory=dict)
    """Which stored calibration it is; empty for one that a running search has not stored yet."""
    release: str | None = None
    """Of the framework: what a query that names none is taken to mean; None: releases are not told
    apart.
    """
    links: Links = field(default_factory=Links)
    """Bandwidths that it was fitted with, of what is stated: costs are computed anew with them."""
    crashed: Mapping[str, Sequence[Mapping[str, Any]]] = field(default_factory=dict)
    """By problem: configurations that crashed and never succeeded, as `learning.crashes` has
    them.
    """

    def crashes(self, candidates: Candidates, *, problem: TrainingProblem) -> IntArray:
        """(n,) how many runs of each candidate crashed where none succeeded; 0: it was not seen to
        fail.
        """
        runs: IntArray = np.zeros(candidates.shape, dtype=np.int64)
        if self.crashed:
            digest = problem_digest(
                model=problem.model, cluster=problem.cluster, training=problem.workload
            )
            for each in self.crashed.get(digest, ()):
                same = reduce(
                    np.logical_and,
                    (getattr(candidates, name) == value for name, value in each["columns"].items()),
                )
                runs = np.where(same, each["runs"], runs)
        return runs.ravel()

    def costs(
        self,
        costs: TrainingCosts,
        *,
        candidates: Candidates,
        problem: TrainingProblem,
        residuals: bool = False,
    ) -> TrainingCosts:
        """Costs of n candidates after calibration: medians of time and memory, in parts that still
        sum to the totals. `residuals`: also apply what was learnt about similar configurations,
        which is slow for large n.
        """
        return self._calibrated(costs, candidates=candidates, problem=problem, residuals=residuals)[
            0
        ]

    def estimate(
        self,
        index: int,
        *,
        costs: TrainingCosts,
        candidates: Candidates,
        problem: TrainingProblem,
        known: KnownRow | None = None,
    ) -> Estimate:
        """Row `index` in full after calibration, residuals included, from uncalibrated `costs`;
        `known`: with its own runs.

        Verdict, rates and money follow from the new numbers. The intervals are the fit's own: what
        its measurements left unknown, and what no factor explains; neither memory outside the
        allocator nor a nearly full device widens them. `provenance["stalls"]`: the chance that a
        step stalls as runs did, and how many times as long it then takes.
        """
        one = candidates.take(np.array([index]))
        alone = costs.row(index).each(lambda number: np.array([number]))
        calibrated, step, allocated = self._calibrated(
            alone, candidates=one, problem=problem, residuals=True, known=known
        )
        estimate = estimate_row(0, case=problem, costs=calibrated, candidates=one)
        shortest_s, longest_s = (float(bound[0]) for bound in step.interval(confidence=CONFIDENCE))
        outside = alone.memory_parts[MEMORY_OVERHEAD]
        least, most = (
            float((bound + outside)[0]) for bound in allocated.interval(confidence=CONFIDENCE)
        )
        intervals = Intervals(
            confidence=CONFIDENCE,
            step_s=(shortest_s, longest_s),
            memory_total_bytes=(least, most),
            source=f"{counted(len(self.calibration.measurement_ids), 'measurement')} on this "
            "cluster",
        )
        correction = float((calibrated.step_s / alone.step_s)[0])
        learnt = {**self.provenance, **self.calibration.summary(), "correction": correction}
        if not self.links.as_stated:
            learnt["links"] = asdict(self.links)
        provenance = {**estimate.provenance, "calibration": learnt}
        if abs(correction - 1.0) < SAME:
            timed = self.provenance.get("accuracy", {}).get("measurements")
            reason = (
                "runs left out were predicted no better with it than without"
                if timed
                else "no run of it has a step time"
            )
            provenance["calibration_unused"] = f"the step time is the cost model's: {reason}"
        if step.slow is not None:
            stalls = {
                "probability": float(step.slow.probability[0]),
                "slowdown": float((step.slow.step_s / step.regular_s)[0]),
            }
            provenance["stalls"] = stalls
        if crashes := int(self.crashes(one, problem=problem)[0]):
            failed = Reason(
                code=CRASHED,
                message=f"{crashes} runs of it crashed on this cluster, and none succeeded",
            )
            estimate = replace(estimate, feasible=False, reasons=(*estimate.reasons, failed))
        fails = 0.0 if known is not None and known.ran else float(self._fails(alone, allocated)[0])
        assert estimate.memory is not None
        within = estimate.memory.total_bytes <= estimate.memory.capacity_bytes
        return replace(
            problem.with_missed_targets(estimate),
            intervals=intervals,
            out_of_memory_probability=fails,
            fit=fit_of(out_of_memory_probability=fails, within_headroom=within),
            provenance=provenance,
        )

    def judged(
        self, costs: TrainingCosts, *, candidates: Candidates, problem: TrainingProblem
    ) -> tuple[TrainingCosts, FloatArray]:
        """Costs of n candidates after calibration, residuals included, and each one's chance of
        running out of memory.
        """
        calibrated, _, allocated = self._calibrated(
            costs, candidates=candidates, problem=problem, residuals=True
        )
        return calibrated, self._fails(costs, allocated)

    def _fails(self, costs: TrainingCosts, allocated: MemoryPrediction) -> FloatArray:
        """(n,) chance that what is allocated is more than the device without what lies outside the
        allocator.
        """
        return 1.0 - allocated.fit_probability(
            costs.device_bytes - costs.memory_parts[MEMORY_OVERHEAD]
        )

    def _calibrated(
        self,
        costs: TrainingCosts,
        *,
        candidates: Candidates,
        problem: TrainingProblem,
        residuals: bool,
        known: KnownRow | None = None,
    ) -> tuple[TrainingCosts, StepPrediction, MemoryPrediction]:
        """The costs with time parts scaled by their group's factor, and overheads as a part of
        their own; with what they are made from. Allocated memory is scaled by one factor; bytes
        that every run needed on top join the overhead. Residuals scale both.
        """
        from hp_tool.loop.calibration import allocated_bytes, layer_passes, residual_features

        if not self.links.as_stated:
            costs = with_links(problem, self.links).costs(candidates)
        released = problem.as_release(problem.workload.framework_version or self.release)
        features = residual_features(case=released, candidates=candidates) if residuals else None
        passes, before = layer_passes(case=problem, candidates=candidates), allocated_bytes(costs)
        times, fit = self.calibration.step_time, self.calibration.memory
        if known is None:
            step = times.predict(parts_s=costs.parts, layer_passes=passes, features=features)
            allocated = fit.predict(memory_bytes=before, features=features)
        else:
            step, allocated = known.step, known.memory
        parts = times.calibrated_parts(parts_s=costs.parts, layer_passes=passes, step=step)
        shift = allocated.median_bytes / (fit.factor * before + fit.overhead_bytes)
        factor = fit.factor * shift
        memory = {
            name: size if name == MEMORY_OVERHEAD else size * factor
            for name, size in costs.memory_parts.items()
        }
        memory[MEMORY_OVERHEAD] = memory[MEMORY_OVERHEAD] + fit.overhead_bytes * shift
        calibrated = replace(
            costs,
            parts=parts,
            step_s=np.asarray(sum(parts.values())),
            memory_parts=memory,
            memory_total_bytes=allocated.median_bytes + costs.memory_parts[MEMORY_OVERHEAD],
            layer_activations_bytes=costs.layer_activations_bytes * factor,
        )
        return calibrated, step, allocated


class Calibrations(Protocol):
    """Finds what was learnt about a problem's cluster, software and model family."""

    def __call__(self, problem: TrainingProblem, /) -> CalibratedPredictor | None:
        """The predictor; None if nothing was learnt, or nothing that still holds."""

    def __hash__(self) -> int:
        """Caches of answers have it in their keys."""

    def unused(self, problem: TrainingProblem) -> str | None:
        """Why there is no predictor; None where there is one, or nothing was ever measured."""


def with_unused(
    estimate: Estimate, *, problem: TrainingProblem, calibrations: Calibrations
) -> Estimate:
    """The estimate, whose provenance says why nothing that was measured corrects it, unless
    something does.
    """
    reason = calibrations.unused(problem)
    return (
        estimate
        if reason is None
        else replace(estimate, provenance={**estimate.provenance, "calibration_unused": reason})
    )
