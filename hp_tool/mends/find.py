"""From an infeasible estimate to the changes that mend it."""

from __future__ import annotations

import dataclasses
import math

from hp_tool.cost.breakdown import estimate_row
from hp_tool.domain.hardware import ClusterQuery
from hp_tool.domain.parallel import ParallelConfig, PipelineSchedule, as_asked
from hp_tool.domain.query import Query
from hp_tool.domain.result import Estimate, Mend
from hp_tool.errors import InputError
from hp_tool.mends.near import Near, near
from hp_tool.mends.words import change_in_words, changed_fields
from hp_tool.problem import TrainingProblem, resolve_training
from hp_tool.targets import missed_targets

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
