"""The best serving configurations under a trace: screened by means and a fluid, then played request by request.

A played load is sought on the first TRIED requests, and what they find is tried on all; where all miss, all are halved on.
"""

import math
import time
from collections.abc import Callable, Iterator
from dataclasses import replace

import numpy as np

from hp_tool import bounds
from hp_tool.cost.serving.candidates import ServingCandidates
from hp_tool.domain.query import Query
from hp_tool.domain.result import Ranking, SpaceSummary
from hp_tool.domain.serving import InferenceEstimate, ServingRecommendation
from hp_tool.domain.targets import Targets
from hp_tool.serving.highest import highest_loads, load_grid
from hp_tool.serving.problem import CostedRows, Loads, ServingProblem
from hp_tool.serving.ranked import NEAREST, CostedSpace, cost_space, grouped, nearest, row_of
from hp_tool.serving.replay import MOST_PLAYED, flow_latencies, played

SCREENED, PLAYED = 200, 10
"""Configurations that a trace's arrivals flow through, and those of them that its requests are played on."""
SOUGHT = 4
"""Configurations whose highest load is sought, each by a dozen plays."""
TRIED = 1_000
"""Requests that a load or a number of devices is sought with."""


def played_best(query: Query, problem: ServingProblem, *, top: int, start: float) -> Ranking[ServingRecommendation]:
    """Rank the PLAYED best, by a fluid of the trace's arrivals, of the SCREENED best by means: by what its requests see.

    Where the load is open, the SOUGHT best by means are ranked by the highest that each bears. Under objective min_gpus on the
    fewest devices on which one of the PLAYED is acceptable.
    """
    if query.objective == "min_gpus":
        problem, _ = fewest_played(query=query, problem=problem)
    space = _space(query, problem)
    chosen = _screened(space, problem)[: PLAYED if problem.unknown is None else SOUGHT]
    if not chosen:
        rows = nearest(space.candidates, problem=problem)
        chosen = [space.candidates.take(slice(row, row + 1)) for row in rows]
    ranking = [row_of(0, one, played_estimate(problem, one), problem) for one in chosen]
    ranking.sort(key=lambda row: _played_score(row.estimate, query.objective, by_load=problem.unknown is not None))
    kept = [row for row in ranking if row.estimate.feasible]
    missed = [row for row in ranking if not row.estimate.feasible]
    if late := sum(row.estimate.ttft_s is not None for row in missed):
        space.rejections["target_missed"] = late
    ranked, misses = ([replace(row, rank=place + 1) for place, row in enumerate(each)] for each in (kept, missed))
    return Ranking(
        recommendations=grouped(ranked[:top], problem=problem, objective=query.objective),
        nearest_misses=() if ranked else tuple(misses[:NEAREST]),
        space=SpaceSummary(legal=len(space.candidates), feasible=len(ranked), seconds=time.perf_counter() - start),
        rejections=space.rejections,
    )


def played_estimate(problem: ServingProblem, candidate: ServingCandidates) -> InferenceEstimate:
    """One configuration's estimate under the trace, at the problem's load or the highest that it bears."""
    if problem.unknown is None:
        return played(problem.costed(candidate))
    return played(problem.costed_under(_highest_played(problem, candidate), candidate))


def fewest_played(*, query: Query, problem: ServingProblem) -> tuple[ServingProblem, ServingRecommendation | None]:
    """Return the problem on the fewest of the cluster's legal numbers of devices on which one of the PLAYED is acceptable, with
    the first that is; as it is, with none, where nothing is. An open load is the lowest."""
    counts = problem.cluster.legal_counts()

    def passing(place: int, requests: int) -> ServingRecommendation | None:
        rows = _tried(query, problem.with_num_gpus(int(counts[place])), requests)
        return next((row for row in rows if row.estimate.feasible), None)

    below = _last(lambda place: passing(place, TRIED) is None, -1, len(counts) - 1)
    for place in range(below + 1, len(counts)):
        if (row := passing(place, MOST_PLAYED)) is not None:
            whole = place == len(counts) - 1
            return problem if whole else problem.with_num_gpus(int(counts[place])), row
    return problem, None


def _tried(query: Query, problem: ServingProblem, requests: int) -> Iterator[ServingRecommendation]:
    """Each of the PLAYED on these devices, the best first."""
    for one in _screened(_space(query, problem), problem)[:PLAYED]:
        rows = problem.costed(one) if problem.unknown is None else problem.costed_under(_loads(problem, one)[1](0), one)
        yield row_of(1, one, _played(rows, requests), problem)


def _space(query: Query, problem: ServingProblem) -> CostedSpace:
    """The query's space by means: requests alone tell whether they meet targets, but means order loads that these bound."""
    return cost_space(query=query, problem=problem if problem.unknown is not None else replace(problem, targets=Targets()))


def _screened(space: CostedSpace, problem: ServingProblem) -> list[ServingCandidates]:
    """The SCREENED best by means, in the order of a fluid of the trace's arrivals where the load is given."""
    rows = space.best(SCREENED)
    if problem.concurrency is None and problem.unknown is None and len(rows) > PLAYED:
        ttft, tpot = flow_latencies(problem, space.candidates.take(rows))
        rows = rows[np.argsort(ttft + (problem.output_length - 1) * tpot, kind="stable")]
    return [space.candidates.take(slice(row, row + 1)) for row in rows]


def _highest_played(problem: ServingProblem, candidate: ServingCandidates) -> float:
    """The highest of the problem's open loads at which one configuration is acceptable, or the lowest."""
    count, load = _loads(problem, candidate)

    def borne(place: int, requests: int) -> bool:
        return _played(problem.costed_under(load(place), candidate), requests).feasible

    place = _last(lambda place: borne(place, TRIED), 0, count - 1)
    if place and not borne(place, MOST_PLAYED):
        place = _last(lambda place: borne(place, MOST_PLAYED), 0, place - 1)
    return load(place)


def _loads(problem: ServingProblem, candidate: ServingCandidates) -> tuple[int, Callable[[int], float]]:
    """How many open loads there are for one configuration, up to what it carries by means, and the k-th of them."""
    assert problem.unknown is not None
    free = replace(problem, targets=Targets(), unknown=Loads(by_rate=problem.unknown.by_rate))
    most = highest_loads(free, candidate)
    assert most is not None
    top = most if problem.unknown.highest is None else np.array([problem.unknown.highest])
    count, load = load_grid(problem.unknown, top=top)
    return int(count[0]), lambda place: float(load(np.array([place]))[0])


def _last(holds: Callable[[int], bool], low: int, high: int) -> int:
    """The last whole number from low to high for which something that stays false holds; `low` is not asked."""
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if holds(middle) else (low, middle - 1)
    return low


def _played(rows: CostedRows, requests: int) -> InferenceEstimate:
    bounds.check()
    return played(rows, most=requests)


def _played_score(estimate: InferenceEstimate, objective: str | None, *, by_load: bool) -> float:
    """What to minimise, as of means: latency, or under a load of its own the throughput."""
    if estimate.ttft_s is None or estimate.tpot_s is None or estimate.request_latency_s is None:
        return math.inf
    if by_load and objective not in ("ttft", "tpot"):
        return -(estimate.output_tokens_per_second_per_gpu or 0.0)
    return {"ttft": estimate.ttft_s, "tpot": estimate.tpot_s}.get(objective or "", estimate.request_latency_s)
