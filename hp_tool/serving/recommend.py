"""Estimate and recommend for serving: enumerate, cost, hold against targets, rank."""

from __future__ import annotations

import time
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from hp_tool import bounds
from hp_tool.cost.arrays import BoolArray, FloatArray
from hp_tool.cost.legality import MEMORY
from hp_tool.cost.serving.candidates import ServingCandidates
from hp_tool.cost.serving.engine import ServingCosts
from hp_tool.cost.serving.legality import explain, legality
from hp_tool.domain.parallel import ParallelQuery
from hp_tool.domain.query import Query
from hp_tool.domain.result import SpaceSummary
from hp_tool.domain.serving import InferenceEstimate, ServingConfig, ServingRecommendation
from hp_tool.errors import InputError, UnsupportedError
from hp_tool.serving.evaluate import OVERLOADED, described
from hp_tool.serving.fixes import mends
from hp_tool.serving.limits import meets_targets
from hp_tool.serving.problem import ServingProblem, resolve_serving
from hp_tool.space.serving import serving_space

MAX_TOP = 1_000
CHUNK = 12_288
"""Candidates costed at once: large enough for numpy, small enough for the processor's cache."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ServingRecommendations:
    """The ranked answer, how large the space was, and why the rest was turned away."""

    recommendations: tuple[ServingRecommendation, ...]
    space: SpaceSummary
    rejections: dict[str, int]


@dataclass(frozen=True, slots=True, kw_only=True)
class CostedServing:
    """Every legal candidate with what ranks it."""

    candidates: ServingCandidates
    score: FloatArray
    """Smaller is better."""
    acceptable: BoolArray
    """True where it fits and meets every target."""
    rejections: dict[str, int]


def estimate(*, query: Query, with_mends: bool = True) -> InferenceEstimate:
    """Predict the one configuration that `query.parallel` describes; sizes left out are 1, batch limits the engine's.

    An illegal or too large configuration, or one that misses a target, is an estimate with feasible=False, its reasons and what
    mends it. Mends cost some thousand estimates of neighbours: where speed counts, leave them out.
    """
    problem = resolve_serving(query)
    if query.inference is not None and query.inference.disaggregated is not None:
        raise UnsupportedError(
            "an estimate describes replicas that do both; let `recommend` answer inference.disaggregated, which may name sizes",
            field="inference.disaggregated",
        )
    config = single_config(query.parallel, problem=problem)
    candidate = ServingCandidates.from_configs([config], concurrency=[problem.concurrency or 1])
    num_gpus = problem.cluster.num_gpus
    code = int(legality(model=problem.model, num_gpus=num_gpus, candidates=candidate)[0])
    if code:
        reasons = explain(code, model=problem.model, num_gpus=num_gpus, config=config)
        found = InferenceEstimate(feasible=False, reasons=reasons, parallel=config)
    else:
        found = described(0, costs=problem.costs(candidate), candidates=candidate, problem=problem)
    if found.feasible or not with_mends:
        return found
    return replace(found, mends=mends(query=query, problem=problem, asked=found))


def recommend(*, query: Query, top: int = 10) -> ServingRecommendations:
    """Rank every legal configuration that fits and meets the targets, best by the objective first.

    objective: throughput_per_gpu (default), ttft, tpot, cost, or min_gpus, which takes cluster.num_gpus as the most there are
    and answers for the smallest half, quarter, ... of them on which something acceptable exists.
    """
    if not 1 <= top <= MAX_TOP:
        raise InputError(f"top must be from 1 to {MAX_TOP}, got {top}", field="top")
    start = time.perf_counter()
    problem = resolve_serving(query)
    space = _cost_space(query, problem)
    while query.objective == "min_gpus" and problem.cluster.num_gpus % 2 == 0:
        smaller = problem.with_num_gpus(problem.cluster.num_gpus // 2)
        fewer = _cost_space(query, smaller)
        if not np.any(fewer.acceptable):
            break
        problem, space = smaller, fewer
    best = _best(space, top)
    found = _recommendations(space.candidates.take(best), problem)
    summary = SpaceSummary(
        legal=len(space.candidates),
        feasible=int(np.count_nonzero(space.acceptable)),
        seconds=time.perf_counter() - start,
    )
    return ServingRecommendations(recommendations=found, space=summary, rejections=space.rejections)


def single_config(parallel: ParallelQuery, *, problem: ServingProblem) -> ServingConfig:
    """The one configuration a query fixes, data_parallel_size derived. InputError where an axis is a list."""
    engine = problem.engine
    values = {"max_num_seqs": engine.max_num_seqs, "max_num_batched_tokens": engine.max_num_batched_tokens}
    for name in ServingConfig.__slots__:
        value = getattr(parallel, name)
        if isinstance(value, tuple):
            if len(value) != 1:
                raise InputError(f"parallel.{name} is a list; an estimate wants one value", field=f"parallel.{name}")
            value = value[0]
        if value is not None:
            values[name] = value
    stage = values.get("tensor_parallel_size", 1) * values.get("pipeline_parallel_size", 1)
    values.setdefault("data_parallel_size", max(problem.cluster.num_gpus // stage, 1))
    return ServingConfig(**values)


def _cost_space(query: Query, problem: ServingProblem) -> CostedServing:
    """Enumerate the legal candidates and cost them chunk by chunk."""
    space = serving_space(
        query=query.parallel,
        model=problem.model,
        num_gpus=problem.cluster.num_gpus,
        engine=problem.engine,
        concurrency=(problem.concurrency or 1,),
    )
    n = len(space.candidates)
    score = np.empty(n)
    fits, sustained, met = (np.empty(n, dtype=bool) for _ in range(3))
    for first in range(0, n, CHUNK):
        rows = slice(first, first + CHUNK)
        chunk = space.candidates.take(rows)
        bounds.check(done=len(chunk))
        costs = problem.costs(chunk)
        fits[rows], sustained[rows] = costs.fits, costs.sustained
        met[rows] = meets_targets(costs, candidates=chunk, problem=problem)
        score[rows] = _score(costs, query.objective, problem)
    rejections = dict(space.rejections)
    reasons = {MEMORY: ~fits, OVERLOADED: fits & ~sustained, "target_missed": fits & sustained & ~met}
    for code, turned_away in reasons.items():
        if count := int(np.count_nonzero(turned_away)):
            rejections[code] = count
    return CostedServing(candidates=space.candidates, score=score, acceptable=fits & sustained & met, rejections=rejections)


def _score(costs: ServingCosts, objective: str | None, problem: ServingProblem) -> FloatArray:
    """What to minimise; min_gpus and cost compare throughput on the same devices."""
    if objective == "ttft":
        return costs.ttft_s
    if objective == "tpot":
        return costs.tpot_s
    if problem.request_rate_per_second is not None:  # the same throughput for all: the quickest answer is the better one
        return costs.request_latency_s
    return -costs.output_tokens_per_second_per_gpu


def _best(space: CostedServing, count: int) -> NDArray[np.intp]:
    rows = np.flatnonzero(space.acceptable)
    chosen: NDArray[np.intp] = rows[np.argsort(space.score[rows], kind="stable")][:count]
    return chosen


def _recommendations(chosen: ServingCandidates, problem: ServingProblem) -> tuple[ServingRecommendation, ...]:
    if len(chosen) == 0:
        return ()
    costs = problem.costs(chosen)
    return tuple(
        ServingRecommendation(
            rank=row + 1,
            parallel=chosen.config(row),
            estimate=described(row, costs=costs, candidates=chosen, problem=problem),
        )
        for row in range(len(chosen))
    )
