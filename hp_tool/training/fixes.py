"""Legal neighbours of a configuration, costed as one batch and ranked."""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass, fields, replace

import numpy as np
from numpy.typing import NDArray

from hp_tool.cost.arrays import BoolArray, FloatArray, IntArray
from hp_tool.cost.breakdown import estimate_row
from hp_tool.cost.candidates import FULL_BLOCK, Candidates
from hp_tool.cost.legality import legality
from hp_tool.cost.training import TrainingCosts
from hp_tool.domain.hardware import ClusterQuery
from hp_tool.domain.parallel import ParallelConfig, ParallelQuery, PipelineSchedule, as_asked
from hp_tool.domain.query import Query
from hp_tool.domain.result import Estimate, Mend
from hp_tool.errors import InputError
from hp_tool.space import default_axes, scheduled_chunks
from hp_tool.space.neighbours import SIZES, neighbours
from hp_tool.training.fix_words import change_in_words, changed_fields
from hp_tool.training.limits import longest_step_s, missed_targets
from hp_tool.training.problem import TrainingProblem, resolve_training


@dataclass(frozen=True, slots=True, kw_only=True)
class Near:
    """Legal configurations that differ from `asked` on a given number of axes, with their costs; arrays of shape (n,)."""

    problem: TrainingProblem
    asked: ParallelConfig
    candidates: Candidates
    costs: TrainingCosts

    @property
    def acceptable(self) -> BoolArray:
        """Fits, and keeps to max_days and max_cost."""
        return self.costs.feasible & (self.costs.step_s <= longest_step_s(self.problem))

    def best(self, *, nearest: bool = False, limit_s: float = math.inf) -> NDArray[np.intp]:
        """Acceptable rows with a step below limit_s, fastest first; equal times prefer less memory. Of the rows that move
        the same axes in the same directions only the fastest is kept, or the nearest.
        """
        rows = np.flatnonzero(self.acceptable & (self.costs.step_s < limit_s))
        directions, distance = _moves(self.candidates, self.asked)
        fastest = (self.costs.memory_total_bytes, self.costs.step_s)
        order = rows[np.lexsort([key[rows] for key in (*fastest, distance)[: 3 if nearest else 2]])]
        first = order[np.unique(directions[order], return_index=True)[1]]
        ranked: NDArray[np.intp] = first[np.lexsort([key[first] for key in fastest])]
        return ranked

    def fastest_that_fits(self) -> int | None:
        """Whether in time or not."""
        rows = np.flatnonzero(self.costs.feasible)
        return int(rows[np.argmin(self.costs.step_s[rows])]) if len(rows) else None


def near(
    problem: TrainingProblem, *, asked: ParallelConfig, changes: int, schedule: PipelineSchedule | None = None
) -> Near | None:
    """The neighbours of `asked` on exactly so many axes that are legal and run under the schedule; None without any."""
    axes = default_axes(query=ParallelQuery(pipeline_layout=problem.parallel.pipeline_layout), case=problem)
    chunks = (asked.virtual_pipeline_parallel_size, *axes.virtual_pipeline_parallel_size)
    every = neighbours(
        asked=Candidates.alone(asked),
        axes=replace(axes, virtual_pipeline_parallel_size=scheduled_chunks(chunks, schedule=schedule)),
        num_gpus=problem.cluster.num_gpus,
        changes=changes,
    )
    legal = every.take(legality(case=problem, candidates=every) == 0)
    candidates = _with_fewest_layers(problem, legal)
    if len(candidates) == 0:
        return None
    return Near(problem=problem, asked=asked, candidates=candidates, costs=problem.costs(candidates))


def _with_fewest_layers(problem: TrainingProblem, candidates: Candidates) -> Candidates:
    """Block recomputation of no more layers than memory asks for, by bisection over all rows at once: with every layer
    more, memory falls and time rises. Rows that need all layers are dropped; plain `full` is a value of its own.
    """
    block = (candidates.recompute_method == FULL_BLOCK) & (candidates.recompute_num_layers == 0)
    if not np.any(block):
        return candidates
    rows = candidates.take(block)
    chunk = problem.model.num_hidden_layers // (rows.pipeline_parallel_size * rows.virtual_pipeline_parallel_size)
    low, high = np.zeros_like(chunk), chunk
    while np.any(high - low > 1):
        middle = (low + high + 1) // 2
        fits = problem.costs(replace(rows, recompute_num_layers=middle)).feasible
        low, high = np.where(fits, low, middle), np.where(fits, middle, high)
    num_layers, keep = candidates.recompute_num_layers.copy(), np.ones(len(candidates), dtype=bool)
    num_layers[block], keep[block] = high, high < chunk
    return replace(candidates, recompute_num_layers=num_layers).take(keep)


def _moves(candidates: Candidates, asked: ParallelConfig) -> tuple[IntArray, FloatArray]:
    """(a number that says which axes rise and which fall, how far sizes moved as a sum of logarithms), shape (n,)."""
    base = Candidates.alone(asked)
    directions, distance = np.zeros(len(candidates), dtype=np.int64), np.zeros(len(candidates))
    for name in (f.name for f in fields(Candidates) if f.name != "data_parallel_size"):
        values, here = getattr(candidates, name), getattr(base, name)
        directions = 3 * directions + np.sign(values - here) + 1
        if name in SIZES:
            distance += np.abs(np.log(values / here))
    return directions, distance


# From an infeasible estimate to the changes that mend it.


MAX_MENDS = 5
MAX_CHANGES = 3
"""Axes changed at once; more are tried only where fewer mend nothing, three only where with fewer nothing fits."""
WORTHWHILE = 0.9
"""Where one change mends, two are told beside it only if the step takes no more than this share of its."""
GROWTH = (2, 4, 8)
"""Multiples of the devices that are tried; the smallest that mends is told."""


def mends(*, query: Query, problem: TrainingProblem, asked: Estimate) -> tuple[Mend, ...]:
    """At most MAX_MENDS smallest changes after which the infeasible estimate `asked` of `query` would be feasible.

    Fastest first; of changes to the same axes in the same directions only the fastest is told, or the nearest where
    `asked` is illegal. One that needs more devices comes last. Where no change is fast enough for max_days or max_cost,
    the fastest that fits is told with what it still misses.
    """
    more = _on_more_devices(query, asked, num_gpus=problem.cluster.num_gpus)
    return (*_on_the_same_devices(query, problem, asked, room=MAX_MENDS - len(more)), *more)


def _on_the_same_devices(query: Query, problem: TrainingProblem, asked: Estimate, *, room: int) -> list[Mend]:
    assert asked.parallel is not None
    illegal, num_gpus = asked.memory is None, problem.cluster.num_gpus
    told: list[Mend] = []
    fitting: list[Mend] = []
    for changes in range(0 if illegal else 1, MAX_CHANGES + 1):
        enough = len(told) == room or (told and illegal)
        if enough or (changes == MAX_CHANGES and fitting):
            break
        found = near(problem, asked=asked.parallel, changes=changes, schedule=_schedule(query))
        if found is None:
            continue
        limit_s = min((WORTHWHILE * mend.step_s for mend in told), default=math.inf)
        rows = found.best(nearest=illegal, limit_s=limit_s)[: room - len(told)]
        told += [_mend(found, int(row), asked, num_gpus=num_gpus) for row in rows]
        if (fastest := found.fastest_that_fits()) is not None:
            fitting.append(_mend(found, fastest, asked, num_gpus=num_gpus))
    return sorted(told, key=lambda mend: mend.step_s) if told else _too_slow(fitting, asked)


def _too_slow(fitting: list[Mend], asked: Estimate) -> list[Mend]:
    """The fastest of the mends that fit and are late, where it gains anything on what was asked for."""
    best = min(fitting, key=lambda mend: mend.step_s, default=None)
    if best is None:
        return []
    if asked.memory is None or asked.time is None or asked.memory.total_bytes > asked.memory.capacity_bytes:
        return [best]
    return [best] if best.step_s < asked.time.step_s else []


def _on_more_devices(query: Query, asked: Estimate, *, num_gpus: int) -> list[Mend]:
    """The fastest mend on the smallest multiple of the devices; an illegal configuration must want more than there are."""
    assert asked.parallel is not None
    if asked.memory is None and _devices(asked.parallel) <= num_gpus:
        return []
    for factor in GROWTH:
        problem = _grown(query, num_gpus=factor * num_gpus)
        if problem is None:
            break
        for changes in (0, 1) if asked.memory is not None else (0,):
            found = near(problem, asked=asked.parallel, changes=changes, schedule=_schedule(query))
            if found is not None and len(rows := found.best()):
                return [_mend(found, int(rows[0]), asked, num_gpus=num_gpus)]
    return []


def _grown(query: Query, *, num_gpus: int) -> TrainingProblem | None:
    """The same problem on a larger cluster of the same kind; None where there is no such cluster."""
    cluster = ClusterQuery(node_type=query.cluster) if isinstance(query.cluster, str) else query.cluster
    try:
        return resolve_training(dataclasses.replace(query, cluster=dataclasses.replace(cluster, num_gpus=num_gpus)))
    except InputError:  # past the largest cluster, or nodes that no longer divide into NVLink domains
        return None


def _schedule(query: Query) -> PipelineSchedule | None:
    """The one schedule that an estimate may name."""
    named = query.parallel.pipeline_schedule
    return named[0] if isinstance(named, tuple) else named


def _devices(config: ParallelConfig) -> int:
    ranks = config.tensor_parallel_size * config.pipeline_parallel_size * config.context_parallel_size
    return ranks * config.data_parallel_size


def _mend(found: Near, row: int, asked: Estimate, *, num_gpus: int) -> Mend:
    """Row `row` of the neighbours beside what was asked for on `num_gpus` devices."""
    problem = found.problem
    after = estimate_row(row, case=problem, costs=found.costs, candidates=found.candidates)
    assert asked.parallel is not None and after.parallel is not None and after.memory is not None and after.time is not None
    return Mend(
        change=change_in_words(asked.parallel, after.parallel, gpus=(num_gpus, problem.cluster.num_gpus)),
        changed=changed_fields(asked.parallel, after.parallel),
        parallel=as_asked(after.parallel, problem.parallel),
        num_gpus=problem.cluster.num_gpus,
        memory_total_bytes=after.memory.total_bytes,
        memory_saved_bytes=asked.memory.total_bytes - after.memory.total_bytes if asked.memory is not None else None,
        step_s=after.time.step_s,
        step_change_fraction=after.time.step_s / asked.time.step_s - 1.0 if asked.time is not None else None,
        days=after.calendar_days,
        cost=after.cost,
        remaining=missed_targets(after, problem),
    )
