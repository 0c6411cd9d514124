"""What hp_tool does, as functions: estimate one configuration, recommend the best ones. Searches are in `tuning`."""

from __future__ import annotations

import functools
import time
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hp_tool.cost.breakdown import estimate_alone, estimate_row
from hp_tool.cost.candidates import BoolArray, Candidates, FloatArray
from hp_tool.cost.feasibility import MEMORY, explain, legality
from hp_tool.cost.flops import step_tokens
from hp_tool.domain.parallel import ParallelConfig, ParallelQuery
from hp_tool.domain.query import Query
from hp_tool.domain.result import Estimate, Reason, Recommendation, SpaceSummary
from hp_tool.errors import InputError
from hp_tool.problem import TrainingProblem, resolve_training
from hp_tool.space import default_axes, enumerate_space, scheduled_chunks
from hp_tool.units import MIB, SECONDS_PER_DAY, SECONDS_PER_HOUR

CHUNK = 12_288
"""Candidates costed at once: large enough for numpy, small enough for the processor's cache."""
MAX_TOP = 1_000
_HEAP_BYTES = 16 * MIB


@dataclass(frozen=True, slots=True, kw_only=True)
class RecommendationResult:
    """The ranked answer, how large the space was, and why the rest was turned away."""

    recommendations: tuple[Recommendation, ...]
    space: SpaceSummary
    rejections: dict[str, int]


@dataclass(frozen=True, slots=True, kw_only=True)
class CostedSpace:
    """Every legal candidate with its predicted step time and whether it fits; the rows behind a ranking."""

    candidates: Candidates
    step_s: FloatArray
    memory_total_bytes: FloatArray
    acceptable: BoolArray
    """True where the candidate fits and keeps to the constraints."""
    rejections: dict[str, int]

    def best(self, count: int) -> NDArray[np.intp]:
        """Indices of the `count` fastest acceptable candidates; equal times prefer less memory."""
        rows = np.flatnonzero(self.acceptable)
        if len(rows) > count:
            rows = rows[self.step_s[rows] <= np.partition(self.step_s[rows], count - 1)[count - 1]]
        return rows[np.lexsort((self.memory_total_bytes[rows], self.step_s[rows]))][:count]


def estimate(*, query: Query) -> Estimate:
    """Predict the one configuration that `query.parallel` describes; axes left out are 1, recompute none, zero_stage 1.

    An illegal or too large configuration is an Estimate with feasible=False and reasons, not an error.
    """
    problem = resolve_training(query)
    config = single_config(query.parallel, num_gpus=problem.cluster.num_gpus)
    candidate = Candidates.alone(config)
    nouns: dict[str, Any] = {"model": problem.model, "cluster": problem.cluster, "workload": problem.workload}
    code = int(legality(**nouns, candidates=candidate))
    if code:
        return Estimate(feasible=False, reasons=explain(code, **nouns, config=config), parallel=config)
    result = estimate_alone(costs=problem.costs(candidate), candidate=candidate, profile=problem.profile, **nouns)
    missed = _missed_targets(result, problem)
    return replace(result, feasible=False, reasons=result.reasons + missed) if missed else result


def recommend(*, query: Query, top: int = 10) -> RecommendationResult:
    """Rank every legal configuration of the space by predicted step time and return the best `top`.

    objective min_gpus takes cluster.num_gpus as the most there are, and answers for the smallest half, quarter, ...
    of them on which something acceptable exists.
    """
    if not 1 <= top <= MAX_TOP:
        raise InputError(f"top must be from 1 to {MAX_TOP}, got {top}", field="top")
    start = time.perf_counter()
    problem = resolve_training(query)
    space = cost_space(query=query, problem=problem)
    while query.objective == "min_gpus" and problem.cluster.num_gpus % 2 == 0:
        smaller = problem.with_num_gpus(problem.cluster.num_gpus // 2)
        fewer = cost_space(query=query, problem=smaller)
        if not np.any(fewer.acceptable):
            break
        problem, space = smaller, fewer
    recommendations = _described(space.candidates.take(space.best(top)), problem)
    summary = SpaceSummary(
        legal=len(space.candidates),
        feasible=int(np.count_nonzero(space.acceptable)),
        seconds=time.perf_counter() - start,
    )
    return RecommendationResult(recommendations=recommendations, space=summary, rejections=space.rejections)


def _described(chosen: Candidates, problem: TrainingProblem) -> tuple[Recommendation, ...]:
    """The chosen candidates in full, ranked in their order."""
    if len(chosen) == 0:
        return ()
    costs = problem.costs(chosen)
    nouns: dict[str, Any] = {
        "model": problem.model, "cluster": problem.cluster, "workload": problem.workload, "profile": problem.profile
    }  # fmt: skip
    return tuple(
        Recommendation(
            rank=rank + 1,
            parallel=chosen.config(rank),
            estimate=estimate_row(rank, costs=costs, candidates=chosen, **nouns),
        )
        for rank in range(len(chosen))
    )


def cost_space(*, query: Query, problem: TrainingProblem) -> CostedSpace:
    """Enumerate the legal candidates and cost them chunk by chunk, so that memory stays bounded."""
    axes = default_axes(query=query.parallel, model=problem.model, cluster=problem.cluster, workload=problem.workload)
    space = enumerate_space(axes=axes, model=problem.model, cluster=problem.cluster, workload=problem.workload)
    _keep_heap()
    n = len(space.candidates)
    step_s, memory, fits = np.empty(n), np.empty(n), np.empty(n, dtype=bool)
    for start in range(0, n, CHUNK):
        rows = slice(start, start + CHUNK)
        costs = problem.costs(space.candidates.take(rows))
        step_s[rows], memory[rows], fits[rows] = costs.step_s, costs.memory_total_bytes, costs.feasible
    in_time = step_s <= _longest_step_s(problem)
    rejections = dict(space.rejections)
    if too_large := int(np.count_nonzero(~fits)):
        rejections[MEMORY] = too_large
    if too_slow := int(np.count_nonzero(~in_time)):
        rejections["target_missed"] = too_slow
    return CostedSpace(
        candidates=space.candidates, step_s=step_s, memory_total_bytes=memory, acceptable=fits & in_time, rejections=rejections
    )


@functools.cache
def _keep_heap() -> None:
    """Let the C library keep the memory of one chunk for the next: glibc returns large blocks to the system when freed,
    and fetching them again costs more than the arithmetic, until one block of this size has been freed (mallopt(3)).
    """
    np.empty(_HEAP_BYTES, dtype=np.uint8)


def single_config(parallel: ParallelQuery, *, num_gpus: int) -> ParallelConfig:
    """The one configuration a query fixes, data_parallel_size derived.

    Raises InputError where an axis is a list, or the schedule is not that of the model chunks.
    """
    values: dict[str, Any] = {}
    for name in ParallelConfig.__slots__:
        value = getattr(parallel, name)
        if isinstance(value, tuple):
            if len(value) != 1:
                raise InputError(f"parallel.{name} is a list; an estimate wants one value", field=f"parallel.{name}")
            value = value[0]
        if value is not None:
            values[name] = value
    scheduled_chunks((values.get("virtual_pipeline_parallel_size", 1),), schedule=parallel.pipeline_schedule)
    t = values.get("tensor_parallel_size", 1)
    if parallel.data_parallel_size is None:
        ranks = t * values.get("pipeline_parallel_size", 1) * values.get("context_parallel_size", 1)
        values["data_parallel_size"] = max(num_gpus // ranks, 1)
    values["sequence_parallel"] = t > 1 and values.get("sequence_parallel", True)
    return ParallelConfig(**values)


def config_query(config: ParallelConfig) -> ParallelQuery:
    """The `parallel` of a query that asks for exactly this configuration."""
    return ParallelQuery(**{name: getattr(config, name) for name in ParallelConfig.__slots__})


def _longest_step_s(problem: TrainingProblem) -> float:
    """The step time at which max_days or max_cost is just met; infinity without either."""
    tokens = problem.workload.total_tokens
    if tokens is None:
        return float("inf")
    steps = tokens / step_tokens(problem.workload)
    limits = [float("inf")]
    if problem.constraints.max_days is not None:
        limits.append(problem.constraints.max_days * SECONDS_PER_DAY / steps)
    if problem.constraints.max_cost is not None and problem.cluster.price_per_gpu_hour:
        hours = problem.constraints.max_cost / (problem.cluster.price_per_gpu_hour * problem.cluster.num_gpus)
        limits.append(hours * SECONDS_PER_HOUR / steps)
    return min(limits)


def _missed_targets(result: Estimate, problem: TrainingProblem) -> tuple[Reason, ...]:
    reasons = []
    for name, value, limit in (
        ("max_days", result.days, problem.constraints.max_days),
        ("max_cost", result.cost, problem.constraints.max_cost),
    ):
        if value is not None and limit is not None and value > limit:
            message = f"{name.removeprefix('max_')} {value:,.1f} is above constraints.{name} {limit:,.1f}"
            reasons.append(Reason(code="target_missed", message=message, needed=value, available=limit))
    return tuple(reasons)
