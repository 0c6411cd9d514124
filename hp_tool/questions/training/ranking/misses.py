"""Find the nearest misses: the configurations that exceed the limits least."""

from collections.abc import Callable
from dataclasses import fields, replace

import numpy as np
from numpy.typing import NDArray

from hp_tool.cost.arrays import IntArray
from hp_tool.cost.candidates import Candidates
from hp_tool.domain.result import Recommendation
from hp_tool.questions.training.calibrated import CalibratedPredictor
from hp_tool.questions.training.problem import TrainingProblem
from hp_tool.questions.training.ranking.best import search_best
from hp_tool.questions.training.ranking.rank import (
    CostedRows,
    costed_chunks,
    recommendations_of_rows,
)

NUM_NEAREST = 3
"""Number of nearest misses in an answer."""


def nearest_misses(
    problem: TrainingProblem, predictor: CalibratedPredictor | None
) -> tuple[Recommendation, ...]:
    """Return the NUM_NEAREST unacceptable configurations that are nearest to the limits.

    They are selected from all layouts with the usual axis values, and from the fastest
    configurations that fit in memory with any axis values and context exchange.
    """
    unlimited = replace(
        problem, constraints=replace(problem.constraints, max_days=None, max_cost=None)
    )
    best = search_best(unlimited, keep=NUM_NEAREST, rank_by="mean", predictor=predictor)
    rows, variant = best.rows, best.variant
    for number in best.bases:
        base = replace(best.problems[number], constraints=problem.constraints)
        for chunk, _ in costed_chunks(problem=base, predictor=predictor):
            rows = CostedRows.concatenate([rows, chunk])
            variant = np.concatenate([variant, np.full(len(chunk.step_s), number)])
            kept = nearest_rows(rows, problem=problem, variant=variant)
            rows, variant = rows.take(kept), variant[kept]
    misses = []
    for place, number in enumerate(variant.tolist()):
        limited = replace(best.problems[number], constraints=problem.constraints)
        (row,) = nearest_recommendations(
            rows.take(np.array([place])), problem=limited, predictor=predictor
        )
        misses.append(replace(row, rank=place + 1))
    return tuple(misses)


def miss_distance(problem: TrainingProblem) -> Callable[[Recommendation], tuple[int, float, float]]:
    """Return a function that returns the sort key of a recommendation, for the order of
    `nearest_rows`.
    """
    capacity, longest_s = _memory_capacity(problem), problem.longest_step_s

    def of(row: Recommendation) -> tuple[int, float, float]:
        known = row.preferred_estimate
        assert known.memory is not None and known.time is not None  # legal configurations
        size, step_s = known.memory.total_bytes / capacity, known.time.step_s
        time = step_s / longest_s
        return (size > 1.0) + (time > 1.0), max(size, time), step_s

    return of


def _memory_capacity(problem: TrainingProblem) -> float:
    fraction = 1.0 - problem.constraints.memory_headroom_fraction
    return problem.cluster.gpu.memory_bytes * fraction


def nearest_rows(
    rows: CostedRows, *, problem: TrainingProblem, variant: IntArray | None = None
) -> NDArray[np.intp]:
    """Return the indices of the NUM_NEAREST rows that are nearest to the limits.

    Candidates that miss only one limit, memory or time, come first. They are sorted by the larger
    of two ratios: bytes to the capacity, and step time to the longest step that max_days and
    max_cost permit. Equal candidates of the same `variant` count once.
    """
    size, time = (
        rows.memory_total_bytes / _memory_capacity(problem),
        rows.step_s / problem.longest_step_s,
    )
    missed = (size > 1.0).astype(np.int64) + (time > 1.0)
    order = np.lexsort((rows.step_s, np.maximum(size, time), missed))[: 2 * NUM_NEAREST]
    columns = [getattr(rows.candidates, f.name)[order] for f in fields(Candidates)]
    _, first = np.unique(
        np.stack(columns if variant is None else [*columns, variant[order]]),
        axis=1,
        return_index=True,
    )
    return order[np.sort(first)[:NUM_NEAREST]]


def nearest_recommendations(
    chosen: CostedRows, *, problem: TrainingProblem, predictor: CalibratedPredictor | None = None
) -> tuple[Recommendation, ...]:
    """Return a recommendation for each unacceptable row, with reasons for all missed limits."""
    rows = recommendations_of_rows(chosen, problem=problem, predictor=predictor)
    return tuple(replace(row, estimate=problem.with_missed_targets(row.estimate)) for row in rows)
