"""Exact search for the best candidates of one problem, without costing all of them.

A layout determines all axes except recomputation, sharding (ZeRO stage, shard size) and context
exchange. Each layout is costed with the usual values of these three (`space.axes`). Other values
are costed only if a lower bound of their step time or memory does not exclude them:

- Recomputation only adds time, so the step without it is a lower bound.
- Sharding affects only the parts SHARDED of a step, so the step without these parts is a lower
  bound.
- Another context exchange affects only EXCHANGE_PART and a proportional share of the bubble.
- Every kind of recomputation stores at least the inputs of its layers, as full recomputation does,
  so the memory of full recomputation without buffers is a lower bound.
- Block recomputation stores at least as much as full recomputation, and sharding within groups at
  least as much as sharding over all replicas.
- CUDA graphs save at most the time spent waiting for the host, so the step without it is a lower
  bound.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, fields, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hp_tool.cost.arrays import BoolArray, FloatArray, IntArray
from hp_tool.cost.breakdown import ROUNDING_FACTOR, host_waits_s
from hp_tool.cost.candidates import FULL_BLOCK, FULL_UNIFORM, NONE, Candidates
from hp_tool.cost.legality import has_indivisible_shards, legality
from hp_tool.cost.uncertainty import NORMAL_QUANTILE, ratio_log_sd, unmeasured_layouts
from hp_tool.domain import bounds
from hp_tool.domain.parts import PER_MICRO_BATCH, SHARDED
from hp_tool.domain.query import RankBy
from hp_tool.questions.training.calibrated import CalibratedPredictor
from hp_tool.questions.training.problem import TrainingProblem
from hp_tool.questions.training.ranking.free_axes import (
    group_stages,
    more_module_sets,
    more_shards,
    more_zero_stages,
    tries_layer_counts,
)
from hp_tool.questions.training.ranking.rank import (
    NO_ROWS,
    CostedRows,
    corrected_costs,
    keep_heap,
    with_criteria,
)
from hp_tool.questions.training.usual_settings import assumes_graphs
from hp_tool.space import default_axes, legal_chunks, spanned_values

EXCHANGE_PART = "context_parallel"
NEAR_RATIO = 1.01
"""Maximum expected step time of rank 1, relative to the fastest candidate."""
NEAR_RATIO_MEASURED = 1.04
"""The same, if rank 1 ran on this cluster or all its features occur in measured runs, and neither
is the case for faster layouts.
"""
FIRST, BLOCK = 256, 1 << 17
"""Number of rows whose other values are costed first, which lowers the limit for the later rows,
and number of candidates costed at once after that.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class UnfinishedRows:
    """Rows that may be among the best with other values of an axis. All fields have shape (n,)."""

    candidates: Candidates
    layout: IntArray
    """Layout number of each row."""
    bound_s: FloatArray
    """Lower bound of the step time for all values of the axis."""
    full_s: FloatArray
    """Step time with full recomputation; infinity if the axes exclude it."""
    full_fits: BoolArray
    """Whether full recomputation fits, or may fit, in memory."""

    def take(self, indices: NDArray[np.intp]) -> UnfinishedRows:
        """Return the selected rows, in the given order."""
        columns: dict[str, Any] = {
            f.name: getattr(self, f.name).take(indices) for f in fields(UnfinishedRows)
        }
        return UnfinishedRows(**columns)

    @staticmethod
    def joined(parts: list[UnfinishedRows]) -> UnfinishedRows:
        """Join the rows of all parts. There must be at least one part."""
        columns: dict[str, Any] = {
            f.name: np.concatenate([getattr(part, f.name) for part in parts])
            for f in fields(UnfinishedRows)[1:]
        }
        return UnfinishedRows(
            candidates=Candidates.concatenate([part.candidates for part in parts]), **columns
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class GridCosts:
    """Step times of a costed grid and the bounds derived from them, in the shape of the grid."""

    step_s: FloatArray
    unsharded_s: FloatArray
    """Step time without the parts in SHARDED."""
    exchanged_s: FloatArray
    """Maximum saving by another context exchange."""
    may_fit: BoolArray
    """Whether some recomputation may fit with the same states."""


def take_layouts(grid: Candidates, indices: NDArray[np.intp]) -> Candidates:
    """Return the part of the grid with these layouts. Layouts are the first dimension of the
    grid.
    """
    count = grid.shape[0]
    if len(indices) == count:
        return grid
    columns = {f.name: getattr(grid, f.name) for f in fields(Candidates)}
    return Candidates(
        **{
            name: column[indices] if len(column) == count else column
            for name, column in columns.items()
        }
    )


class BestSearch:
    """Search for all candidates of one problem that fewer than `keep` layouts beat, or that are
    nearly as fast as the fastest (up to `reach_s`).
    """

    def __init__(
        self,
        problem: TrainingProblem,
        *,
        keep: int,
        rank_by: RankBy = "expected",
        predictor: CalibratedPredictor | None = None,
        reach_s: float = np.inf,
    ) -> None:
        self.problem, self.keep, self.rank_by, self.predictor = problem, keep, rank_by, predictor
        self.slack = max(NEAR_RATIO, float(np.exp(NORMAL_QUANTILE * ratio_log_sd(problem.profile))))
        # A step longer than the longest permitted step is never acceptable.
        self.reach_s, self.limit_s = min(reach_s, problem.longest_step_s), np.inf
        self.axes = default_axes(query=problem.parallel, case=problem)
        self.assumes_graphs = assumes_graphs(problem)
        self.modules = more_module_sets(problem, self.axes)
        self.tries_layer_counts = tries_layer_counts(problem)
        self.stages, self.shards = (
            more_zero_stages(problem, self.axes),
            more_shards(problem, self.axes),
        )
        self.group_stages = group_stages(problem, (*self.axes.zero_stage, *self.stages))
        methods = [method for method, _, _ in self.axes.recompute]
        self.plain = methods.index(NONE) if NONE in methods else None
        self.full = methods.index(FULL_UNIFORM) if FULL_UNIFORM in methods else None
        self.rows = NO_ROWS
        self.layout: IntArray = np.zeros(0, dtype=np.int64)
        """Layout number of each of `rows`."""
        self.layouts = 0
        self.computed = self.feasible = self.combinations = 0
        self.rejections: Counter[str] = Counter()
        """Number of legal combinations that each limit rejected."""
        self.illegal: Counter[str] = Counter()
        """Number of combinations that each rule rejected."""
        self.exchanged: list[UnfinishedRows] = []
        """Layouts that may be faster with another context exchange."""
        self.pipelined: list[UnfinishedRows] = []
        """Pipelined layouts of models with different kinds of layers, which may be faster than
        `bound_s` if the layers are split differently into stages.
        """
        self._unsharded: list[UnfinishedRows] = []
        self._unrecomputed: list[UnfinishedRows] = []

    def run_on(self, layouts: UnfinishedRows) -> BestSearch:
        """Search only these layouts, which a search with another context exchange has already
        costed.
        """
        c = layouts.candidates
        legal = (legality(case=self.problem, candidates=c) == 0) & np.isin(
            c.context_parallel_size, self.axes.context_parallel_size
        )
        self.combinations += self._new_combinations(c.take(legal), usual=len(self.axes.zero_stage))
        for block in self._blocks(
            layouts.take(np.flatnonzero(legal)),
            each=len(self.axes.recompute) * len(self.axes.zero_stage),
        ):
            grid = spanned_values(
                block.candidates, recompute=self.axes.recompute, stages=self.axes.zero_stage
            )
            self._cost_usual_values(grid, block.layout, counted=True)
        self._search_sharding()
        self._search_recomputation()
        return self

    def run(self) -> BestSearch:
        """Collect in `rows` all candidates up to `reach_s`, and any costed candidates that are tied
        with one of them.
        """
        keep_heap()
        for chunk in legal_chunks(case=self.problem, axes=self.axes):
            self.illegal.update(chunk.rejections)
            count = chunk.candidates.shape[0]
            self._cost_usual_values(chunk.candidates, np.arange(self.layouts, self.layouts + count))
            self.layouts += count
        self._search_sharding()
        self._search_recomputation()
        return self

    @property
    def pruned(self) -> int:
        """Return the number of legal combinations that were excluded by lower bounds."""
        return self.combinations - self.computed

    def value(self, rows: CostedRows) -> FloatArray:
        """Return the ranking criterion of the rows in seconds; infinity for rows that are not
        acceptable.
        """
        return rows.value(self.rank_by)

    def _cost_usual_values(
        self, grid: Candidates, layout: IntArray, *, counted: bool = False
    ) -> None:
        """Cost layouts with their usual recomputations and ZeRO stages, and record the layouts that
        may be among the best with other values.

        `counted`: whether `combinations` already includes these layouts.
        """
        own = self._own_layouts(grid)
        grid, layout = take_layouts(grid, own), layout[own]
        if not len(grid):
            return
        costs = self._cost_grid(grid, layout)
        base = grid.at((np.arange(len(layout)), *np.zeros((2, len(layout)), dtype=np.intp)))
        number = self._count_combinations(base, usual=grid.shape[2])
        self.combinations += 0 if counted else self._new_combinations(base, usual=grid.shape[2])
        bound_s = costs.unsharded_s.min(axis=(1, 2))
        rows = UnfinishedRows(
            candidates=base,
            layout=layout,
            bound_s=bound_s,
            full_s=costs.step_s[:, 0, 0],
            full_fits=np.any(costs.may_fit, axis=(1, 2)),
        )
        has_other_values = number > grid.shape[2] * (
            len(self.axes.recompute) + self._count_other_recomputations(base)
        )
        self._unsharded.append(
            rows.take(
                np.flatnonzero(has_other_values & (bound_s * ROUNDING_FACTOR <= self.reach_s))
            )
        )
        with_context = np.flatnonzero(base.context_parallel_size > 1)
        unexchanged_s = (costs.unsharded_s - costs.exchanged_s).min(axis=(1, 2))
        self.exchanged.append(replace(rows, bound_s=unexchanged_s).take(with_context))
        if self.problem.model.blocks is not None:
            self.pipelined.append(rows.take(np.flatnonzero(base.pipeline_parallel_size > 1)))

    def _own_layouts(self, grid: Candidates) -> NDArray[np.intp]:
        """Return the indices of the layouts in the grid that have a row with the problem's usual
        settings.
        """
        usual = self.problem.usual
        if usual is None or not len(grid):
            return np.arange(grid.shape[0])
        belong = usual.belong(grid, problem=self.problem).reshape(grid.shape)
        return np.flatnonzero(belong.any(axis=(1, 2)))

    def _new_combinations(self, rows: Candidates, *, usual: int) -> int:
        """Return the number of combinations of these layouts with recomputation and sharding.

        Layouts that are legal in a problem with precedence (`Usual.earlier`) do not count.
        """
        number = self._count_combinations(rows, usual=usual)
        settings = self.problem.usual
        for other in () if settings is None else settings.earlier:
            number = number * (legality(case=other, candidates=rows) != 0)
        return int(number.sum())

    def _count_combinations(self, rows: Candidates, *, usual: int) -> IntArray:
        """Return (n,) the number of combinations of each layout with recomputation and sharding.

        `usual` is the number of usual ZeRO stages.
        """
        replicated = np.asarray(
            rows.data_parallel_size * rows.context_parallel_size > 1, dtype=np.int64
        )
        groups = self._shard_groups(rows).sum(axis=1) * replicated
        states: IntArray = usual + replicated * len(self.stages) + groups * len(self.group_stages)
        return states * (len(self.axes.recompute) + self._count_other_recomputations(rows))

    def _shard_groups(self, rows: Candidates) -> BoolArray:
        """Return (n, sizes) whether ZeRO can shard within groups of each size for each row."""
        columns = {f.name: getattr(rows, f.name)[:, None] for f in fields(Candidates)}
        sizes = np.array(self.shards, dtype=np.int64)[None, :]
        grid = Candidates(**columns | {"data_parallel_shard_size": sizes})
        broken = has_indivisible_shards(self.problem.model, grid) if self.shards else False
        legal: BoolArray = (sizes < columns["data_parallel_size"]) & ~np.asarray(broken)
        return legal

    def _count_other_recomputations(self, rows: Candidates) -> IntArray:
        """Return (n,) the number of recomputations for each row besides the usual ones."""
        return (
            len(self.modules)
            + 2 * np.maximum(self._chunk_layers(rows) - 1, 0) * self.tries_layer_counts
        )

    def _chunk_layers(self, rows: Candidates) -> IntArray:
        """Return (n,) the number of layers in the largest model chunk."""
        layers: IntArray = -(
            -self.problem.model.total_layers
            // (rows.pipeline_parallel_size * rows.virtual_pipeline_parallel_size)
        )
        return layers

    def _search_sharding(self) -> None:
        """Cost the other ZeRO stages of layouts that may be among the best, then sharding within
        groups where it may fit.
        """
        if not self._unsharded:
            return
        layouts = UnfinishedRows.joined(self._unsharded)
        for block in self._blocks(
            layouts, each=len(self.axes.recompute) * max(len(self.stages), 1)
        ):
            fits = block.full_fits
            if self.stages:
                grid = spanned_values(
                    block.candidates, recompute=self.axes.recompute, stages=self.stages
                )
                fits = fits | self._cost_grid(grid, block.layout).may_fit.any(axis=(1, 2))
            row, size = np.nonzero(self._shard_groups(block.candidates) & fits[:, None])
            if len(row) and self.group_stages:
                groups = block.candidates.take(row)
                columns = {f.name: getattr(groups, f.name) for f in fields(Candidates)}
                columns["data_parallel_shard_size"] = np.array(self.shards)[size]
                grid = spanned_values(
                    Candidates(**columns), recompute=self.axes.recompute, stages=self.group_stages
                )
                self._cost_grid(grid, block.layout[row])

    def _search_recomputation(self) -> None:
        """Cost the other recomputations of rows that may be among the best."""
        if not self._unrecomputed:
            return
        for block in self._blocks(
            UnfinishedRows.joined(self._unrecomputed), each=max(len(self.modules), 1)
        ):
            if self.modules:
                self._cost_grid(
                    spanned_values(block.candidates, recompute=self.modules),
                    block.layout,
                    reopen=False,
                )
            if self.tries_layer_counts:
                self._cost_layer_counts(block)

    def _cost_layer_counts(self, block: UnfinishedRows) -> None:
        """Cost full recomputation of each number of layers that may fit and may be among the
        best.
        """
        max_layers = self._chunk_layers(block.candidates) - 1
        may_be_faster = block.full_s * ROUNDING_FACTOR <= self.reach_s
        by_block, by_checkpoint = (
            np.where(block.full_fits, max_layers, 0),
            np.where(may_be_faster, max_layers, 0),
        )
        number = np.concatenate([by_block, by_checkpoint])
        places = np.repeat(np.arange(len(number)), number)
        if not len(places):
            return
        row, uniform = places % len(max_layers), places >= len(max_layers)
        counts = (
            1 + uniform + np.arange(len(places)) - np.repeat(np.cumsum(number) - number, number)
        )
        chosen = block.candidates.take(row)
        columns = {f.name: getattr(chosen, f.name) for f in fields(Candidates)}
        columns |= {
            "recompute_method": np.where(uniform, FULL_UNIFORM, FULL_BLOCK),
            "recompute_num_layers": counts,
        }
        grid = Candidates(**{name: column.reshape(-1, 1, 1) for name, column in columns.items()})
        self._cost_grid(grid, block.layout[row], reopen=False)

    def _blocks(self, rows: UnfinishedRows, *, each: int) -> Iterator[UnfinishedRows]:
        """Yield blocks of rows by ascending `bound_s`, until it exceeds `reach_s`. Costing a block
        may lower `reach_s`.

        Each row stands for `each` candidates.
        """
        order, size = np.argsort(rows.bound_s, kind="stable"), max(BLOCK // each, FIRST)
        for part in np.split(order, [FIRST, *range(FIRST + size, len(order), size)]):
            block = rows.take(part)
            near = np.flatnonzero(block.bound_s * ROUNDING_FACTOR <= self.reach_s)
            if not len(near):
                return
            bounds.check_work()
            yield block.take(near)

    def _cost_grid(self, grid: Candidates, layout: IntArray, *, reopen: bool = True) -> GridCosts:
        """Cost a grid of layouts, recomputations and ZeRO stages, and store the best rows.

        `reopen`: also record the rows that may be among the best with other recomputations.
        """
        shape = grid.shape
        costs = corrected_costs(grid, problem=self.problem, predictor=self.predictor)
        rows, limited = with_criteria(grid, costs, problem=self.problem, predictor=self.predictor)
        self.rejections.update(limited)
        self.computed += int(np.count_nonzero(rows.own))
        self.feasible += int(np.count_nonzero(rows.acceptable))
        self._store_best(rows, np.repeat(layout, len(grid) // len(layout)))

        def shaped(column: Any) -> NDArray[Any]:
            return (
                np.broadcast_to(column, shape)
                if np.ndim(column) != 1
                else np.reshape(column, shape)
            )

        step_s, fits = shaped(costs.step_s), shaped(costs.feasible)
        if self.assumes_graphs:
            step_s = step_s - shaped(host_waits_s(costs, case=self.problem))
        may_fit = np.ones(shape, dtype=np.bool_)
        if self.full is not None and reopen:
            least = (
                shaped(costs.memory_total_bytes)[:, self.full]
                - shaped(costs.memory_parts["buffers"])[:, self.full]
            )
            may_fit &= (least * ROUNDING_FACTOR <= shaped(costs.capacity_bytes)[:, self.full])[
                :, None
            ]
        if reopen and self.plain is not None and (self.modules or self.tries_layer_counts):
            plain_s = step_s[:, self.plain]
            row, stage = np.nonzero(may_fit[:, 0] & (plain_s * ROUNDING_FACTOR <= self.reach_s))
            full_s = (
                step_s[row, self.full, stage]
                if self.full is not None
                else np.full(len(row), np.inf)
            )
            full_fits = (
                fits[row, self.full, stage]
                if self.full is not None
                else np.zeros(len(row), dtype=np.bool_)
            )
            chosen = grid.at((row, np.full(len(row), self.plain), stage))
            self._unrecomputed.append(
                UnfinishedRows(
                    candidates=chosen,
                    layout=layout[row],
                    bound_s=plain_s[row, stage],
                    full_s=full_s,
                    full_fits=full_fits,
                )
            )
        stage_s = sum(shaped(costs.parts[name]) for name in PER_MICRO_BATCH)
        bubble_s, exchanged_s = (
            shaped(costs.parts["pipeline_bubble"]),
            shaped(costs.parts[EXCHANGE_PART]),
        )
        return GridCosts(
            step_s=step_s,
            unsharded_s=step_s - sum(shaped(costs.parts[name]) for name in SHARDED),
            exchanged_s=exchanged_s * (1.0 + bubble_s / stage_s),
            may_fit=may_fit,
        )

    def _rank_one_limit_s(self, rows: CostedRows) -> float:
        """Return the maximum ranking criterion of rank 1 among sorted rows, in seconds.

        It is NEAR_RATIO times that of the fastest row with only measured features. If a row that
        ran may be rank 1, it is NEAR_RATIO_MEASURED times that of the fastest row.
        """
        value = self.value(rows)
        if self.predictor is not None and self.predictor.measures(self.problem):
            return NEAR_RATIO_MEASURED * float(value[0])
        within = np.flatnonzero(value <= NEAR_RATIO_MEASURED * value[0])
        candidates = rows.candidates.take(within)
        measured = within[~unmeasured_layouts(case=self.problem, candidates=candidates)]
        if not len(measured):
            return NEAR_RATIO_MEASURED * float(value[0])
        return NEAR_RATIO * float(value[measured[0]])

    def _store_best(self, rows: CostedRows, layout: IntArray) -> None:
        """Store the rows up to `limit_s`, and lower `limit_s` and `reach_s`.

        `limit_s` is `slack` times the ranking criterion of the `keep`-th best layout.
        """
        value = rows.least_value(self.rank_by)
        near = np.flatnonzero(np.isfinite(value) & (value <= self.limit_s))
        if not len(near):
            return
        rows = CostedRows.concatenate([self.rows, rows.take(near)])
        layout = np.concatenate([self.layout, layout[near]])
        order = np.argsort(self.value(rows), kind="stable")
        _, first = np.unique(layout[order], return_index=True)
        if len(first) >= self.keep:
            nth_s = float(self.value(rows)[order[np.sort(first)[self.keep - 1]]])
            self.reach_s = min(self.reach_s, max(nth_s, self._rank_one_limit_s(rows.take(order))))
            self.limit_s = self.slack * nth_s
            order = order[rows.least_value(self.rank_by)[order] <= self.limit_s]
        self.rows, self.layout = rows.take(order), layout[order]
