"""The best serving configurations: a query's space, costed chunk by chunk, ranked or cut down to its Pareto front."""

import math
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from hp_tool import bounds
from hp_tool.cost.arrays import BoolArray, FloatArray
from hp_tool.cost.legality import MEMORY
from hp_tool.cost.serving.candidates import ServingCandidates
from hp_tool.cost.serving.engine import ServingCosts
from hp_tool.cost.uncertainty import NORMAL_QUANTILE
from hp_tool.domain.query import Query
from hp_tool.domain.result import Ranking, SpaceSummary
from hp_tool.domain.serving import InferenceEstimate, ServingRecommendation
from hp_tool.domain.targets import Targets
from hp_tool.errors import InputError, UnsupportedError
from hp_tool.serving.estimates import OVERLOADED, estimate_row, meets_targets, worst_miss
from hp_tool.serving.fewest import fewest_devices
from hp_tool.serving.highest import bearable_load, costed_rows
from hp_tool.serving.intervals import ratio_log_sd
from hp_tool.serving.problem import CostedRows, ServingProblem, resolve_serving
from hp_tool.serving.replay import flow_latencies, played
from hp_tool.space.pareto import undominated
from hp_tool.space.serving import serving_space
from hp_tool.training.ranking.rank import group_numbers

MAX_TOP = 1_000
NEAREST = 3
SCREENED, PLAYED = 200, 10
"""Configurations that a trace's arrivals flow through, and those of them that its requests are played on."""
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
    tpot_s: FloatArray
    output_tokens_per_second_per_gpu: FloatArray
    loads: FloatArray | None
    """The load of each, where the query leaves it open."""
    rejections: dict[str, int]

    def best(self, count: int) -> NDArray[np.intp]:
        """Indices of the `count` best acceptable candidates, best first."""
        rows = np.flatnonzero(self.acceptable)
        chosen: NDArray[np.intp] = rows[np.argsort(self.score[rows], kind="stable")][:count]
        return chosen


def recommend(*, query: Query, top: int = 10) -> Ranking[ServingRecommendation]:
    """Rank every legal configuration that fits and meets the targets, best by the objective first.

    objective: throughput_per_gpu (default), ttft, tpot, cost, or min_gpus, which takes cluster.num_gpus as the maximum and
    answers for the smallest number of them (whole nodes, or equal shares of one) on which something is acceptable.
    """
    if not 1 <= top <= MAX_TOP:
        raise InputError(f"top must be from 1 to {MAX_TOP}, got {top}", field="top")
    start = time.perf_counter()
    problem = resolve_serving(query)
    if problem.trace is not None:
        return _played_best(query, problem, top=top, start=start)
    if query.objective == "min_gpus":
        problem = fewest_devices(query=query, problem=problem)
    space = cost_space(query=query, problem=problem)
    best = space.best(top)
    return Ranking(
        recommendations=grouped(recommendations(space, best, problem=problem), problem=problem, objective=query.objective),
        nearest_misses=() if len(best) else _nearest_misses(space, problem=problem),
        space=SpaceSummary(
            legal=len(space.candidates),
            feasible=int(np.count_nonzero(space.acceptable)),
            seconds=time.perf_counter() - start,
        ),
        rejections=space.rejections,
    )


def _played_best(query: Query, problem: ServingProblem, *, top: int, start: float) -> Ranking[ServingRecommendation]:
    """Rank the PLAYED best, by a fluid of the trace's arrivals, of the SCREENED best by means: by what its requests see."""
    if query.objective == "min_gpus":
        raise UnsupportedError("min_gpus ranks by means; ask it without the trace", field="objective")
    space = cost_space(query=query, problem=replace(problem, targets=Targets()))
    rows = space.best(SCREENED)
    if problem.concurrency is None and len(rows) > PLAYED:
        ttft, tpot = flow_latencies(problem, space.candidates.take(rows))
        score = {"ttft": ttft, "tpot": tpot}.get(query.objective or "", ttft + (problem.output_length - 1) * tpot)
        rows = rows[np.argsort(score, kind="stable")]
    rows = rows[:PLAYED]
    chosen = [
        space.candidates.take(slice(row, row + 1))
        for row in (rows if len(rows) else nearest(space.candidates, problem=problem))
    ]
    ranking = [_row(0, one, played(problem.costed(one)), problem) for one in chosen]
    ranking.sort(key=lambda row: _played_score(row.estimate, query.objective))
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


def _played_score(estimate: InferenceEstimate, objective: str | None) -> float:
    """What to minimise, as `_score`."""
    if estimate.ttft_s is None or estimate.tpot_s is None or estimate.request_latency_s is None:
        return math.inf
    return {"ttft": estimate.ttft_s, "tpot": estimate.tpot_s}.get(objective or "", estimate.request_latency_s)


def pareto_front(*, query: Query) -> tuple[ServingRecommendation, ...]:
    """Every (configuration, concurrency up to the query's) that fits, meets the targets, and that no other beats in both
    tokens per second per user (1 / TPOT) and tokens per second per GPU; fastest for the user first.

    The estimate's provenance names the concurrency. Needs inference.concurrency, or an unknown one, and an output of at least
    two tokens.
    """
    problem = resolve_serving(query)
    most = _most_concurrency(query, problem)
    if problem.output_length < 2:
        raise InputError("a front needs an output of two tokens or more", field="inference.output_length")
    steps = np.arange(int(np.log2(most) * STEPS_PER_DOUBLING) + 1) / STEPS_PER_DOUBLING
    loads = tuple(sorted({*(round(load) for load in (2**steps).tolist()), most}))
    known = replace(problem, unknown=None, concurrency=most)
    space = cost_space(query=query, problem=known, concurrency=loads)
    kept = np.flatnonzero(space.acceptable)
    chosen = kept[undominated(space.tpot_s[kept], space.output_tokens_per_second_per_gpu[kept])]
    rows = recommendations(replace(space, loads=space.candidates.concurrency.astype(np.float64)), chosen, problem=known)
    loads = space.candidates.concurrency[chosen].tolist()
    return tuple(replace(row, set={**row.set, "inference.concurrency": load}) for row, load in zip(rows, loads, strict=True))


def _most_concurrency(query: Query, problem: ServingProblem) -> int:
    """The load that a front goes up to."""
    if problem.concurrency is not None:
        return problem.concurrency
    if problem.unknown is None or problem.unknown.by_rate:
        raise InputError("a front needs inference.concurrency, the most it may use", field="inference.concurrency")
    space = cost_space(query=query, problem=problem)
    return 1 if space.loads is None else int(space.loads[space.acceptable].max(initial=1.0))


def cost_space(*, query: Query, problem: ServingProblem, concurrency: tuple[int, ...] = ()) -> CostedSpace:
    """Enumerate the legal candidates, under each `concurrency` or the problem's load, and cost them chunk by chunk."""
    concurrency = concurrency or (problem.concurrency or 1,)
    candidates, rejections = serving_space(query=query.parallel, case=problem, concurrency=concurrency)
    n = len(candidates)
    score, tpot, throughput = (np.empty(n) for _ in range(3))
    loads = None if problem.unknown is None else np.empty(n)
    fits, sustained, met = (np.empty(n, dtype=bool) for _ in range(3))
    for rows, costed, bearable in costed_chunks(candidates, problem=problem):
        costs = costed.costs
        fits[rows], sustained[rows], met[rows] = costs.fits, costs.sustained, meets_targets(costed)
        score[rows] = _score(costs, query.objective, problem)
        tpot[rows], throughput[rows] = costs.tpot_s, costs.output_tokens_per_second_per_gpu
        if loads is not None and bearable is not None:
            loads[rows] = bearable
    reasons = {MEMORY: ~fits, OVERLOADED: fits & ~sustained, "target_missed": fits & sustained & ~met}
    for code, turned_away in reasons.items():
        if count := int(np.count_nonzero(turned_away)):
            rejections[code] = count
    return CostedSpace(
        candidates=candidates,
        score=score,
        acceptable=fits & sustained & met,
        tpot_s=tpot,
        output_tokens_per_second_per_gpu=throughput,
        loads=loads,
        rejections=rejections,
    )


def costed_chunks(
    candidates: ServingCandidates, *, problem: ServingProblem
) -> Iterator[tuple[slice, CostedRows, FloatArray | None]]:
    """Candidates chunk by chunk: which they are, their costs, and the load of each where the problem leaves it open."""
    for first in range(0, len(candidates), CHUNK):
        rows = slice(first, first + CHUNK)
        chunk = candidates.take(rows)
        bounds.check(done=len(chunk))
        yield rows, *costed_rows(problem, chunk)


def _nearest_misses(space: CostedSpace, *, problem: ServingProblem) -> tuple[ServingRecommendation, ...]:
    """What comes nearest, with the load that it would bear."""
    rows = nearest(space.candidates, problem=problem)
    bearable = [bearable_load(problem, space.candidates.take(slice(row, row + 1))) for row in rows.tolist()]
    misses = recommendations(space, rows, problem=problem)
    return tuple(
        replace(row, estimate=replace(row.estimate, highest_load=load)) for row, load in zip(misses, bearable, strict=True)
    )


def nearest(candidates: ServingCandidates, *, problem: ServingProblem) -> NDArray[np.intp]:
    """Indices of the NEAREST of candidates none of which is acceptable: those that miss targets alone by the least factor, then
    those that are too slow for the rate, then those that want the least memory."""
    kind, factor = np.empty(len(candidates)), np.empty(len(candidates))
    for rows, costed, _ in costed_chunks(candidates, problem=problem):
        costs = costed.costs
        kind[rows] = np.where(costs.fits, np.where(costs.sustained, 0.0, 1.0), 2.0)
        wanted = (costs.bytes.capacity - costs.bytes.kv_capacity, 1.0 / costs.output_tokens_per_second_per_gpu)
        factor[rows] = np.where(costs.fits, np.where(costs.sustained, worst_miss(costed), wanted[1]), wanted[0])
    return np.lexsort((factor, kind))[:NEAREST]


def grouped(
    rows: Sequence[ServingRecommendation], *, problem: ServingProblem, objective: str | None
) -> tuple[ServingRecommendation, ...]:
    """Ranked rows with their groups, by the figure that ranks them."""
    figure = objective if objective in ("ttft", "tpot") else "throughput"
    bound = NORMAL_QUANTILE * ratio_log_sd(problem, figure=figure)
    by_latency = problem.request_rate_per_second is not None or (problem.unknown is not None and problem.unknown.by_rate)
    name = (
        f"{figure}_s" if figure != "throughput" else "request_latency_s" if by_latency else "output_tokens_per_second_per_gpu"
    )

    def alike(row: ServingRecommendation, first: ServingRecommendation) -> bool:
        one, other = (getattr(each.estimate, name) for each in (row, first))
        return bool(one == other or (one > 0.0 and other > 0.0 and abs(math.log(one / other)) <= bound))

    groups = group_numbers(rows, alike=alike)
    return tuple(replace(row, group=group) for row, group in zip(rows, groups, strict=True))


def _score(costs: ServingCosts, objective: str | None, problem: ServingProblem) -> FloatArray:
    """What to minimise; min_gpus and cost compare throughput on the same devices."""
    if objective == "ttft":
        return costs.ttft_s
    if objective == "tpot":
        return costs.tpot_s
    if problem.request_rate_per_second is not None:  # the same throughput for all: the quickest answer is the better one
        return costs.request_latency_s
    return -costs.output_tokens_per_second_per_gpu


def recommendations(
    space: CostedSpace, rows: NDArray[np.intp], *, problem: ServingProblem
) -> tuple[ServingRecommendation, ...]:
    """The chosen candidates in full, ranked in their order, each under its own load."""
    ranking = []
    for place, row in enumerate(rows.tolist()):
        one = space.candidates.take(slice(row, row + 1))
        costed = problem.costed(one) if space.loads is None else problem.costed_under(float(space.loads[row]), one)
        ranking.append(_row(place + 1, one, estimate_row(costed, 0), problem))
    return tuple(ranking)


def _row(
    rank: int, candidate: ServingCandidates, estimate: InferenceEstimate, problem: ServingProblem
) -> ServingRecommendation:
    return ServingRecommendation(rank=rank, parallel=candidate.config(0), set=dict(problem.chosen), estimate=estimate)
