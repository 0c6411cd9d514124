"""Costs and estimates of a training problem, corrected by a calibration."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import reduce
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from hp_tool.cost.arrays import BoolArray, FloatArray, IntArray
from hp_tool.cost.breakdown import estimate_row
from hp_tool.cost.candidates import Candidates
from hp_tool.cost.training import TrainingCosts
from hp_tool.cost.uncertainty import ALLOCATABLE_FRACTION
from hp_tool.domain.digests import problem_digest, strategy_digest
from hp_tool.domain.fit import fit_of
from hp_tool.domain.result import Estimate, Intervals, Reason
from hp_tool.domain.units import format_count
from hp_tool.questions.training.links import Links, with_links
from hp_tool.questions.training.problem import TrainingProblem

if TYPE_CHECKING:
    from hp_tool.loop.calibration import Calibration, MemoryPrediction, StepPrediction

CONFIDENCE = 0.9
RELATIVE_TOLERANCE = 1e-9
"""Relative difference of step times below which they count as uncorrected."""
CRASHED = "crashed"
"""Reason code of configurations that crashed."""
MEMORY_OVERHEAD = "overhead"
"""Part of memory outside the framework's allocator; calibrations of allocated bytes leave it
unchanged.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class KnownRow:
    """Posterior of one configuration given the calibration and its own runs; each prediction has
    one row.
    """

    step: StepPrediction
    memory: MemoryPrediction
    """Allocated memory in bytes."""
    ran: bool
    """Whether a complete run of it succeeded, so that it fits."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CalibratedPredictor:
    """Corrects costs and estimates by a calibration."""

    calibration: Calibration
    provenance: dict[str, Any] = field(default_factory=dict)
    """The stored calibration; empty if a running search has not stored it yet."""
    release: str | None = None
    """Framework release assumed for queries that name none; None if the calibration does not
    distinguish releases.
    """
    links: Links = field(default_factory=Links)
    """Fitted bandwidths relative to the stated ones; costs are computed with them."""
    crashed: Mapping[str, Sequence[Mapping[str, Any]]] = field(default_factory=dict)
    """Configurations that crashed and never succeeded, by problem, from `learning.outcomes`."""
    ran: Mapping[str, Sequence[Mapping[str, Any]]] = field(default_factory=dict)
    """Configurations with a successful complete run, in the same form, with `step_s`."""

    def crashes(self, candidates: Candidates, *, problem: TrainingProblem) -> IntArray:
        """Return the number of crashed runs of each candidate that never succeeded, shape (n,)."""
        runs: IntArray = np.zeros(candidates.shape, dtype=np.int64)
        for each in _outcomes_of_problem(self.crashed, problem):
            runs = np.where(_matches_configuration(each, candidates), each["runs"], runs)
        return runs.ravel()

    def measured(self, candidates: Candidates, *, problem: TrainingProblem) -> BoolArray:
        """Return whether a complete run of each candidate succeeded on this cluster, shape (n,)."""
        ran: BoolArray = np.zeros(candidates.shape, dtype=np.bool_)
        for each in _outcomes_of_problem(self.ran, problem):
            ran = ran | _matches_configuration(each, candidates)
        return ran.ravel()

    def measures(self, problem: TrainingProblem) -> bool:
        """Return whether any complete run of this problem succeeded on this cluster."""
        return bool(_outcomes_of_problem(self.ran, problem))

    def costs(
        self,
        costs: TrainingCosts,
        *,
        candidates: Candidates,
        problem: TrainingProblem,
        residuals: bool = False,
    ) -> TrainingCosts:
        """Return the calibrated costs of n candidates: medians of time and memory, in parts that
        sum to the totals.

        With `residuals`, also apply corrections from similar configurations, which is slow for
        large n.
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
        """Return row `index` as a calibrated estimate, including residuals, from uncalibrated
        `costs`.

        `known` contains the configuration's own runs. Verdict, rates and cost follow from the
        corrected values. The intervals are those of the fit: parameter uncertainty and unexplained
        effects. Memory outside the allocator and a nearly full device do not widen them.
        `provenance["stalls"]` contains the stall probability and the factor of a stalled step.
        `provenance["measured"]` contains the number of complete runs of the configuration and their
        median step time in seconds.
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
            source=f"{format_count(len(self.calibration.measurement_ids), 'measurement')} on this "
            "cluster",
        )
        correction = float((calibrated.step_s / alone.step_s)[0])
        learnt = {**self.provenance, **self.calibration.summary(), "correction": correction}
        if not self.links.as_stated:
            learnt["links"] = asdict(self.links)
        provenance = {**estimate.provenance, "calibration": learnt}
        if abs(correction - 1.0) < RELATIVE_TOLERANCE:
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
        own = next(
            (
                each
                for each in _outcomes_of_problem(self.ran, problem)
                if _matches_configuration(each, one).any()
            ),
            None,
        )
        if own is not None:
            provenance["measured"] = {"runs": own["runs"], "step_s": own["step_s"]}
        fits = own is not None or (known is not None and known.ran)
        fails = 0.0 if fits else float(self._fails(alone, allocated)[0])
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
        """Return the calibrated costs of n candidates, including residuals, and their probabilities
        of running out of memory (0 for candidates that ran).
        """
        calibrated, _, allocated = self._calibrated(
            costs, candidates=candidates, problem=problem, residuals=True
        )
        fails = self._fails(costs, allocated)
        return calibrated, np.where(self.measured(candidates, problem=problem), 0.0, fails)

    def _fails(self, costs: TrainingCosts, allocated: MemoryPrediction) -> FloatArray:
        """Return (n,) probabilities that allocated memory exceeds what can be allocated on the
        device, without the memory outside the allocator.
        """
        return 1.0 - allocated.fit_probability(
            ALLOCATABLE_FRACTION * (costs.device_bytes - costs.memory_parts[MEMORY_OVERHEAD])
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
        """Return the costs with each part of the step scaled by its group's factor, and overheads
        as a separate part.

        One factor scales the allocated memory; additional bytes common to all runs belong to the
        overhead. Residuals scale both.
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


def _outcomes_of_problem(
    outcomes: Mapping[str, Sequence[Mapping[str, Any]]], problem: TrainingProblem
) -> Sequence[Mapping[str, Any]]:
    """Return the stored configurations of this problem and strategy."""
    if not outcomes:
        return ()
    digest = problem_digest(model=problem.model, cluster=problem.cluster, training=problem.workload)
    same = outcomes.get(digest, ())
    strategy = strategy_digest(problem.strategy) if same else ""
    return [each for each in same if each.get("strategy", strategy) == strategy]


def _matches_configuration(configuration: Mapping[str, Any], candidates: Candidates) -> BoolArray:
    """Return whether each candidate equals a stored configuration."""
    columns = configuration["columns"].items()
    return reduce(np.logical_and, (getattr(candidates, name) == value for name, value in columns))


class Calibrations(Protocol):
    """Finds the calibration for a problem's cluster, software and model family."""

    def __call__(self, problem: TrainingProblem, /) -> CalibratedPredictor | None:
        """Return the predictor; None without a valid calibration."""

    def __hash__(self) -> int:
        """Return a hash, because caches of answers use calibrations as keys."""

    def unused(self, problem: TrainingProblem) -> str | None:
        """Return the reason why there is no predictor; None if there is one, or if nothing was ever
        measured.
        """


def with_unused_reason(
    estimate: Estimate, *, problem: TrainingProblem, calibrations: Calibrations
) -> Estimate:
    """Return the estimate with the reason why no calibration applies; unchanged if one does."""
    reason = calibrations.unused(problem)
    return (
        estimate
        if reason is None
        else replace(estimate, provenance={**estimate.provenance, "calibration_unused": reason})
    )
