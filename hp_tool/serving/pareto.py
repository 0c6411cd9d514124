"""The Pareto front of latency and throughput: what a faster answer to each user costs in tokens per GPU."""

from __future__ import annotations

import dataclasses

import numpy as np

from hp_tool.domain.query import Query
from hp_tool.domain.serving import ServingRecommendation
from hp_tool.errors import InputError
from hp_tool.serving.breakdown import estimate_row
from hp_tool.serving.problem import resolve_serving
from hp_tool.serving.recommend import costed_chunks
from hp_tool.space.serving import serving_space
from hp_tool.training.pareto import undominated

STEPS_PER_DOUBLING = 2
"""Concurrencies tried between one and twice itself: coarser than this the front shows corners."""


def pareto_front(*, query: Query) -> tuple[ServingRecommendation, ...]:
    """Every (configuration, concurrency up to the query's) that fits, meets the targets, and that no other beats in both
    tokens per second per user (1 / TPOT) and tokens per second per GPU; fastest for the user first.

    The estimate's provenance names the concurrency. Needs inference.concurrency and an output of at least two tokens.
    """
    problem = resolve_serving(query)
    if problem.concurrency is None:
        raise InputError("a front needs inference.concurrency, the most it may use", field="inference.concurrency")
    if problem.output_length < 2:
        raise InputError("a front needs an output of two tokens or more", field="inference.output_length")
    candidates = serving_space(query=query.parallel, case=problem, concurrency=_loads(problem.concurrency)).candidates
    n = len(candidates)
    tpot, throughput, good = np.empty(n), np.empty(n), np.empty(n, dtype=bool)
    for rows, costs, met in costed_chunks(candidates, problem=problem):
        tpot[rows], throughput[rows] = costs.tpot_s, costs.output_tokens_per_second_per_gpu
        good[rows] = costs.fits & met
    kept = np.flatnonzero(good)
    chosen = candidates.take(kept[undominated(tpot[kept], throughput[kept])])
    if len(chosen) == 0:
        return ()
    costed = problem.costed(chosen)
    front = []
    for row in range(len(chosen)):
        loaded = dataclasses.replace(problem, concurrency=int(chosen.concurrency[row]))
        estimate = estimate_row(dataclasses.replace(costed, problem=loaded), row)
        front.append(ServingRecommendation(rank=row + 1, parallel=chosen.config(row), estimate=estimate))
    return tuple(front)


def _loads(most: int) -> tuple[int, ...]:
    steps = int(np.log2(most) * STEPS_PER_DOUBLING) + 1
    return tuple(sorted({*(round(2 ** (k / STEPS_PER_DOUBLING)) for k in range(steps)), most}))
