"""Estimates of one training configuration, and recommendations of the best ones."""

from __future__ import annotations

import time
from dataclasses import dataclass, replace
from typing import Literal

from hp_tool.cost.breakdown import estimate_row
from hp_tool.cost.candidates import Candidates
from hp_tool.domain.parallel import ParallelConfig, ParallelQuery, as_asked
from hp_tool.domain.query import Query
from hp_tool.domain.result import Estimate, Recommendation, SpaceSummary
from hp_tool.errors import InputError
from hp_tool.training.calibrated import Correction, Corrections, corrected_estimate
from hp_tool.training.evaluate import Single, predicted, single
from hp_tool.training.evaluate import single_config as single_config
from hp_tool.training.fixes import mends
from hp_tool.training.limits import with_missed_targets
from hp_tool.training.nearest_infeasible import nearest_misses, with_all_zero_stages
from hp_tool.training.pareto import devices_front, fewest_devices, memory_front
from hp_tool.training.problem import TrainingProblem, resolve_training
from hp_tool.training.rank import cost_space


def described(chosen: Candidates, problem: TrainingProblem, correction: Correction | None) -> tuple[Recommendation, ...]:
    """The chosen candidates in full, ranked in their order."""
    if len(chosen) == 0:
        return ()
    costs = problem.costs(chosen)
    return tuple(
        Recommendation(
            rank=rank + 1,
            parallel=config,
            estimate=replace(estimate_row(rank, costs=costs, candidates=chosen, case=problem), parallel=config),
            calibrated_estimate=None
            if correction is None
            else replace(
                corrected_estimate(rank, costs=costs, candidates=chosen, problem=problem, correction=correction),
                parallel=config,
            ),
        )
        for rank, config in ((rank, as_asked(chosen.config(rank), problem.parallel)) for rank in range(len(chosen)))
    )


def described_misses(
    chosen: Candidates, problem: TrainingProblem, correction: Correction | None = None
) -> tuple[Recommendation, ...]:
    """The same of candidates that are not acceptable, with every limit they miss among their estimate's reasons."""
    return tuple(
        replace(row, estimate=with_missed_targets(row.estimate, problem)) for row in described(chosen, problem, correction)
    )


# What hp_tool does, as functions: estimate one configuration, recommend the best ones. Searches are in `tuning`.


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
    asked = single(query)
    found = predicted(asked=asked)
    return with_mends_of(asked=asked, found=found) if with_mends else found


def with_mends_of(*, asked: Single, found: Estimate) -> Estimate:
    """The estimate, with what mends it where it is infeasible."""
    if found.feasible:
        return found
    return replace(found, mends=mends(query=asked.query, problem=asked.problem, asked=found))


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


def config_query(config: ParallelConfig) -> ParallelQuery:
    """The `parallel` of a query that asks for exactly this configuration."""
    return ParallelQuery(**{name: getattr(config, name) for name in ParallelConfig.__slots__})
