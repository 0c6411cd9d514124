"""What hp_tool does, as functions: estimate one configuration, recommend the best ones. Searches are in `tuning`."""

from __future__ import annotations

import time
from dataclasses import dataclass, replace
from typing import Any, Literal

from hp_tool.correction import Corrections, corrected_estimate
from hp_tool.cost.breakdown import estimate_alone
from hp_tool.cost.candidates import Candidates
from hp_tool.cost.feasibility import explain, legality
from hp_tool.described import described, described_misses, with_missed_targets
from hp_tool.domain.parallel import OF_THE_QUERY, ParallelConfig, ParallelQuery, default_zero_stage
from hp_tool.domain.pipeline_layout import parse_layout
from hp_tool.domain.query import Query
from hp_tool.domain.result import Estimate, Recommendation, SpaceSummary
from hp_tool.errors import InputError
from hp_tool.fronts import devices_front, fewest_devices, memory_front
from hp_tool.mends import mends
from hp_tool.misses import nearest_misses, with_all_zero_stages
from hp_tool.problem import resolve_training
from hp_tool.ranking import cost_space
from hp_tool.space import scheduled_chunks

MAX_TOP = 1_000
Front = Literal["memory", "gpus"]
"""What a Pareto set sets against step time."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RecommendationResult:
    """The ranked answer, how large the space was, and why the rest was turned away."""

    recommendations: tuple[Recommendation, ...]
    space: SpaceSummary
    rejections: dict[str, int]
    nearest_misses: tuple[Recommendation, ...] = ()
    """Where nothing is acceptable: what lacks least, infeasible, each with its reasons."""


def estimate(*, query: Query, with_mends: bool = True) -> Estimate:
    """Predict the one configuration that `query.parallel` describes; axes left out are 1, recompute none, zero_stage 1.

    One that is illegal, too large or too slow is an Estimate with feasible=False, its reasons and what mends it, not an
    error. Mends cost a few hundred estimates of neighbours: where speed counts, leave them out.
    """
    problem = resolve_training(query)
    config = single_config(query.parallel, num_gpus=problem.cluster.num_gpus, framework=problem.workload.framework)
    candidate = Candidates.alone(config)
    nouns: dict[str, Any] = {"model": problem.model, "cluster": problem.cluster, "workload": problem.workload}
    code = int(legality(**nouns, candidates=candidate, strategy=problem.strategy))
    if code:
        reasons = explain(code, **nouns, config=config, strategy=problem.strategy)
        found = Estimate(feasible=False, reasons=reasons, parallel=config)
    else:
        found = estimate_alone(
            costs=problem.costs(candidate), candidate=candidate, profile=problem.profile, strategy=problem.strategy, **nouns
        )
        found = replace(found, parallel=config)
        found = with_missed_targets(found, problem)
    if found.feasible or not with_mends:
        return found
    return replace(found, mends=mends(query=query, problem=problem, asked=found))


def calibrated(*, query: Query, found: Estimate, corrections: Corrections) -> Estimate | None:
    """The estimate `found` for this query after what is known of its cluster; None where that is nothing, or it is illegal."""
    if found.parallel is None or found.time is None:
        return None
    problem = resolve_training(query)
    correction = corrections(problem)
    if correction is None:
        return None
    one = Candidates.from_configs([found.parallel])
    corrected = corrected_estimate(0, costs=problem.costs(one), candidates=one, problem=problem, correction=correction)
    return replace(corrected, parallel=found.parallel)


def recommend(*, query: Query, top: int = 10, corrections: Corrections = lambda problem: None) -> RecommendationResult:
    """Rank every legal configuration of the space by predicted step time and return the best `top`.

    Where nothing is acceptable, and the query leaves zero_stage free, all ZeRO stages are tried; if that does not help, the
    answer tells what comes nearest. What `corrections` know about the cluster decides the ranking and what fits; estimates
    are given without and with it.

    objective min_gpus takes cluster.num_gpus as the most there are, and answers for the fewest of them on which something
    acceptable exists: whole nodes, or equal shares of one, that the model and the batch can be divided over.
    """
    if not 1 <= top <= MAX_TOP:
        raise InputError(f"top must be from 1 to {MAX_TOP}, got {top}", field="top")
    start = time.perf_counter()
    problem = resolve_training(query)
    correction = corrections(problem)
    if query.objective == "min_gpus":
        problem, space = fewest_devices(query=query, problem=problem, keep=top, correction=correction)
    else:
        space = cost_space(query=query, problem=problem, keep=top, correction=correction)
    misses: tuple[Recommendation, ...] = ()
    if space.legal and not space.feasible:
        further = with_all_zero_stages(query=query, problem=problem, keep=top, correction=correction)
        if further is not None:
            space = further
        else:
            off = nearest_misses(query=query, problem=problem, correction=correction).candidates
            misses = described_misses(off, problem, correction)
    recommendations = described(space.candidates, problem, correction)
    summary = SpaceSummary(legal=space.legal, feasible=space.feasible, seconds=time.perf_counter() - start)
    return RecommendationResult(
        recommendations=recommendations, space=summary, rejections=space.rejections, nearest_misses=misses
    )


def pareto(*, query: Query, against: Front, corrections: Corrections = lambda problem: None) -> tuple[Recommendation, ...]:
    """Configurations that no other beats in two objectives at once.

    memory: step time and bytes on the fullest device, fastest first. gpus: step time (so days) and number of devices up
    to cluster.num_gpus, fewest first; `provenance` of each estimate says on how many it runs.
    """
    problem = resolve_training(query)
    correction = corrections(problem)
    if against == "memory":
        return described(memory_front(query=query, problem=problem, correction=correction).candidates, problem, correction)
    found = devices_front(query=query, problem=problem, correction=correction)
    rows = [row for smaller, space in found for row in described(space.candidates, smaller, correction)]
    return tuple(replace(row, rank=place) for place, row in enumerate(rows, start=1))


def single_config(parallel: ParallelQuery, *, num_gpus: int, framework: str = "megatron-core") -> ParallelConfig:
    """The one configuration a query fixes, data_parallel_size derived, zero_stage the framework's own.

    Raises InputError where an axis is a list, or the schedule is not that of the model chunks.
    """
    values: dict[str, Any] = {}
    for name in ParallelConfig.__slots__:
        value = getattr(parallel, name)
        if isinstance(value, tuple) and name not in OF_THE_QUERY:
            if len(value) != 1:
                raise InputError(f"parallel.{name} is a list; an estimate wants one value", field=f"parallel.{name}")
            value = value[0]
        if value is not None:
            values[name] = value
    values.setdefault("zero_stage", default_zero_stage(framework))
    if parallel.pipeline_layout is not None:
        values = _laid_out(values, chunks=len(parse_layout(parallel.pipeline_layout).chunks))
    schedule = values.get("pipeline_schedule")
    chunks = values.setdefault("virtual_pipeline_parallel_size", 2 if schedule == "zbv" else 1)
    scheduled_chunks((chunks,), schedule=schedule)
    if schedule in ("1f1b", "interleaved"):  # what the number of chunks says already
        del values["pipeline_schedule"]
    t = values.get("tensor_parallel_size", 1)
    if parallel.data_parallel_size is None:
        ranks = t * values.get("pipeline_parallel_size", 1) * values.get("context_parallel_size", 1)
        values["data_parallel_size"] = max(num_gpus // ranks, 1)
    values["sequence_parallel"] = t > 1 and values.get("sequence_parallel", True)
    if values.get("data_parallel_shard_size") == values.get("data_parallel_size", parallel.data_parallel_size):
        values["data_parallel_shard_size"] = 0  # the whole group
    return ParallelConfig(**values)


def _laid_out(values: dict[str, Any], *, chunks: int) -> dict[str, Any]:
    """The values with the number of stages or of chunks a stage that a pipeline layout implies, where only one is given;
    with neither, every chunk is a stage.
    """
    p, v = values.get("pipeline_parallel_size"), values.get("virtual_pipeline_parallel_size")
    if p is None:
        return values | {"pipeline_parallel_size": max(chunks // (v or 1), 1)}
    return values if v is not None else values | {"virtual_pipeline_parallel_size": max(chunks // p, 1)}


def config_query(config: ParallelConfig) -> ParallelQuery:
    """The `parallel` of a query that asks for exactly this configuration."""
    return ParallelQuery(**{name: getattr(config, name) for name in ParallelConfig.__slots__})
