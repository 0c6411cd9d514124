"""Several objectives at once: the fewest devices that suffice, and Pareto fronts of step time against memory or devices."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Literal

import numpy as np

from hp_tool import bounds
from hp_tool.domain.parallel import divisors
from hp_tool.domain.query import Query
from hp_tool.domain.result import Recommendation
from hp_tool.space import default_axes
from hp_tool.space.pareto import undominated
from hp_tool.training.calibrated import CalibratedPredictor, Calibrations
from hp_tool.training.problem import TrainingProblem, resolve_training
from hp_tool.training.rank import CostedRows, CostedSpace, cost_space, costed_chunks, recommendations, with_residuals

Objective = Literal["memory", "gpus"]
"""What a Pareto front sets against step time."""


def pareto_front(*, query: Query, against: Objective, calibrations: Calibrations | None = None) -> tuple[Recommendation, ...]:
    """Configurations that no other beats in two objectives at once.

    memory: step time and bytes on the fullest device, fastest first. gpus: step time (so days) and number of devices up
    to cluster.num_gpus, fewest first; `provenance` of each estimate says on how many it runs.
    """
    problem = resolve_training(query)
    predictor = None if calibrations is None else calibrations(problem)
    if against == "memory":
        front = _memory_front(problem, predictor)
        return recommendations(front.candidates, problem=problem, predictor=predictor)
    rows: list[Recommendation] = []
    best_s = float("inf")
    for smaller in _possible(problem):
        space = cost_space(problem=smaller, keep=1, predictor=predictor)
        if space.feasible and space.step_s[0] < best_s:
            best_s = float(space.step_s[0])
            rows += recommendations(space.candidates, problem=smaller, predictor=predictor)
    return tuple(replace(row, rank=place) for place, row in enumerate(rows, start=1))


def device_counts(problem: TrainingProblem) -> tuple[int, ...]:
    """Rising numbers of devices up to the cluster's: whole nodes, or equal shares of one, that t p c d can fill.

    d divides the global batch, t, p and c are the values that a search on the whole cluster would try.
    """
    cluster, batch = problem.cluster, problem.workload.global_batch_size
    axes = default_axes(query=problem.parallel, case=problem)
    ranks = {
        t * p * c for t in axes.tensor_parallel_size for p in axes.pipeline_parallel_size for c in axes.context_parallel_size
    }
    node, most = cluster.gpus_per_node, cluster.num_gpus
    fitting: set[int] = set()
    for d in divisors(batch, limit=most):
        bounds.check()
        counts = (model_ranks * d for model_ranks in ranks if model_ranks * d <= most)
        fitting |= {n for n in counts if (n % node == 0 if n > node else node % n == 0)}
    return tuple(sorted(fitting | {cluster.num_gpus}))


def fewest_devices(
    *, problem: TrainingProblem, keep: int, predictor: CalibratedPredictor | None = None
) -> tuple[TrainingProblem, CostedSpace]:
    """The fewest of `device_counts` with something acceptable, and the space there; the whole cluster if none has."""
    for smaller in _possible(problem):
        space = cost_space(problem=smaller, keep=keep, predictor=predictor)
        if space.feasible or smaller.cluster.num_gpus == problem.cluster.num_gpus:
            return smaller, space
    return problem, cost_space(problem=problem, keep=keep, predictor=predictor)


def _memory_front(problem: TrainingProblem, predictor: CalibratedPredictor | None) -> CostedRows:
    """Acceptable candidates that no other beats in both step time and memory, fastest first."""
    front: list[CostedRows] = []
    for rows, _ in costed_chunks(problem=problem, predictor=predictor):
        front = [_acceptable_front(CostedRows.concatenate([*front, rows]))]
    (rows,) = front  # there is at least one chunk, if an empty one
    if predictor is not None and len(rows.candidates):
        rows = _acceptable_front(with_residuals(rows.candidates, problem=problem, predictor=predictor)[0])
    return rows


def _acceptable_front(rows: CostedRows) -> CostedRows:
    acceptable = rows.take(np.flatnonzero(rows.acceptable))
    return acceptable.take(undominated(acceptable.step_s, -acceptable.memory_total_bytes))


def _possible(problem: TrainingProblem) -> Iterator[TrainingProblem]:
    """The problem on each of `device_counts` that could meet the deadline at twice the devices' peak."""
    for count in device_counts(problem):
        smaller = problem if count == problem.cluster.num_gpus else problem.with_num_gpus(count)
        if smaller.least_step_s <= smaller.longest_step_s:
            yield smaller
