"""The best serving configurations: a query's space, costed chunk by chunk, ranked or cut down to its Pareto front."""

import time
from collections.abc import Iterator
from dataclasses import dataclass, replace

import numpy as np

from hp_tool import bounds
from hp_tool.cost.arrays import BoolArray, FloatArray
from hp_tool.cost.legality import MEMORY
from hp_tool.cost.serving.candidates import ServingCandidates
from hp_tool.cost.serving.engine import ServingCosts
from hp_tool.domain.query import Query
from hp_tool.domain.result import Ranking, SpaceSummary
from hp_tool.domain.serving import ServingRecommendation
from hp_tool.errors import InputError
from hp_tool.serving.estimates import OVERLOADED, estimate_row, meets_targets
from hp_tool.serving.problem import ServingProblem, resolve_serving
from hp_tool.space.pareto import undominated
from hp_tool.space.serving import serving_space

MAX_TOP = 1_000
STEPS_PER_DOUBLING = 2
"""Concurrencies of a front between one and twice itself: coarser than this the front shows corners."""
CHUNK = 12_288
"""Candidates costed at once: large enough for numpy, small enough for the processor's cache."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CostedSpace:
    """Every legal candidate with what ranks it; arrays of shape (n,)."""

    candidates: ServingCandidates
    score: FloatArray
    """Smaller is better."""
    acceptable: BoolArray
    """True where it fits and meets every target."""
    rejections: dict[str, int]

    def best(self, count: int) -> ServingCandidates:
        """The `count` best acceptable candidates, best first."""
        rows = np.flatnonzero(self.acceptable)
        return self.candidates.take(rows[np.argsort(self.score[rows], kind="stable")][:count])


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
    steps = np.arange(int(np.log2(problem.concurrency) * STEPS_PER_DOUBLING) + 1) / STEPS_PER_DOUBLING
    loads = tuple(sorted({*(round(load) for load in (2**steps).tolist()), problem.concurrency}))
    candidates, _ = serving_space(query=query.parallel, case=problem, concurrency=loads)
    n = len(candidates)
    tpot, throughput, good = np.empty(n), np.empty(n), np.empty(n, dtype=bool)
    for rows, costs, met in costed_chunks(candidates, problem=problem):
        tpot[rows], throughput[rows] = costs.tpot_s, costs.output_tokens_per_second_per_gpu
        good[rows] = costs.fits & met
    kept = np.flatnonzero(good)
    chosen = candidates.take(kept[undominated(tpot[kept], throughput[kept])])
    return recommendations(chosen, problem=problem)


def cost_space(*, query: Query, problem: ServingProblem) -> CostedSpace:
    """Enumerate the legal candidates and cost them chunk by chunk."""
    candidates, rejections = serving_space(query=query.parallel, case=problem, concurrency=(problem.concurrency or 1,))
    n = len(candidates)
    score = np.empty(n)
    fits, sustained, met = (np.empty(n, dtype=bool) for _ in range(3))
    for rows, costs, in_target in costed_chunks(candidates, problem=problem):
        fits[rows], sustained[rows], met[rows] = costs.fits, costs.sustained, in_target
        score[rows] = _score(costs, query.objective, problem)
    reasons = {MEMORY: ~fits, OVERLOADED: fits & ~sustained, "target_missed": fits & sustained & ~met}
    for code, turned_away in reasons.items():
        if count := int(np.count_nonzero(turned_away)):
            rejections[code] = count
    return CostedSpace(candidates=candidates, score=score, acceptable=fits & sustained & met, rejections=rejections)


def costed_chunks(candidates: ServingCandidates, *, problem: ServingProblem) -> Iterator[tuple[slice, ServingCosts, BoolArray]]:
    """Rows, their costs, and which of them meet the targets, chunk by chunk."""
    for first in range(0, len(candidates), CHUNK):
        rows = slice(first, first + CHUNK)
        chunk = candidates.take(rows)
        bounds.check(done=len(chunk))
        costed = problem.costed(chunk)
        yield rows, costed.costs, meets_targets(costed)


def _score(costs: ServingCosts, objective: str | None, problem: ServingProblem) -> FloatArray:
    """What to minimise; min_gpus and cost compare throughput on the same devices."""
    if objective == "ttft":
        return costs.ttft_s
    if objective == "tpot":
        return costs.tpot_s
    if problem.request_rate_per_second is not None:  # the same throughput for all: the quickest answer is the better one
        return costs.request_latency_s
    return -costs.output_tokens_per_second_per_gpu


def recommendations(chosen: ServingCandidates, *, problem: ServingProblem) -> tuple[ServingRecommendation, ...]:
    """The chosen candidates in full, ranked in their order, each under its own concurrency."""
    if len(chosen) == 0:
        return ()
    costed, rows = problem.costed(chosen), []
    for row, concurrency in enumerate(chosen.concurrency.tolist()):
        loaded = problem if problem.concurrency is None else replace(problem, concurrency=concurrency)
        estimate = estimate_row(replace(costed, problem=loaded), row)
        rows.append(ServingRecommendation(rank=row + 1, parallel=chosen.config(row), estimate=estimate))
    return tuple(rows)
