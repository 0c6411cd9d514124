"""If nothing in a space is acceptable: shard further, and if that does not help either, what comes nearest."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from hp_tool.cost.candidates import Candidates
from hp_tool.domain.parallel import zero_stages
from hp_tool.domain.query import Query
from hp_tool.domain.result import Recommendation
from hp_tool.training.calibrated import CalibratedPredictor
from hp_tool.training.limits import longest_step_s, with_missed_targets
from hp_tool.training.problem import TrainingProblem
from hp_tool.training.rank import CostedRows, CostedSpace, cost_space, costed_chunks, recommendations

NEAREST = 3
"""Misses in an answer."""


def with_all_zero_stages(
    *, query: Query, problem: TrainingProblem, keep: int, predictor: CalibratedPredictor | None = None
) -> CostedSpace | None:
    """The space under every ZeRO stage of the framework, if the query leaves the stage free and something is then
    acceptable; else None. By default the costly stages, which send gradients or weights with every micro-batch, are left out.
    """
    if query.parallel.zero_stage is not None:
        return None
    free = replace(query, parallel=replace(query.parallel, zero_stage=zero_stages(problem.workload.framework)))
    space = cost_space(query=free, problem=problem, keep=keep, predictor=predictor)
    return space if space.feasible else None


def nearest_misses(*, query: Query, problem: TrainingProblem, predictor: CalibratedPredictor | None = None) -> CostedRows:
    """The `nearest` of a whole space, in which nothing is acceptable."""
    kept: list[CostedRows] = []
    for rows, _ in costed_chunks(query=query, problem=problem, predictor=predictor):
        kept = [nearest(CostedRows.concatenate([*kept, rows]), problem=problem)]
    return kept[0]


def nearest(rows: CostedRows, *, problem: TrainingProblem) -> CostedRows:
    """The NEAREST of candidates none of which is acceptable: first those that miss one limit alone, memory or time, then by
    how far they are off: bytes over the capacity, or seconds over the longest step that max_days and max_cost allow,
    whichever is the larger multiple.
    """
    capacity = problem.cluster.gpu.memory_bytes * (1.0 - problem.constraints.memory_headroom_fraction)
    size, time = rows.memory_total_bytes / capacity, rows.step_s / longest_step_s(problem)
    missed = (size > 1.0).astype(np.int64) + (time > 1.0)
    return rows.take(np.lexsort((rows.step_s, np.maximum(size, time), missed))[:NEAREST])


def nearest_recommendations(
    chosen: Candidates, *, problem: TrainingProblem, predictor: CalibratedPredictor | None = None
) -> tuple[Recommendation, ...]:
    """Candidates that are not acceptable in full, with every limit they miss among their estimate's reasons."""
    rows = recommendations(chosen, problem=problem, predictor=predictor)
    return tuple(replace(row, estimate=with_missed_targets(row.estimate, problem)) for row in rows)
