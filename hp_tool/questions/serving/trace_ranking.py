"""Rank serving configurations under a trace. Configurations are selected by mean latencies and by
the fluid model, then simulated.

If the load is open, the search for the highest simulated load starts near the highest load by
means. Configurations that sustain no more than the best one so far are dropped.
"""

import functools
import math
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from hp_tool.cost.arrays import FloatArray
from hp_tool.cost.serving.candidates import ServingCandidates
from hp_tool.domain import bounds
from hp_tool.domain.query import Query
from hp_tool.domain.result import Ranking, SpaceSummary
from hp_tool.domain.serving import InferenceEstimate, ServingRecommendation
from hp_tool.domain.targets import Targets
from hp_tool.questions.serving.fewest_devices import cheapest_devices
from hp_tool.questions.serving.highest_load import highest_loads, load_grid, max_loads
from hp_tool.questions.serving.problem import ServingProblem
from hp_tool.questions.serving.ranked import (
    NUM_NEAREST,
    CostedSpace,
    cost_space,
    nearest_rows,
    recommendation_of,
    with_groups,
)
from hp_tool.questions.serving.replay import flow_latencies, simulate_trace

NUM_SCREENED, NUM_SIMULATED = 200, 10
"""Number of configurations evaluated with the fluid model, and number of configurations simulated
request by request.
"""


def rank_simulated(
    query: Query, problem: ServingProblem, *, top: int, start: float
) -> Ranking[ServingRecommendation]:
    """Rank the NUM_SIMULATED most promising configurations by their simulated requests.

    The fluid model selects them among the NUM_SCREENED configurations with the best means. If the
    load is open, those with the best means are simulated, and each one that sustains more than all
    earlier ones is returned. The objective min_gpus, and cost for a request rate, uses the fewest
    devices on which one of them is acceptable. For other loads, cost uses the number of devices
    that is cheapest by means.
    """
    arrive = problem.request_rate_per_second is not None
    if query.objective == "cost" and not arrive:
        problem = cheapest_devices(query=query, problem=problem)
    elif query.objective == "min_gpus" or (query.objective == "cost" and arrive):
        problem, _ = fewest_devices_simulated(query=query, problem=problem)
    space = space_by_means(query, problem)
    rows = _select_by_means(space, problem)[:NUM_SIMULATED]
    if not len(rows):
        rows = nearest_rows(space.candidates, problem=problem)
    chosen = [_candidate_row(space, row) for row in rows]
    if space.loads is None:
        ranking = [
            recommendation_of(0, one, simulate_trace(problem.cost_candidates(one)), problem)
            for one in chosen
        ]
    else:
        ranking = list(_best_by_load(problem, chosen, near=space.loads[rows]))
    ranking.sort(
        key=lambda row: _simulated_score(
            row.estimate, query.objective, by_load=problem.unknown is not None
        )
    )
    kept = [row for row in ranking if row.estimate.feasible]
    missed = [row for row in ranking if not row.estimate.feasible]
    if late := sum(row.estimate.ttft_s is not None for row in missed):
        space.rejections["target_missed"] = late
    ranked, misses = (
        [replace(row, rank=place + 1) for place, row in enumerate(each)] for each in (kept, missed)
    )
    return Ranking(
        recommendations=with_groups(ranked[:top], problem=problem, objective=query.objective),
        nearest_misses=() if ranked else tuple(misses[:NUM_NEAREST]),
        space=SpaceSummary(
            legal=len(space.candidates), feasible=len(ranked), seconds=time.perf_counter() - start
        ),
        rejections=space.rejections,
    )


def estimate_simulated(problem: ServingProblem, candidate: ServingCandidates) -> InferenceEstimate:
    """Return the estimate of one configuration under the trace, at the load of the problem or, if
    the load is open, at the highest load that it sustains.
    """
    loads = highest_loads(problem, candidate)
    return (
        simulate_trace(problem.cost_candidates(candidate))
        if loads is None
        else _highest_simulated_load(problem, candidate, near=float(loads[0]))[1]
    )


def _best_by_load(
    problem: ServingProblem, chosen: Sequence[ServingCandidates], *, near: FloatArray
) -> Iterator[ServingRecommendation]:
    """Yield the first configuration, and each one that sustains more than all earlier ones, at its
    highest load.
    """
    best = -math.inf
    for one, means in zip(chosen, near.tolist(), strict=True):
        load, estimate = _highest_simulated_load(problem, one, near=means, above=best)
        if estimate.feasible or best == -math.inf:
            yield recommendation_of(0, one, estimate, problem)
        best = max(best, load if estimate.feasible else 0.0)


def fewest_devices_simulated(
    *, query: Query, problem: ServingProblem
) -> tuple[ServingProblem, ServingRecommendation | None]:
    """Return the problem on the fewest devices on which a simulated configuration is acceptable,
    and the first such configuration.

    If there is none, the problem keeps all devices, and the configuration is the fastest one that
    misses a target. If the load is open, the lowest load is used.
    """
    counts = problem.cluster.legal_counts()

    @functools.cache
    def rows(place: int) -> list[ServingRecommendation]:
        """Return the first acceptable configuration, or all configurations if none is
        acceptable.
        """
        tried = []
        for row in _simulate_best(query, problem.with_num_gpus(int(counts[place]))):
            if row.estimate.feasible:
                return [row]
            tried.append(row)
        return tried

    def misses(place: int) -> bool:
        return not any(row.estimate.feasible for row in rows(place))

    last = len(counts) - 1
    fewest = min(_search_last(misses, -1, last) + 1, last)
    quickest = sorted(
        rows(fewest), key=lambda row: _simulated_score(row.estimate, None, by_load=False)
    )
    return problem.with_num_gpus(int(counts[fewest])), next(iter(quickest), None)


def _simulate_best(query: Query, problem: ServingProblem) -> Iterator[ServingRecommendation]:
    space = space_by_means(query, problem)
    for one in (
        _candidate_row(space, row) for row in _select_by_means(space, problem)[:NUM_SIMULATED]
    ):
        rows = (
            problem.cost_candidates(one)
            if problem.unknown is None
            else problem.cost_candidate_at(_open_loads(problem, one)[1](0), one)
        )
        bounds.check_work()
        yield recommendation_of(1, one, simulate_trace(rows), problem)


def space_by_means(query: Query, problem: ServingProblem) -> CostedSpace:
    """Return the costed space of the query, without simulation.

    Targets do not apply here, because whether they are met is known only after simulation. If the
    load is open, however, they limit the loads.
    """
    return cost_space(
        query=query,
        problem=problem if problem.unknown is not None else replace(problem, targets=Targets()),
    )


def _candidate_row(space: CostedSpace, row: int) -> ServingCandidates:
    return space.candidates.take(slice(row, row + 1))


def _select_by_means(space: CostedSpace, problem: ServingProblem) -> NDArray[np.intp]:
    """Return the NUM_SCREENED configurations with the best means. If the query sets a request rate,
    they are sorted by the fluid model.
    """
    rows = space.best(NUM_SCREENED)
    if problem.concurrency is None and problem.unknown is None and len(rows) > NUM_SIMULATED:
        ttft, tpot = flow_latencies(problem, space.candidates.take(rows))
        rows = rows[np.argsort(ttft + (problem.output_length - 1) * tpot, kind="stable")]
    return rows


def _highest_simulated_load(
    problem: ServingProblem, candidate: ServingCandidates, *, near: float, above: float = -math.inf
) -> tuple[float, InferenceEstimate]:
    """Return the highest open load at which one configuration is acceptable, and its estimate
    there.

    The search starts near the load `near`. If no load above `above` is sustained, the estimate is
    infeasible and is for the lowest such load.
    """
    count, load = _open_loads(problem, candidate)

    @functools.cache
    def estimate(place: int) -> InferenceEstimate:
        bounds.check_work()
        return simulate_trace(problem.cost_candidate_at(load(place), candidate))

    lowest = _search_last(lambda place: load(place) <= above, -1, count - 1) + 1
    if lowest >= count or not estimate(lowest).feasible:
        return load(min(lowest, count - 1)), replace(
            estimate(min(lowest, count - 1)), feasible=False
        )
    guess = _search_last(lambda place: load(place) <= near, lowest, count - 1)
    place = _search_near(lambda place: estimate(place).feasible, guess, low=lowest, high=count - 1)
    return load(place), estimate(place)


def _search_near(holds: Callable[[int], bool], guess: int, *, low: int, high: int) -> int:
    """Return the last integer from low to high for which `holds` is true, starting from a guess.

    `holds` must be true up to some integer and false beyond it. It is not evaluated at `low`.
    """
    step = 1
    if guess == low or holds(guess):
        low = guess
        while low + step <= high and holds(low + step):
            low, step = low + step, 2 * step
        return _search_last(holds, low, min(low + step - 1, high))
    high = guess - 1
    while high > low and not holds(high):
        high, step = max(high - step, low), 2 * step
    return (
        _search_last(holds, high, min(high + step // 2, guess - 1))
        if high > low
        else _search_last(holds, low, min(low + step, guess - 1))
    )


def _open_loads(
    problem: ServingProblem, candidate: ServingCandidates
) -> tuple[int, Callable[[int], float]]:
    """Return the number of open loads of one configuration, up to the highest load by means, and a
    function that returns the k-th load.
    """
    assert problem.unknown is not None
    most = max_loads(problem, candidate, by_rate=problem.unknown.by_rate)
    top = most if problem.unknown.highest is None else np.array([problem.unknown.highest])
    count, load = load_grid(problem.unknown, top=top)
    return int(count[0]), lambda place: float(load(np.array([place]))[0])


def _search_last(holds: Callable[[int], bool], low: int, high: int) -> int:
    """Return the last integer from low to high for which `holds` is true.

    `holds` must be true up to some integer and false beyond it. It is not evaluated at `low`.
    """
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if holds(middle) else (low, middle - 1)
    return low


def _simulated_score(estimate: InferenceEstimate, objective: str | None, *, by_load: bool) -> float:
    """Return the score of a simulated estimate; lower is better.

    It is the latency of the objective. If the load is open, it is the negative throughput instead,
    unless the objective is ttft or tpot.
    """
    if estimate.ttft_s is None or estimate.tpot_s is None or estimate.request_latency_s is None:
        return math.inf
    if by_load and objective not in ("ttft", "tpot"):
        return -(estimate.output_tokens_per_second_per_gpu or 0.0)
    return {"ttft": estimate.ttft_s, "tpot": estimate.tpot_s}.get(
        objective or "", estimate.request_latency_s
    )
