"""Choose which rows of a ranking to show, pick the first, and group ties."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from hp_tool.cost.arrays import BoolArray, FloatArray, IntArray
from hp_tool.cost.candidates import CORE_ATTN, FULL_BLOCK, FULL_UNIFORM, Candidates
from hp_tool.cost.uncertainty import (
    NORMAL_QUANTILE,
    ratio_log_sd,
    step_log_sd,
    unmeasured_layouts,
    unmeasured_table,
)
from hp_tool.domain.fit import SAFE_PROBABILITY
from hp_tool.domain.result import Faster, Recommendation
from hp_tool.questions.training.problem import TrainingProblem
from hp_tool.questions.training.ranking.best import Best
from hp_tool.questions.training.ranking.exact import NEAR_RATIO, NEAR_RATIO_MEASURED
from hp_tool.questions.training.ranking.rank import recommendations_of_rows

COARSE_TIE = 0.05
"""Candidates count as equal if their free memory differs by less than this fraction of the device's
memory.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    """The rows to show, in ranking order."""

    best: Best
    group: IntArray
    """(n,) group number of each row, from 1."""
    sizes: tuple[int, ...]
    """Number of layouts in each group, up to the group of the last row."""
    faster: Best | None = None
    """The fastest row, if it is not rank 1 because it has features that no measured run has."""


def choose_rows(best: Best, *, count: int) -> Choice:
    """Return the `count` best layouts in groups, each with its best recomputation and sharding.

    Rank 1 is the simplest and safest candidate of group 1 with a step time of at most NEAR_RATIO
    times the shortest. If some candidates within NEAR_RATIO_MEASURED of the shortest step time ran
    on this cluster, rank 1 is chosen among these. Otherwise, the same applies to candidates whose
    features all occur in measured runs. Layouts of group 1 that ran but are slower than all rows
    shown replace the last rows.
    """
    if not len(best.layout):
        return Choice(best=best, group=np.zeros(0, dtype=np.int64), sizes=())
    _, first = np.unique(best.layout, return_index=True)
    listed = np.sort(first)
    group = _group_rows(best.take(listed))
    measured, ran = _is_measured(best), _has_run(best)
    within = best.value_s <= NEAR_RATIO_MEASURED * best.value_s[0]
    preferred = (np.flatnonzero(within & ran), np.flatnonzero(within & measured))
    eligible = next((rows for rows in preferred if len(rows)), np.arange(len(best.layout)))
    near = eligible[best.value_s[eligible] <= NEAR_RATIO * best.value_s[eligible[0]]]
    near = near[_is_tied(best.take(near), 0)]
    rows = best.rows.take(near)
    place = choose_simplest(
        rows.candidates,
        problem=best.problems[0],
        total_bytes=rows.memory_total_bytes,
        fails=1.0 - rows.step_s / rows.expected_s,
        value_s=best.value_s[near],
        more_axes=(~np.isin(best.variant[near], best.bases)).astype(np.int64),
    )
    pick = int(near[place])
    ran_layouts = np.unique(best.layout[ran])
    tied = (group == 1) & np.isin(best.layout[listed], ran_layouts)
    others = _select_shown(
        np.flatnonzero(best.layout[listed] != best.layout[pick]), tied, count - 1
    )
    shown = np.concatenate([[pick], listed[others]])
    groups = np.concatenate([[1], group[others]])
    sizes = np.bincount(group)[1 : int(groups[-1]) + 1]
    return Choice(
        best=best.take(shown),
        group=groups,
        sizes=tuple(map(int, sizes)),
        faster=best.take(np.arange(1)) if measured[pick] and not measured[0] else None,
    )


def _select_shown(rows: NDArray[np.intp], must_show: BoolArray, count: int) -> NDArray[np.intp]:
    """Return the first `count` of the sorted `rows`. Later rows with `must_show` replace the last
    rows without it.
    """
    first, later = rows[:count], rows[count:]
    replaceable = first[~must_show[first]]
    later = later[must_show[later]][: len(replaceable)]
    replaced = replaceable[len(replaceable) - len(later) :]
    return np.sort(np.concatenate([np.setdiff1d(first, replaced), later]))


def _group_rows(best: Best) -> IntArray:
    """Return (n,) the group number of each row.

    A row that is not tied with the first row of the current group starts a new group.
    """
    group, start = np.ones(len(best.layout), dtype=np.int64), 0
    while len(apart := np.flatnonzero(~_is_tied(best, start)[start:])):
        start += int(apart[0])
        group[start:] += 1
    return group


def _is_tied(best: Best, first: int) -> BoolArray:
    """Return (n,) whether each row is tied with row `first`, so that the 90% interval of the ratio
    of their step times contains 1.
    """
    unmeasured = _unmeasured_features(best)
    differing = (unmeasured ^ unmeasured[first]).sum(axis=1)
    first_of_all, first_workload = (
        best.problems[0],
        best.problems[int(best.variant[first])].plain.workload,
    )
    same = np.array([problem.plain.workload == first_workload for problem in best.problems])[
        best.variant
    ]
    different_training_sd = math.sqrt(2.0) * step_log_sd(
        case=first_of_all
    )  # errors of two workloads are assumed to be independent
    bound = NORMAL_QUANTILE * np.where(
        same, ratio_log_sd(first_of_all.profile, differing=differing), different_training_sd
    )
    tied: BoolArray = np.abs(np.log(best.rows.step_s / best.rows.step_s[first])) <= bound
    return tied


def _is_measured(best: Best) -> BoolArray:
    """Return (n,) whether all features of each row's layout occur in measured runs."""
    measured = np.ones(len(best.layout), dtype=np.bool_)
    for number, problem in enumerate(best.problems):
        rows = np.flatnonzero(best.variant == number)
        candidates = best.rows.candidates.take(rows)
        measured[rows] = ~unmeasured_layouts(case=problem, candidates=candidates)
    return measured


def _has_run(best: Best) -> BoolArray:
    """Return (n,) whether each row ran on this cluster, as recorded in the calibration."""
    ran = np.zeros(len(best.layout), dtype=np.bool_)
    for number, (problem, predictor) in enumerate(zip(best.problems, best.predictors, strict=True)):
        if predictor is not None:
            rows = np.flatnonzero(best.variant == number)
            ran[rows] = predictor.measured(best.rows.candidates.take(rows), problem=problem)
    return ran


def _unmeasured_features(best: Best) -> BoolArray:
    """Return (n, features) whether each row has each of the features that no measured run has."""
    unmeasured = np.zeros((len(best.layout), 0), dtype=np.bool_)
    for number, problem in enumerate(best.problems):
        rows = np.flatnonzero(best.variant == number)
        table = unmeasured_table(case=problem, candidates=best.rows.candidates.take(rows))
        unmeasured = (
            unmeasured
            if unmeasured.shape[1]
            else np.zeros((len(best.layout), table.shape[1]), dtype=np.bool_)
        )
        unmeasured[rows] = table
    return unmeasured


def choose_simplest(
    candidates: Candidates,
    *,
    problem: TrainingProblem,
    total_bytes: FloatArray,
    fails: FloatArray,
    value_s: FloatArray,
    more_axes: IntArray | int = 0,
) -> int:
    """Return the index of the candidate to try first.

    The criteria, in this order, are a low probability of running out of memory (`fails`), the
    fewest axes in use (including `more_axes`), the most replicas left after a node fails, the most
    free memory, and the shortest time.
    """
    free = np.floor(total_bytes / problem.cluster.gpu.memory_bytes / COARSE_TIE)
    axes = _count_axes(candidates, layers=problem.model.total_layers) + more_axes
    keys = (
        value_s,
        free,
        -_surviving_fraction(candidates, problem),
        axes,
        fails > SAFE_PROBABILITY,
    )
    return int(np.lexsort(keys)[0])


def _count_axes(c: Candidates, *, layers: int) -> IntArray:
    """Return (n,) the number of axes in use: parallel sizes above 1, and settings that save
    memory.
    """
    sizes = (
        c.tensor_parallel_size,
        c.pipeline_parallel_size,
        c.virtual_pipeline_parallel_size,
        c.context_parallel_size,
        c.expert_parallel_size,
        c.expert_tensor_parallel_size,
    )
    partial = (c.recompute_method == FULL_BLOCK) | (
        (c.recompute_method == FULL_UNIFORM) & (c.recompute_num_layers > 1)
    )
    uneven = layers % (c.pipeline_parallel_size * c.virtual_pipeline_parallel_size) != 0
    settings = (
        c.recompute_modules > CORE_ATTN,
        partial,
        uneven,
        c.zero_stage > 1,
        c.data_parallel_shard_size > 0,
    )
    used: IntArray = np.stack([*(size > 1 for size in sizes), *settings]).sum(axis=0)
    return used


def _surviving_fraction(c: Candidates, problem: TrainingProblem) -> FloatArray:
    """Return (n,) the fraction of data-parallel replicas that can continue after one node fails.

    The number of remaining replicas is the largest one that fits on the other nodes and divides the
    batch.
    """
    cluster, batch = problem.cluster, problem.workload.global_batch_size
    ranks = c.tensor_parallel_size * c.pipeline_parallel_size * c.context_parallel_size
    max_replicas = (cluster.num_gpus - cluster.gpus_per_node) // ranks
    surviving = np.zeros(len(c))
    for row, (count, size) in enumerate(
        zip(max_replicas.tolist(), c.micro_batch_size.tolist(), strict=True)
    ):
        surviving[row] = next((d for d in range(count, 0, -1) if batch % (d * size) == 0), 0)
    return surviving / c.data_parallel_size


def recommendations_of(best: Best) -> tuple[Recommendation, ...]:
    """Return a recommendation for each row, with ranks in the order of the rows."""
    described: dict[int, Recommendation] = {}
    for number, (problem, predictor) in enumerate(zip(best.problems, best.predictors, strict=True)):
        of_problem = best.variant == number
        for places in (
            np.flatnonzero(of_problem & ~best.rows.recorded),
            np.flatnonzero(of_problem & best.rows.recorded),
        ):
            rows = recommendations_of_rows(
                best.rows.take(places), problem=problem, predictor=predictor
            )
            described |= dict(zip(places.tolist(), rows, strict=True))
    return tuple(
        _with_risk(replace(described[place], rank=place + 1)) for place in sorted(described)
    )


def chosen_recommendations(choice: Choice) -> tuple[Recommendation, ...]:
    """Return a recommendation for each chosen row."""
    rows = recommendations_of(choice.best)
    if choice.faster is not None:
        rows = (
            replace(rows[0], faster=_fastest_unmeasured(choice.faster, than=rows[0])),
            *rows[1:],
        )
    problem = choice.best.problems[0]
    if problem.strategy.dynamic_context_parallel:
        return _sort_by_schedule(
            rows, bound=math.exp(NORMAL_QUANTILE * float(ratio_log_sd(problem.profile)))
        )
    return tuple(
        replace(row, group=int(group)) for row, group in zip(rows, choice.group, strict=True)
    )


def _fastest_unmeasured(best: Best, *, than: Recommendation) -> Faster:
    """Return the fastest layout, and those of its unmeasured features that `than` does not have."""
    (row,) = recommendations_of(best)
    near, first = row.estimate.familiarity, than.estimate.familiarity
    assert near is not None and first is not None
    assert row.expected_step_s and than.expected_step_s
    return Faster(
        parallel=row.parallel,
        set=row.set,
        unmeasured=tuple(name for name in near.unmeasured if name not in first.unmeasured),
        expected_step_s=row.expected_step_s,
        gain_fraction=1.0 - row.expected_step_s / than.expected_step_s,
    )


def _sort_by_schedule(
    rows: tuple[Recommendation, ...], *, bound: float
) -> tuple[Recommendation, ...]:
    """Return the rows sorted by their expected step time with dynamic context parallelism, which
    the ranking ignores.
    """
    ordered = sorted(rows, key=lambda row: row.expected_step_s or math.inf)
    ranking: list[Recommendation] = []
    group, first_s = 0, 0.0
    for rank, row in enumerate(ordered, start=1):
        assert row.estimate.time is not None  # legal rows
        if not ranking or row.estimate.time.step_s > bound * first_s:
            group, first_s = group + 1, row.estimate.time.step_s
        ranking.append(replace(row, rank=rank, group=group))
    return tuple(ranking)


def _with_risk(row: Recommendation) -> Recommendation:
    known = row.preferred_estimate
    fails = known.out_of_memory_probability
    assert known.time is not None and fails is not None  # legal rows
    return replace(
        row,
        out_of_memory_probability=fails,
        expected_step_s=known.time.step_s / (1.0 - fails) if fails < 1.0 else None,
    )
