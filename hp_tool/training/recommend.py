"""The best training configurations of a query's space."""

from __future__ import annotations

import time

from hp_tool.domain.query import Query
from hp_tool.domain.result import Ranking, Recommendation, SpaceSummary
from hp_tool.errors import InputError
from hp_tool.training.calibrated import Calibrations
from hp_tool.training.nearest_infeasible import nearest_misses, nearest_recommendations, with_all_zero_stages
from hp_tool.training.pareto import fewest_devices
from hp_tool.training.problem import resolve_training
from hp_tool.training.rank import cost_space, recommendations

MAX_TOP = 1_000


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
        problem, space = fewest_devices(query=query, problem=problem, keep=top, predictor=predictor)
    else:
        space = cost_space(query=query, problem=problem, keep=top, predictor=predictor)
    misses: tuple[Recommendation, ...] = ()
    if space.legal and not space.feasible:
        further = with_all_zero_stages(query=query, problem=problem, keep=top, predictor=predictor)
        if further is not None:
            space = further
        else:
            nearest = nearest_misses(query=query, problem=problem, predictor=predictor).candidates
            misses = nearest_recommendations(nearest, problem=problem, predictor=predictor)
    return Ranking(
        recommendations=recommendations(space.candidates, problem=problem, predictor=predictor),
        space=SpaceSummary(legal=space.legal, feasible=space.feasible, seconds=time.perf_counter() - start),
        rejections=space.rejections,
        nearest_misses=misses,
    )
