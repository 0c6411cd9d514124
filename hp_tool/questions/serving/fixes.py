"""Fixes for an infeasible estimate: the fewest changes that make it legal, fit in memory and meet
the targets.
"""

import dataclasses

import numpy as np
from numpy.typing import NDArray

from hp_tool.cost.arrays import BoolArray, FloatArray, IntArray
from hp_tool.domain.parallel import ParallelQuery
from hp_tool.domain.query import Query
from hp_tool.domain.serving import InferenceEstimate, ServingConfig, ServingFix
from hp_tool.errors import InputError
from hp_tool.questions.serving.estimates import estimate_row, meets_targets, worst_miss
from hp_tool.questions.serving.highest_load import cost_rows
from hp_tool.questions.serving.problem import CostedRows, ServingProblem, resolve_serving
from hp_tool.questions.training.fixes import GROWTH, MAX_CHANGES, MAX_FIXES
from hp_tool.space.serving import serving_space
from hp_tool.wording.words import change_in_words, changed_fields

LIMIT_EXPONENTS = {"max_num_seqs": range(-8, 3), "max_num_batched_tokens": range(-4, 3)}
"""Exponents of the powers of two by which engine limits are multiplied. Most are negative, because
most missed targets are caused by large batches.
"""
AXES = (
    "tensor_parallel_size",
    "pipeline_parallel_size",
    "expert_parallel_size",
    "attention_data_parallel_size",
    *LIMIT_EXPONENTS,
)
"""Fields that fixes may change. data_parallel_size follows from the number of devices."""
FIGURES = ("ttft_s", "tpot_s", "request_latency_s", "output_tokens_per_second_per_gpu")
"""Fields of the estimate that are compared before and after a fix."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Neighbours(CostedRows):
    """Legal configurations that differ from a given one in a few fields, with their costs. Arrays
    have shape (n,).
    """

    changes: IntArray
    """Number of changed fields."""
    directions: IntArray
    """Code for the set of increased fields and the set of decreased fields."""
    distance: FloatArray
    """Sum of |log2| of the ratios of changed fields."""
    loads: FloatArray | None
    """Highest load of each configuration, if the query leaves the load open."""

    @property
    def is_sustained(self) -> BoolArray:
        """Return a mask of the configurations that fit in memory and sustain the request rate."""
        return self.costs.fits & self.costs.sustained

    @property
    def is_acceptable(self) -> BoolArray:
        """Return a mask of the configurations that fit, sustain the rate and meet all targets."""
        return self.is_sustained & meets_targets(self)

    def best_rows(self, rows: NDArray[np.intp]) -> NDArray[np.intp]:
        """Return the rows by throughput, highest first. Ties are broken by latency, then distance.

        Of rows that change the same fields in the same directions, only the best is returned.
        """
        keys = (
            self.distance[rows],
            self.costs.request_latency_s[rows],
            -self.costs.output_tokens_per_second_per_gpu[rows],
        )
        order = rows[np.lexsort(keys)]
        first: NDArray[np.intp] = order[
            np.sort(np.unique(self.directions[order], return_index=True)[1])
        ]
        return first


def fixes(
    *, query: Query, problem: ServingProblem, infeasible: InferenceEstimate
) -> tuple[ServingFix, ...]:
    """Return up to MAX_FIXES changes that make the infeasible estimate of `query` feasible.

    Fixes change as few fields as possible and are sorted by throughput, highest first. A fix on
    more devices comes last. If no configuration meets the targets, return the nearest one with the
    targets that it misses, provided that it is nearer than the infeasible one.
    """
    assert infeasible.parallel is not None
    grown = _fix_on_more_devices(query, infeasible, num_gpus=problem.cluster.num_gpus)
    near = _neighbours(problem, infeasible.parallel)
    acceptable = near.is_acceptable
    for count in range(MAX_CHANGES + 1):
        rows = np.flatnonzero(acceptable & (near.changes == count))
        if len(rows):
            chosen = near.best_rows(rows)[: MAX_FIXES - len(grown)]
            return (
                *(
                    _fix_of_row(near, int(row), infeasible, num_gpus=problem.cluster.num_gpus)
                    for row in chosen
                ),
                *grown,
            )
    return (*_nearest_fix(near, infeasible), *grown)


def _nearest_fix(near: Neighbours, infeasible: InferenceEstimate) -> list[ServingFix]:
    """Return the configuration with the smallest worst ratio to a target, if it is better than the
    infeasible one.
    """
    rows = np.flatnonzero(near.is_sustained & (near.changes <= MAX_CHANGES))
    if len(rows) == 0:
        return []
    miss = worst_miss(near)
    best = int(rows[np.lexsort((near.distance[rows], miss[rows]))[0]])
    missed = [
        r.needed / r.available
        for r in infeasible.reasons
        if r.code == "target_missed" and r.needed and r.available
    ]
    if missed and miss[best] >= max(missed):
        return []
    return [_fix_of_row(near, best, infeasible, num_gpus=near.problem.cluster.num_gpus)]


def _fix_on_more_devices(
    query: Query, infeasible: InferenceEstimate, *, num_gpus: int
) -> list[ServingFix]:
    """Return the best fix on the smallest multiple of the devices that has a fix. It has at most
    one other change.
    """
    config = infeasible.parallel
    assert config is not None
    devices = (
        config.tensor_parallel_size
        * config.pipeline_parallel_size
        * config.attention_data_parallel_size
    )
    if infeasible.memory is None and devices <= num_gpus:
        return []  # Illegal for another reason than too few devices.
    for factor in GROWTH:
        try:
            more = factor * num_gpus
            grown = dataclasses.replace(
                resolve_serving(query.with_num_gpus(more)), chosen={"cluster.num_gpus": more}
            )
            near = _neighbours(grown, config)
        except InputError:  # Larger than any cluster, or not a whole number of NVLink domains.
            return []
        acceptable = near.is_acceptable
        for count in (0, 1):
            if len(rows := np.flatnonzero(acceptable & (near.changes == count))):
                return [
                    _fix_of_row(near, int(near.best_rows(rows)[0]), infeasible, num_gpus=num_gpus)
                ]
    return []


def _neighbours(problem: ServingProblem, base: ServingConfig) -> Neighbours:
    """Return the legal configurations with up to MAX_CHANGES changes of the layout or of engine
    limits (within LIMIT_EXPONENTS).
    """

    def nearby_limits(name: str) -> tuple[int, ...]:
        return tuple(
            sorted({max(int(getattr(base, name) * 2.0**k), 1) for k in LIMIT_EXPONENTS[name]})
        )

    query = ParallelQuery(
        max_num_seqs=nearby_limits("max_num_seqs"),
        max_num_batched_tokens=nearby_limits("max_num_batched_tokens"),
    )
    candidates, _ = serving_space(
        query=query, case=problem, concurrency=(problem.concurrency or 1,)
    )
    moved = np.array([np.log2(getattr(candidates, name) / getattr(base, name)) for name in AXES])
    near = np.flatnonzero(np.count_nonzero(moved, axis=0) <= MAX_CHANGES)
    candidates, moved = candidates.take(near), moved[:, near]
    rows, loads = cost_rows(problem, candidates)
    return Neighbours(
        problem=problem,
        candidates=candidates,
        costs=rows.costs,
        in_flight=rows.in_flight,
        loads=loads,
        changes=np.count_nonzero(moved, axis=0),
        directions=(3 ** np.arange(len(AXES))) @ np.sign(moved).astype(np.int64),
        distance=np.abs(moved).sum(axis=0),
    )


def _fix_of_row(
    near: Neighbours, row: int, infeasible: InferenceEstimate, *, num_gpus: int
) -> ServingFix:
    """Return a row as a fix, compared with the infeasible configuration on `num_gpus` devices."""
    if near.loads is None:
        after = estimate_row(near, row)
    else:
        one = near.candidates.take(slice(row, row + 1))
        after = estimate_row(near.problem.cost_candidate_at(float(near.loads[row]), one), 0)
    assert (
        infeasible.parallel is not None and after.parallel is not None and after.memory is not None
    )
    figures = {name: getattr(after, name) for name in FIGURES}
    change = change_in_words(
        infeasible.parallel, after.parallel, gpus=(num_gpus, near.problem.cluster.num_gpus)
    )
    lowered = after.parallel.max_num_seqs < infeasible.parallel.max_num_seqs
    if lowered and after.some_wait:
        change += "; further requests wait"
    before, throughput = (
        infeasible.output_tokens_per_second_per_gpu,
        figures["output_tokens_per_second_per_gpu"],
    )
    return ServingFix(
        change=change,
        changed=changed_fields(infeasible.parallel, after.parallel),
        parallel=after.parallel,
        set=dict(near.problem.chosen),
        num_gpus=near.problem.cluster.num_gpus,
        memory_total_bytes=after.memory.total_bytes,
        **figures,
        throughput_change_fraction=throughput / before - 1.0 if before else None,
        remaining=after.reasons,
    )
