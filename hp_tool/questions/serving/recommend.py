"""Rank the serving configurations of a query, or compute its Pareto front."""

import time
from collections import Counter
from dataclasses import replace

import numpy as np

from hp_tool.domain.inference import RATE_PATH, InferenceWorkload
from hp_tool.domain.query import Query
from hp_tool.domain.result import Ranking, SpaceSummary
from hp_tool.domain.serving import ServingRecommendation
from hp_tool.errors import InputError
from hp_tool.questions.serving.fewest_devices import cheapest_devices, fewest_devices
from hp_tool.questions.serving.problem import ServingProblem, resolve_serving
from hp_tool.questions.serving.ranked import (
    best_recommendations,
    cost_space,
    nearest_misses,
    recommendations_of_rows,
    with_groups,
)
from hp_tool.questions.serving.trace_ranking import (
    fewest_devices_simulated,
    rank_simulated,
    space_by_means,
)
from hp_tool.space.pareto import pareto_optimal

MAX_TOP = 1_000
STEPS_PER_DOUBLING = 2
"""Number of concurrencies per doubling in a Pareto front. With fewer, a plotted front has visible
corners.
"""


def recommend(*, query: Query, top: int = 10) -> Ranking[ServingRecommendation]:
    """Rank all legal configurations that fit and meet the targets by the objective, best first.

    The objectives throughput_per_gpu (default), ttft and tpot use all devices of the cluster. For
    min_gpus and cost, cluster.num_gpus is the maximum. They use the number of devices (whole nodes,
    or equal parts of a node) that is smallest (min_gpus) or cheapest per token (cost). With
    min_gpus, a list of request rates gives one answer per rate, by ascending rate.
    """
    if not 1 <= top <= MAX_TOP:
        raise InputError(f"top must be from 1 to {MAX_TOP}, got {top}", field="top")
    start = time.perf_counter()
    problem = resolve_serving(query)
    workload = query.inference
    rates = None if workload is None else workload.request_rate_per_second
    if query.objective == "min_gpus" and workload is not None and isinstance(rates, tuple):
        return _rank_by_rate(query, workload, rates, start=start)
    if problem.trace is not None:
        return rank_simulated(query, problem, top=top, start=start)
    if query.objective == "min_gpus":
        problem = fewest_devices(query=query, problem=problem)
    elif query.objective == "cost":
        problem = cheapest_devices(query=query, problem=problem)
    space = cost_space(query=query, problem=problem)
    rows = best_recommendations(space, top=top, problem=problem)
    return Ranking(
        recommendations=with_groups(rows, problem=problem, objective=query.objective),
        nearest_misses=() if rows else nearest_misses(space, problem=problem),
        space=SpaceSummary(
            legal=len(space.candidates),
            feasible=int(np.count_nonzero(space.acceptable)),
            seconds=time.perf_counter() - start,
        ),
        rejections=space.rejections,
    )


def _rank_by_rate(
    query: Query, workload: InferenceWorkload, rates: tuple[float, ...], *, start: float
) -> Ranking[ServingRecommendation]:
    """Return, for each rate, the best configuration on the fewest devices, or the nearest miss.

    The `set` of a row contains its rate and number of devices. The space is summed over all rates,
    each on the devices of its answer.
    """
    rows: list[ServingRecommendation] = []
    misses: list[ServingRecommendation] = []
    rejections: Counter[str] = Counter()
    legal = feasible = 0
    for rate in sorted(set(rates)):
        ranking = _rank_at_rate(
            replace(query, inference=replace(workload, request_rate_per_second=float(rate)))
        )
        legal, feasible = legal + ranking.space.legal, feasible + ranking.space.feasible
        rejections.update(ranking.rejections)
        for kept, first in ((rows, ranking.recommendations), (misses, ranking.nearest_misses)):
            kept += [
                replace(row, rank=len(kept) + 1, set={**row.set, RATE_PATH: float(rate)})
                for row in first[:1]
            ]
    return Ranking(
        recommendations=tuple(rows),
        nearest_misses=tuple(misses),
        space=SpaceSummary(legal=legal, feasible=feasible, seconds=time.perf_counter() - start),
        rejections=dict(rejections),
    )


def _rank_at_rate(query: Query) -> Ranking[ServingRecommendation]:
    problem = resolve_serving(query)
    if problem.trace is None:
        return recommend(query=query, top=1)
    problem, row = fewest_devices_simulated(query=query, problem=problem)
    if row is None:
        return recommend(query=replace(query, objective=None), top=1)
    space = space_by_means(query, problem)
    feasible = row.estimate.feasible
    return Ranking(
        recommendations=(row,) if feasible else (),
        nearest_misses=() if feasible else (row,),
        space=SpaceSummary(legal=len(space.candidates), feasible=int(feasible), seconds=0.0),
        rejections=space.rejections,
    )


def pareto_front(*, query: Query) -> tuple[ServingRecommendation, ...]:
    """Return the configurations and concurrencies that are Pareto-optimal in tokens per second per
    user (1 / TPOT) and per GPU.

    They fit in memory, meet the targets and have at most the query's concurrency. The one with the
    most tokens per second per user comes first. The `set` of a row contains its concurrency. The
    query must set inference.concurrency or leave the load open, and the output must have at least
    two tokens.
    """
    problem = resolve_serving(query)
    most = _max_concurrency(query, problem)
    if problem.output_length < 2:
        raise InputError(
            "A Pareto front requires an output_length of at least 2 tokens.",
            field="inference.output_length",
        )
    steps = np.arange(int(np.log2(most) * STEPS_PER_DOUBLING) + 1) / STEPS_PER_DOUBLING
    loads = tuple(sorted({*(round(load) for load in (2**steps).tolist()), most}))
    known = replace(problem, unknown=None, concurrency=most)
    space = cost_space(query=query, problem=known, concurrency=loads)
    kept = np.flatnonzero(space.acceptable)
    chosen = kept[pareto_optimal(space.tpot_s[kept], space.output_tokens_per_second_per_gpu[kept])]
    rows = recommendations_of_rows(
        replace(space, loads=space.candidates.concurrency.astype(np.float64)), chosen, problem=known
    )
    loads = space.candidates.concurrency[chosen].tolist()
    return tuple(
        replace(row, set={**row.set, "inference.concurrency": load})
        for row, load in zip(rows, loads, strict=True)
    )


def _max_concurrency(query: Query, problem: ServingProblem) -> int:
    if problem.concurrency is not None:
        return problem.concurrency
    if problem.unknown is None or problem.unknown.by_rate:
        raise InputError(
            "A Pareto front requires inference.concurrency, its highest concurrency.",
            field="inference.concurrency",
        )
    space = cost_space(query=query, problem=problem)
    return 1 if space.loads is None else int(space.loads[space.acceptable].max(initial=1.0))
