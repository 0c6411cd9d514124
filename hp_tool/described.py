"""Candidates told in full: ranked rows, and what comes nearest where none is acceptable."""

from __future__ import annotations

from dataclasses import replace

from hp_tool.correction import Correction, corrected_estimate
from hp_tool.cost.breakdown import estimate_row
from hp_tool.cost.candidates import Candidates
from hp_tool.domain.parallel import as_asked
from hp_tool.domain.result import Recommendation
from hp_tool.problem import TrainingProblem
from hp_tool.targets import with_missed_targets


def described(chosen: Candidates, problem: TrainingProblem, correction: Correction | None) -> tuple[Recommendation, ...]:
    """The chosen candidates in full, ranked in their order."""
    if len(chosen) == 0:
        return ()
    costs = problem.costs(chosen)
    return tuple(
        Recommendation(
            rank=rank + 1,
            parallel=config,
            estimate=replace(estimate_row(rank, costs=costs, candidates=chosen, case=problem), parallel=config),
            calibrated_estimate=None
            if correction is None
            else replace(
                corrected_estimate(rank, costs=costs, candidates=chosen, problem=problem, correction=correction),
                parallel=config,
            ),
        )
        for rank, config in ((rank, as_asked(chosen.config(rank), problem.parallel)) for rank in range(len(chosen)))
    )


def described_misses(
    chosen: Candidates, problem: TrainingProblem, correction: Correction | None = None
) -> tuple[Recommendation, ...]:
    """The same of candidates that are not acceptable, with every limit they miss among their estimate's reasons."""
    return tuple(
        replace(row, estimate=with_missed_targets(row.estimate, problem)) for row in described(chosen, problem, correction)
    )
