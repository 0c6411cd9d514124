"""The best serving configurations of a query's space."""

from __future__ import annotations

import time

import numpy as np

from hp_tool.domain.query import Query
from hp_tool.domain.result import Ranking, SpaceSummary
from hp_tool.domain.serving import ServingRecommendation
from hp_tool.errors import InputError
from hp_tool.serving.problem import resolve_serving
from hp_tool.serving.rank import cost_space, recommendations

MAX_TOP = 1_000


def recommend(*, query: Query, top: int = 10) -> Ranking[ServingRecommendation]:
    """Rank every legal configuration that fits and meets the targets, best by the objective first.

    objective: throughput_per_gpu (default), ttft, tpot, cost, or min_gpus, which takes cluster.num_gpus as the maximum and
    answers for the smallest half, quarter, ... of them on which something is acceptable.
    """
    if not 1 <= top <= MAX_TOP:
        raise InputError(f"top must be from 1 to {MAX_TOP}, got {top}", field="top")
    start = time.perf_counter()
    problem = resolve_serving(query)
    space = cost_space(query=query, problem=problem)
    while query.objective == "min_gpus" and problem.cluster.num_gpus % 2 == 0:
        smaller = problem.with_num_gpus(problem.cluster.num_gpus // 2)
        fewer = cost_space(query=query, problem=smaller)
        if not np.any(fewer.acceptable):
            break
        problem, space = smaller, fewer
    return Ranking(
        recommendations=recommendations(space.best(top), problem=problem),
        space=SpaceSummary(
            legal=len(space.candidates),
            feasible=int(np.count_nonzero(space.acceptable)),
            seconds=time.perf_counter() - start,
        ),
        rejections=space.rejections,
    )
