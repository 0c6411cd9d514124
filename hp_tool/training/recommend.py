"""The best training configurations of a query's space; if nothing in it is acceptable, what comes nearest."""

from __future__ import annotations

import time
from dataclasses import replace

import numpy as np

from hp_tool.cost.candidates import Candidates
from hp_tool.domain.frameworks import facts
from hp_tool.domain.query import Query
from hp_tool.domain.result import Ranking, Recommendation, SpaceSummary
from hp_tool.errors import InputError
from hp_tool.training.calibrated import CalibratedPredictor, Calibrations
from hp_tool.training.pareto import fewest_devices
from hp_tool.training.problem import TrainingProblem, resolve_training
from hp_tool.training.rank import CostedRows, CostedSpace, cost_space, costed_chunks, recommendations

MAX_TOP = 1_000
NEAREST = 3
"""Misses in an answer."""


def recommend(*, query: Query, top: int = 10, calibrations: Calibrations | None = None) -> Ranking[Recommendation]:
    """Rank every legal configuration of the space by predicted step time and return the best `top`.

    If nothing is acceptable and the query leaves zero_stage free, all ZeRO stages are tried; if that does not help, the
    answer holds what comes nearest. What `calibrations` know about the cluster decides the ranking and what fits; estimates
    are given without and with it.

    Objective min_gpus takes cluster.num_gpus as the maximum and answers for the fewest devices on which something is
    acceptable: whole nodes, or equal shares of one, that the model and the batch can be divided over.
    """
    if not 1 <= top <= MAX_TOP:
        raise InputError(f"top must be from 1 to {MAX_TOP}, got {top}", field="top")
    start = time.perf_counter()
    problem = resolve_training(query)
    predictor = None if calibrations is None else calibrations(problem)
    if query.objective == "min_gpus":
        problem, space = fewest_devices(problem=problem, keep=top, predictor=predictor)
    else:
        space = cost_space(problem=problem, keep=top, predictor=predictor)
    misses: tuple[Recommendation, ...] = ()
    if space.legal and not space.feasible:
        further = _with_all_zero_stages(problem, keep=top, predictor=predictor)
        if further is not None:
            space = further
        else:
            missed = _nearest_misses(problem, predictor=predictor).candidates
            misses = nearest_recommendations(missed, problem=problem, predictor=predictor)
    return Ranking(
        recommendations=recommendations(space.candidates, problem=problem, predictor=predictor),
        space=SpaceSummary(legal=space.legal, feasible=space.feasible, seconds=time.perf_counter() - start),
        rejections=space.rejections,
        nearest_misses=misses,
    )


def _with_all_zero_stages(problem: TrainingProblem, *, keep: int, predictor: CalibratedPredictor | None) -> CostedSpace | None:
    """The space under every ZeRO stage of the framework, if the query leaves the stage free and something is then
    acceptable; else None. By default the costly stages, which send gradients or weights with every micro-batch, are left out.
    """
    if problem.parallel.zero_stage is not None:
        return None
    stages = facts(problem.workload.framework).zero_stages
    free = replace(problem, parallel=replace(problem.parallel, zero_stage=stages))
    space = cost_space(problem=free, keep=keep, predictor=predictor)
    return space if space.feasible else None


def _nearest_misses(problem: TrainingProblem, *, predictor: CalibratedPredictor | None) -> CostedRows:
    """The `nearest` of a whole space, in which nothing is acceptable."""
    kept: list[CostedRows] = []
    for rows, _ in costed_chunks(problem=problem, predictor=predictor):
        kept = [nearest(CostedRows.concatenate([*kept, rows]), problem=problem)]
    return kept[0]


def nearest(rows: CostedRows, *, problem: TrainingProblem) -> CostedRows:
    """The NEAREST of candidates none of which is acceptable: first those that miss one limit alone, memory or time, then by
    how far they are off: bytes over the capacity, or seconds over the longest step that max_days and max_cost allow,
    whichever is the larger multiple.
    """
    capacity = problem.cluster.gpu.memory_bytes * (1.0 - problem.constraints.memory_headroom_fraction)
    size, time = rows.memory_total_bytes / capacity, rows.step_s / problem.longest_step_s
    missed = (size > 1.0).astype(np.int64) + (time > 1.0)
    return rows.take(np.lexsort((rows.step_s, np.maximum(size, time), missed))[:NEAREST])


def nearest_recommendations(
    chosen: Candidates, *, problem: TrainingProblem, predictor: CalibratedPredictor | None = None
) -> tuple[Recommendation, ...]:
    """Candidates that are not acceptable in full, with every limit they miss among their estimate's reasons."""
    rows = recommendations(chosen, problem=problem, predictor=predictor)
    return tuple(replace(row, estimate=problem.with_missed_targets(row.estimate)) for row in rows)
