"""Fixes of an infeasible estimate: the smallest sets of changes that make it legal, fit and meet
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
"""Powers of two by which engine limits are changed. Most are reductions, because overfull batches
cause most missed targets.
"""
AXES = (
    "tensor_parallel_size",
    "pipeline_parallel_size",
    "expert_parallel_size",
    "attention_data_parallel_size",
    *LIMIT_EXPONENTS,
)
"""Axes that are varied; data_parallel_size follows from the devices."""
FIGURES = ("ttft_s", "tpot_s", "request_latency_s", "output_tokens_per_second_per_gpu")
"""Figures of the estimate that a fix shows."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Neighbours(CostedRows):
    """Legal configurations near a given one, with their costs; arrays of shape (n,)."""

    changes: IntArray
    """Number of axes that differ."""
    directions: IntArray
    """Code of the axes that increase and of those that decrease."""
    distance: FloatArray
    """Sum of |log2| of the changes."""
    loads: FloatArray | None
    """Highest load of each configuration, if the query leaves the load open."""

    @property
    def fits(self) -> BoolArray:
        """Return whether each configuration fits in memory and sustains the load's rate."""
        return self.costs.fits & self.costs.sustained

    @property
    def acceptable(self) -> BoolArray:
        """Return whether each configuration fits and meets every target."""
        return self.fits & meets_targets(self)

    def best(self, rows: NDArray[np.intp]) -> NDArray[np.intp]:
        """Return the rows with the highest throughput first, ties by distance.

        Of rows that change the same axes in the same directions, only one is returned.
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

    They change as few axes as possible and are sorted by throughput, highest first; a fix on more
    devices comes last. If nothing meets the targets, the nearest configuration is returned with its
    remaining misses, provided that it is nearer than the infeasible one.
    """
    assert infeasible.parallel is not None
    grown = _fix_on_more_devices(query, infeasible, num_gpus=problem.cluster.num_gpus)
    near = _neighbours(problem, infeasible.parallel)
    acceptable = near.acceptable
    for count in range(MAX_CHANGES + 1):
        rows = np.flatnonzero(acceptable & (near.changes == count))
        if len(rows):
            chosen = near.best(rows)[: MAX_FIXES - len(grown)]
            return (
                *(
                    _fix(near, int(row), infeasible, num_gpus=problem.cluster.num_gpus)
                    for row in chosen
                ),
                *grown,
            )
    return (*_nearest_fix(near, infeasible), *grown)


def _nearest_fix(near: Neighbours, infeasible: InferenceEstimate) -> list[ServingFix]:
    """Return the neighbour that misses the targets by the smallest factor."""
    rows = np.flatnonzero(near.fits & (near.changes <= MAX_CHANGES))
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
    return [_fix(near, best, infeasible, num_gpus=near.problem.cluster.num_gpus)]


def _fix_on_more_devices(
    query: Query, infeasible: InferenceEstimate, *, num_gpus: int
) -> list[ServingFix]:
    """Return the best fix on the smallest multiple of the devices, with at most one axis
    changed.
    """
    config = infeasible.parallel
    assert config is not None
    devices = (
        config.tensor_parallel_size
        * config.pipeline_parallel_size
        * config.attention_data_parallel_size
    )
    if infeasible.memory is None and devices <= num_gpus:
        return []  # Illegal for a reason other than too few devices.
    for factor in GROWTH:
        try:
            more = factor * num_gpus
            grown = dataclasses.replace(
                resolve_serving(query.with_num_gpus(more)), chosen={"cluster.num_gpus": more}
            )
            near = _neighbours(grown, config)
        except (
            InputError
        ):  # Beyond the largest cluster, or the nodes no longer divide into NVLink domains.
            return []
        acceptable = near.acceptable
        for count in (0, 1):
            if len(rows := np.flatnonzero(acceptable & (near.changes == count))):
                return [_fix(near, int(near.best(rows)[0]), infeasible, num_gpus=num_gpus)]
    return []


def _neighbours(problem: ServingProblem, base: ServingConfig) -> Neighbours:
    """Return every legal layout with every limit within LIMIT_EXPONENTS of the given one's."""

    def around(name: str) -> tuple[int, ...]:
        return tuple(
            sorted({max(int(getattr(base, name) * 2.0**k), 1) for k in LIMIT_EXPONENTS[name]})
        )

    query = ParallelQuery(
        max_num_seqs=around("max_num_seqs"), max_num_batched_tokens=around("max_num_batched_tokens")
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


def _fix(near: Neighbours, row: int, infeasible: InferenceEstimate, *, num_gpus: int) -> ServingFix:
    """Return row `row` as a fix, compared with the infeasible configuration on `num_gpus`
    devices.
    """
    if near.loads is None:
        after = estimate_row(near, row)
    else:
        one = near.candidates.take(slice(row, row + 1))
        after = estimate_row(near.problem.costed_under(float(near.loads[row]), one), 0)
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
