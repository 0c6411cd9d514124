"""Correct the costs and estimates of a training problem with a calibration."""

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
"""Maximum relative difference between calibrated and uncalibrated step time at which the
calibration counts as unused.
"""
CRASHED = "crashed"
"""Reason code of configurations that crashed."""
MEMORY_OVERHEAD = "overhead"
"""Part of memory outside the framework's allocator. Calibrations of allocated bytes do not change
it.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class KnownRow:
    """Predictions for one configuration from the calibration and from its own runs. Each prediction
    has one row.
    """

    step: StepPrediction
    memory: MemoryPrediction
    """Allocated memory in bytes."""
    ran: bool
    """Whether a complete run of the configuration succeeded, which proves that it fits in
    memory.
    """


@dataclass(frozen=True, slots=True, kw_only=True)
class CalibratedPredictor:
    """Correct costs and estimates with a calibration."""

    calibration: Calibration
    provenance: dict[str, Any] = field(default_factory=dict)
    """Id, version and accuracy of the stored calibration; empty during a search that has not stored
    it yet.
    """
    release: str | None = None
    """Framework release assumed for queries that set none; None if the calibration does not depend
    on the release.
    """
    links: Links = field(default_factory=Links)
    """Fitted link bandwidths relative to the specified ones. Costs are computed with them."""
    crashed: Mapping[str, Sequence[Mapping[str, Any]]] = field(default_factory=dict)
    """Configurations that crashed and never succeeded (`learning.outcomes`), by problem digest."""
    ran: Mapping[str, Sequence[Mapping[str, Any]]] = field(default_factory=dict)
    """Configurations with a successful complete run, and their `step_s`, by problem digest."""

    def crashes(self, candidates: Candidates, *, problem: TrainingProblem) -> IntArray:
        """Return (n,) the number of crashed runs per candidate, or 0 if a run of the candidate
        succeeded.
        """
        runs: IntArray = np.zeros(candidates.shape, dtype=np.int64)
        for each in _outcomes_of_problem(self.crashed, problem):
            runs = np.where(_matches_configuration(each, candidates), each["runs"], runs)
        return runs.ravel()

    def measured(self, candidates: Candidates, *, problem: TrainingProblem) -> BoolArray:
        """Return (n,) whether a complete run of the candidate succeeded on this cluster."""
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
        """Return the calibrated costs of n candidates: medians of time and memory. The parts sum to
        the totals.

        With `residuals`, corrections from similar configurations are also applied, which is slow
        for large n.
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
        """Return the calibrated estimate of row `index`, including residuals.

        Feasibility, rates and cost follow from the calibrated values. The intervals include the
        uncertainty of the fitted parameters and unexplained effects, but neither memory outside the
        allocator nor waits on a nearly full device. `provenance["stalls"]` contains the stall
        probability and the slowdown of a stalled step. `provenance["measured"]` contains the number
        of complete runs of the configuration and their median step time in seconds.

        Args:
            index: Row of `costs` and `candidates`.
            costs: Uncalibrated costs.
            known: Predictions from the configuration's own runs, if it ran.
        """
        candidate = candidates.take(np.array([index]))
        row_costs = costs.row(index).each(lambda number: np.array([number]))
        calibrated, step, allocated = self._calibrated(
            row_costs, candidates=candidate, problem=problem, residuals=True, known=known
        )
        estimate = estimate_row(0, case=problem, costs=calibrated, candidates=candidate)
        shortest_s, longest_s = (float(bound[0]) for bound in step.interval(confidence=CONFIDENCE))
        outside = row_costs.memory_parts[MEMORY_OVERHEAD]
        min_bytes, max_bytes = (
            float((bound + outside)[0]) for bound in allocated.interval(confidence=CONFIDENCE)
        )
        intervals = Intervals(
            confidence=CONFIDENCE,
            step_s=(shortest_s, longest_s),
            memory_total_bytes=(min_bytes, max_bytes),
            source=f"{format_count(len(self.calibration.measurement_ids), 'measurement')} on this "
            "cluster",
        )
        correction = float((calibrated.step_s / row_costs.step_s)[0])
        learnt = {**self.provenance, **self.calibration.summary(), "correction": correction}
        if not self.links.as_stated:
            learnt["links"] = asdict(self.links)
        provenance = {**estimate.provenance, "calibration": learnt}
        if abs(correction - 1.0) < RELATIVE_TOLERANCE:
            timed = self.provenance.get("accuracy", {}).get("measurements")
            reason = (
                "the calibration did not improve predictions of runs that were left out of the fit"
                if timed
                else "no run of the calibration has a step time"
            )
            provenance["calibration_unused"] = f"the step time is the cost model's: {reason}"
        if step.slow is not None:
            stalls = {
                "probability": float(step.slow.probability[0]),
                "slowdown": float((step.slow.step_s / step.regular_s)[0]),
            }
            provenance["stalls"] = stalls
        if crashes := int(self.crashes(candidate, problem=problem)[0]):
            failed = Reason(
                code=CRASHED,
                message=f"{format_count(crashes, 'run')} of this configuration crashed on this "
                "cluster, and none succeeded",
            )
            estimate = replace(estimate, feasible=False, reasons=(*estimate.reasons, failed))
        own_runs = next(
            (
                each
                for each in _outcomes_of_problem(self.ran, problem)
                if _matches_configuration(each, candidate).any()
            ),
            None,
        )
        if own_runs is not None:
            provenance["measured"] = {"runs": own_runs["runs"], "step_s": own_runs["step_s"]}
        fits = own_runs is not None or (known is not None and known.ran)
        fails = 0.0 if fits else float(self._fails(row_costs, allocated)[0])
        assert estimate.memory is not None
        within = estimate.memory.total_bytes <= estimate.memory.capacity_bytes
        return replace(
            problem.with_missed_targets(estimate),
            intervals=intervals,
            out_of_memory_probability=fails,
            fit=fit_of(out_of_memory_probability=fails, within_headroom=within),
            provenance=provenance,
        )

    def costs_and_risks(
        self, costs: TrainingCosts, *, candidates: Candidates, problem: TrainingProblem
    ) -> tuple[TrainingCosts, FloatArray]:
        """Return the calibrated costs of n candidates, including residuals, and (n,) their
        probabilities of running out of memory. The probability is 0 for candidates that ran.
        """
        calibrated, _, allocated = self._calibrated(
            costs, candidates=candidates, problem=problem, residuals=True
        )
        fails = self._fails(costs, allocated)
        return calibrated, np.where(self.measured(candidates, problem=problem), 0.0, fails)

    def _fails(self, costs: TrainingCosts, allocated: MemoryPrediction) -> FloatArray:
        """Return (n,) probabilities that the allocated memory exceeds the memory available to the
        framework's allocator.
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
        """Return the calibrated costs, and the predictions of step time and allocated memory.

        Each part of the step is multiplied by the factor of its calibration group; overheads are a
        separate part. Allocated memory is multiplied by a single factor. Additional bytes that all
        runs need are added to the overhead. Residuals multiply step time and memory.
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
    """Return the stored configurations that belong to this problem and its settings for all
    layouts.
    """
    if not outcomes:
        return ()
    digest = problem_digest(model=problem.model, cluster=problem.cluster, training=problem.workload)
    same = outcomes.get(digest, ())
    strategy = strategy_digest(problem.strategy) if same else ""
    return [each for each in same if each.get("strategy", strategy) == strategy]


def _matches_configuration(configuration: Mapping[str, Any], candidates: Candidates) -> BoolArray:
    """Return (n,) whether each candidate equals the stored configuration."""
    columns = configuration["columns"].items()
    return reduce(np.logical_and, (getattr(candidates, name) == value for name, value in columns))


class Calibrations(Protocol):
    """Function that returns the calibration for a problem's cluster, software and model family."""

    def __call__(self, problem: TrainingProblem, /) -> CalibratedPredictor | None:
        """Return the calibrated predictor; None if there is no valid calibration."""

    def __hash__(self) -> int:
        """Return a hash, because calibrations are keys of answer caches."""

    def unused(self, problem: TrainingProblem) -> str | None:
        """Return the reason why the problem has no predictor; None if it has one or there are no
        measurements.
        """


def with_unused_reason(
    estimate: Estimate, *, problem: TrainingProblem, calibrations: Calibrations
) -> Estimate:
    """Return the estimate with the reason in its provenance if no calibration applies."""
    reason = calibrations.unused(problem)
    return (
        estimate
        if reason is None
        else replace(estimate, provenance={**estimate.provenance, "calibration_unused": reason})
    )
