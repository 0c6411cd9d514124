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
from hp_tool.domain.parallel import ParallelConfig, ParallelQuery
from hp_tool.domain.query import Query
from hp_tool.domain.result import Estimate, Recommendation, SpaceSummary
from hp_tool.errors import InputError
from hp_tool.mends import mends
from hp_tool.problem import TrainingProblem, resolve_training
from hp_tool.space import default_axes, enumerate_space, scheduled_chunks
from hp_tool.targets import longest_step_s, missed_targets
from hp_tool.units import MIB

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


def estimate(*, query: Query, with_mends: bool = True) -> Estimate:
    """Predict the one configuration that `query.parallel` describes; axes left out are 1, recompute none, zero_stage 1.

    One that is illegal, too large or too slow is an Estimate with feasible=False, its reasons and what mends it, not an
    error. Mends cost a few hundred estimates of neighbours: where speed counts, leave them out.
    """
    problem = resolve_training(query)
    config = single_config(query.parallel, num_gpus=problem.cluster.num_gpus)
    candidate = Candidates.alone(config)
    nouns: dict[str, Any] = {"model": problem.model, "cluster": problem.cluster, "workload": problem.workload}
    code = int(legality(**nouns, candidates=candidate))
    if code:
        found = Estimate(feasible=False, reasons=explain(code, **nouns, config=config), parallel=config)
    else:
        found = estimate_alone(costs=problem.costs(candidate), candidate=candidate, profile=problem.profile, **nouns)
        if missed := missed_targets(found, problem):
            found = replace(found, feasible=False, reasons=found.reasons + missed)
    if found.feasible or not with_mends:
        return found
    return replace(found, mends=mends(query=query, problem=problem, asked=found))


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
    in_time = step_s <= longest_step_s(problem)
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
