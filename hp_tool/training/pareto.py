"""Several objectives at once: the fewest devices that suffice, and the fronts of step time against memory or devices."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from hp_tool import bounds
from hp_tool.domain.divisors import divisors
from hp_tool.domain.query import Query
from hp_tool.pareto import undominated
from hp_tool.space import default_axes
from hp_tool.training.calibrated import Correction
from hp_tool.training.limits import least_step_s, longest_step_s
from hp_tool.training.problem import TrainingProblem
from hp_tool.training.rank import CostedRows, CostedSpace, cost_space, costed_chunks, with_residuals


def device_counts(*, query: Query, problem: TrainingProblem) -> tuple[int, ...]:
    """Rising numbers of devices up to the cluster's: whole nodes, or equal shares of one, that t p c d can fill.

    d divides the global batch, t, p and c are the values that a search on the whole cluster would try.
    """
    cluster, batch = problem.cluster, problem.workload.global_batch_size
    axes = default_axes(query=query.parallel, case=problem)
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
    *, query: Query, problem: TrainingProblem, keep: int, correction: Correction | None = None
) -> tuple[TrainingProblem, CostedSpace]:
    """The fewest of `device_counts` with something acceptable, and the space there; the whole cluster where none has."""
    for smaller in _possible(query, problem):
        space = cost_space(query=query, problem=smaller, keep=keep, correction=correction)
        if space.feasible or smaller.cluster.num_gpus == problem.cluster.num_gpus:
            return smaller, space
    return problem, cost_space(query=query, problem=problem, keep=keep, correction=correction)


def memory_front(*, query: Query, problem: TrainingProblem, correction: Correction | None = None) -> CostedRows:
    """Acceptable candidates that no other beats in both step time and memory, fastest first."""
    front: CostedRows | None = None
    for rows, _ in costed_chunks(query=query, problem=problem, correction=correction):
        both = rows if front is None else CostedRows.concatenate([front, rows])
        front = _undominated(both)
    assert front is not None  # there is at least one chunk, if an empty one
    if correction is not None and len(front.candidates):
        front = _undominated(with_residuals(front.candidates, problem=problem, correction=correction)[0])
    return front


def _undominated(rows: CostedRows) -> CostedRows:
    acceptable = rows.take(np.flatnonzero(rows.acceptable))
    return acceptable.take(undominated(acceptable.step_s, -acceptable.memory_total_bytes))


def devices_front(
    *, query: Query, problem: TrainingProblem, correction: Correction | None = None
) -> Iterator[tuple[TrainingProblem, CostedSpace]]:
    """The best candidate of each of `device_counts` that is faster than those of all smaller ones, fewest devices first."""
    best_s = float("inf")
    for smaller in _possible(query, problem):
        space = cost_space(query=query, problem=smaller, keep=1, correction=correction)
        if space.feasible and space.step_s[0] < best_s:
            best_s = float(space.step_s[0])
            yield smaller, space


def _possible(query: Query, problem: TrainingProblem) -> Iterator[TrainingProblem]:
    """The problem on each of `device_counts`, without those too few to meet a deadline at twice their peak."""
    for count in device_counts(query=query, problem=problem):
        smaller = problem if count == problem.cluster.num_gpus else problem.with_num_gpus(count)
        if least_step_s(smaller) <= longest_step_s(smaller):
            yield smaller
