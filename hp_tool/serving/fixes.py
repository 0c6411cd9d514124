"""Why not, turned round for serving: the fewest changes after which a configuration is legal, fits and keeps to the targets."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hp_tool.cost.arrays import BoolArray, FloatArray, IntArray
from hp_tool.cost.serving.candidates import ServingCandidates
from hp_tool.cost.serving.engine import ServingCosts
from hp_tool.domain.hardware import ClusterQuery
from hp_tool.domain.parallel import ParallelQuery
from hp_tool.domain.query import Query
from hp_tool.domain.serving import InferenceEstimate, ServingConfig, ServingMend
from hp_tool.errors import InputError
from hp_tool.serving.evaluate import described
from hp_tool.serving.limits import meets_targets, target_values
from hp_tool.serving.problem import ServingProblem, resolve_serving
from hp_tool.space.serving import serving_space
from hp_tool.training.fix_words import change_in_words, changed_fields

MAX_MENDS = 5
MAX_CHANGES = 3
"""Axes changed at once; more are told only where fewer mend nothing."""
GROWTH = (2, 4, 8)
"""Multiples of the devices that are tried; the smallest that mends is told."""
LIMITS = {"max_num_seqs": range(-8, 3), "max_num_batched_tokens": range(-4, 3)}
"""Powers of two by which an engine's limits are moved; far down, since most targets are missed by crowding."""
AXES = (
    "tensor_parallel_size", "pipeline_parallel_size", "expert_parallel_size", "attention_data_parallel_size", *LIMITS,
)  # fmt: skip
"""What is chosen; data_parallel_size follows from the devices."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Neighbours:
    """Legal configurations around the one asked for, costed; arrays of shape (n,)."""

    problem: ServingProblem
    candidates: ServingCandidates
    costs: ServingCosts
    changes: IntArray
    """Axes that differ."""
    directions: IntArray
    """Which of them rise and which fall, as a number."""
    distance: FloatArray
    """How far they moved: the sum of |log2|."""

    @property
    def fits(self) -> BoolArray:
        """In memory, and with the load's rate."""
        return self.costs.fits & self.costs.sustained

    @property
    def acceptable(self) -> BoolArray:
        """Fits and keeps to every target."""
        return self.fits & meets_targets(self.costs, candidates=self.candidates, problem=self.problem)

    def best(self, rows: NDArray[np.intp]) -> NDArray[np.intp]:
        """Highest throughput first, of equals the nearest; one row of those that move the same axes in the same directions."""
        keys = (self.distance[rows], self.costs.request_latency_s[rows], -self.costs.output_tokens_per_second_per_gpu[rows])
        order = rows[np.lexsort(keys)]
        first: NDArray[np.intp] = order[np.sort(np.unique(self.directions[order], return_index=True)[1])]
        return first

    def miss(self) -> FloatArray:
        """By how much the worst target is missed: its value by its limit."""
        worst = np.zeros(len(self.candidates))
        for name in self.problem.targets.__slots__:
            if (limit := getattr(self.problem.targets, name)) is not None:
                values = target_values(name, costs=self.costs, candidates=self.candidates, problem=self.problem)
                worst = np.maximum(worst, values / limit)
        return worst


def mends(*, query: Query, problem: ServingProblem, asked: InferenceEstimate) -> tuple[ServingMend, ...]:
    """At most MAX_MENDS changes after which the infeasible estimate `asked` of `query` would be feasible.

    They are of as few axes as mend it, highest throughput first; then comes one on more devices. Where nothing keeps to the
    targets, what comes nearest to them is told with what it still misses, if it comes nearer than what was asked.
    """
    assert asked.parallel is not None
    grown = _on_more_devices(query, asked, num_gpus=problem.cluster.num_gpus)
    near = _neighbours(problem, asked.parallel)
    acceptable = near.acceptable
    for count in range(MAX_CHANGES + 1):
        rows = np.flatnonzero(acceptable & (near.changes == count))
        if len(rows):
            told = near.best(rows)[: MAX_MENDS - len(grown)]
            return (*(_mend(near, int(row), asked, num_gpus=problem.cluster.num_gpus) for row in told), *grown)
    return (*_nearest(near, asked), *grown)


def _nearest(near: Neighbours, asked: InferenceEstimate) -> list[ServingMend]:
    """The neighbour that misses the targets by least."""
    rows = np.flatnonzero(near.fits & (near.changes <= MAX_CHANGES))
    if len(rows) == 0:
        return []
    miss = near.miss()
    best = int(rows[np.lexsort((near.distance[rows], miss[rows]))[0]])
    missed = [r.needed / r.available for r in asked.reasons if r.code == "target_missed" and r.needed and r.available]
    if missed and miss[best] >= max(missed):
        return []
    return [_mend(near, best, asked, num_gpus=near.problem.cluster.num_gpus)]


def _on_more_devices(query: Query, asked: InferenceEstimate, *, num_gpus: int) -> list[ServingMend]:
    """The best on the smallest multiple of the devices, with at most one axis changed."""
    assert asked.parallel is not None
    cluster = ClusterQuery(node_type=query.cluster) if isinstance(query.cluster, str) else query.cluster
    c = asked.parallel
    if asked.memory is None and c.tensor_parallel_size * c.pipeline_parallel_size * c.attention_data_parallel_size <= num_gpus:
        return []  # illegal, and not for want of devices
    for factor in GROWTH:
        larger = dataclasses.replace(query, cluster=dataclasses.replace(cluster, num_gpus=factor * num_gpus))
        try:
            near = _neighbours(resolve_serving(larger), asked.parallel)
        except InputError:  # past the largest cluster, or nodes that no longer divide into NVLink domains
            return []
        acceptable = near.acceptable
        for count in (0, 1):
            if len(rows := np.flatnonzero(acceptable & (near.changes == count))):
                return [_mend(near, int(near.best(rows)[0]), asked, num_gpus=num_gpus)]
    return []


def _neighbours(problem: ServingProblem, asked: ServingConfig) -> Neighbours:
    """Every legal layout under every limit within LIMITS of the one asked for."""
    limits: dict[str, Any] = {
        name: tuple(sorted({max(int(getattr(asked, name) * 2.0**k), 1) for k in powers})) for name, powers in LIMITS.items()
    }
    candidates = serving_space(
        query=dataclasses.replace(ParallelQuery(), **limits),
        model=problem.model,
        num_gpus=problem.cluster.num_gpus,
        engine=problem.engine,
        concurrency=(problem.concurrency or 1,),
    ).candidates
    moved = np.array([np.log2(getattr(candidates, name) / getattr(asked, name)) for name in AXES])
    near = np.flatnonzero(np.count_nonzero(moved, axis=0) <= MAX_CHANGES)
    candidates, moved = candidates.take(near), moved[:, near]
    return Neighbours(
        problem=problem,
        candidates=candidates,
        costs=problem.costs(candidates),
        changes=np.count_nonzero(moved, axis=0),
        directions=(3 ** np.arange(len(AXES))) @ np.sign(moved).astype(np.int64),
        distance=np.abs(moved).sum(axis=0),
    )


def _mend(near: Neighbours, row: int, asked: InferenceEstimate, *, num_gpus: int) -> ServingMend:
    """Row `row` beside what was asked for on `num_gpus` devices."""
    after = described(row, costs=near.costs, candidates=near.candidates, problem=near.problem)
    assert asked.parallel is not None and after.parallel is not None and after.memory is not None
    assert after.ttft_s is not None and after.tpot_s is not None and after.request_latency_s is not None
    assert after.output_tokens_per_second_per_gpu is not None
    before = asked.output_tokens_per_second_per_gpu
    return ServingMend(
        change=change_in_words(asked.parallel, after.parallel, gpus=(num_gpus, near.problem.cluster.num_gpus)),
        changed=changed_fields(asked.parallel, after.parallel),
        parallel=after.parallel,
        num_gpus=near.problem.cluster.num_gpus,
        memory_total_bytes=after.memory.total_bytes,
        ttft_s=after.ttft_s,
        tpot_s=after.tpot_s,
        request_latency_s=after.request_latency_s,
        output_tokens_per_second_per_gpu=after.output_tokens_per_second_per_gpu,
        throughput_change_fraction=after.output_tokens_per_second_per_gpu / before - 1.0 if before else None,
        remaining=after.reasons,
    )
