"""The best of all that a query leaves free, found exactly without costing all of it.

A layout fixes every axis but two: what is recomputed, and how states are sharded (ZeRO stage, shard size). Every layout is
costed with the usual values of these (`space.axes`); the others are costed only where bounds let them matter:

- Recomputation only adds time: no step is shorter than the same one without it.
- Sharding changes the parts SHARDED alone: a step without these bounds all ways to shard.
- Every recomputation keeps at least its layers' inputs, as full recomputation does, whose memory without buffers is a bound.
- Block recomputation keeps at least what full does; shard groups hold at least what all replicas together do.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, fields, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hp_tool import bounds
from hp_tool.cost.arrays import BoolArray, FloatArray, IntArray
from hp_tool.cost.candidates import FULL_BLOCK, FULL_UNIFORM, NONE, Candidates
from hp_tool.cost.legality import shards_broken
from hp_tool.cost.uncertainty import NORMAL_QUANTILE, ratio_log_sd
from hp_tool.domain.query import RankBy
from hp_tool.space import default_axes, legal_chunks, spanned
from hp_tool.training.calibrated import CalibratedPredictor
from hp_tool.training.free import every_chunk_count, more_module_sets, more_shards, more_zero_stages, variants
from hp_tool.training.problem import TrainingProblem
from hp_tool.training.rank import NO_ROWS, RERANKED, CostedRows, corrected_costs, judged, keep_heap, with_residuals

SHARDED = ("data_parallel", "optimizer", "offload")
"""Parts of a step that depend on how states are sharded."""
NEAR = 1.01
"""Rank 1 may take so many times the fastest expected step."""
BLOCK = 512
"""Rows whose other values are costed together before the limit falls again."""
ROUNDING = 1.0 - 1e-9
"""Bounds are sums of floating-point numbers."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Open:
    """Rows of which other values of an axis may matter; every field has shape (n,)."""

    candidates: Candidates
    layout: IntArray
    """A number for each layout."""
    bound_s: FloatArray
    """No value of the axis gives a shorter step."""
    full_s: FloatArray
    """The step with full recomputation, infinity if that is not run."""
    full_fits: BoolArray

    def take(self, indices: NDArray[np.intp]) -> Open:
        """The chosen rows, in the given order."""
        columns: dict[str, Any] = {f.name: getattr(self, f.name).take(indices) for f in fields(Open)}
        return Open(**columns)

    @staticmethod
    def joined(parts: list[Open]) -> Open:
        """The rows of all parts; at least one."""
        columns: dict[str, Any] = {f.name: np.concatenate([getattr(part, f.name) for part in parts]) for f in fields(Open)[1:]}
        return Open(candidates=Candidates.concatenate([part.candidates for part in parts]), **columns)


class BestSearch:
    """Finds the candidates of one problem that no more than `keep` layouts beat, or that are in a group with such a one."""

    def __init__(
        self,
        problem: TrainingProblem,
        *,
        keep: int,
        rank_by: RankBy = "expected",
        predictor: CalibratedPredictor | None = None,
        limit_s: float = np.inf,
    ) -> None:
        self.problem, self.keep, self.rank_by, self.predictor = problem, keep, rank_by, predictor
        self.slack = max(NEAR, float(np.exp(NORMAL_QUANTILE * ratio_log_sd(problem.profile))))
        self.limit_s = limit_s
        self.axes = default_axes(query=problem.parallel, case=problem)
        self.modules = more_module_sets(problem)
        self.counts = every_chunk_count(problem)
        self.stages, self.shards = more_zero_stages(problem, self.axes), more_shards(problem, self.axes)
        methods = [method for method, _, _ in self.axes.recompute]
        self.plain = methods.index(NONE) if NONE in methods else None
        self.full = methods.index(FULL_UNIFORM) if FULL_UNIFORM in methods else None
        self.rows = NO_ROWS
        self.layout: IntArray = np.zeros(0, dtype=np.int64)
        """Of each of `rows`."""
        self.layouts = 0
        self.computed = self.feasible = self.combinations = 0
        self.rejections: Counter[str] = Counter()
        self._unsharded: list[Open] = []
        self._unrecomputed: list[Open] = []

    def run(self) -> BestSearch:
        """Gather in `rows` every candidate up to the limit: `slack` times what the `keep`-th best layout takes."""
        keep_heap()
        for chunk in legal_chunks(case=self.problem, axes=self.axes):
            self.rejections.update(chunk.rejections)
            count = chunk.candidates.shape[0]
            self._usual(chunk.candidates, np.arange(self.layouts, self.layouts + count))
            self.layouts += count
        self._shard()
        self._recompute()
        return self

    @property
    def pruned(self) -> int:
        """Legal combinations that bounds ruled out."""
        return self.combinations - self.computed

    def value(self, rows: CostedRows) -> FloatArray:
        """What ranks the rows, in seconds; infinity where they are not acceptable."""
        return rows.expected_s if self.rank_by == "expected" else np.where(rows.acceptable, rows.step_s, np.inf)

    def _usual(self, grid: Candidates, layout: IntArray) -> None:
        """Cost layouts with their usual recomputations and states, and note for which of them others may matter."""
        if not len(grid):
            return
        step_s, unsharded_s, may_fit, _ = self._cost(grid, layout)
        base = grid.at((np.arange(len(layout)), *np.zeros((2, len(layout)), dtype=np.intp)))
        replicated = np.asarray(base.data_parallel_size * base.context_parallel_size > 1, dtype=np.int64)
        groups = self._shard_groups(base).sum(axis=1) * replicated
        number: IntArray = grid.shape[2] + replicated * len(self.stages) + groups * len(self._sharding_stages)
        self.combinations += int((number * (len(self.axes.recompute) + self._further(base))).sum())
        bound_s = unsharded_s.min(axis=(1, 2))
        rows = np.flatnonzero((number > grid.shape[2]) & (bound_s * ROUNDING <= self.limit_s))
        self._unsharded.append(
            Open(
                candidates=base.take(rows), layout=layout[rows], bound_s=bound_s[rows], full_s=step_s[rows, 0, 0],
                full_fits=np.any(may_fit, axis=(1, 2))[rows],
            )
        )  # fmt: skip

    @property
    def _sharding_stages(self) -> tuple[int, ...]:
        return tuple(stage for stage in (*self.axes.zero_stage, *self.stages) if stage > 0)

    def _shard_groups(self, rows: Candidates) -> BoolArray:
        """(n, sizes) where the replicas can shard over groups of this size."""
        columns = {f.name: getattr(rows, f.name)[:, None] for f in fields(Candidates)}
        sizes = np.array(self.shards, dtype=np.int64)[None, :]
        grid = Candidates(**columns | {"data_parallel_shard_size": sizes})
        broken = shards_broken(self.problem.model, grid) if self.shards else False
        legal: BoolArray = (sizes < columns["data_parallel_size"]) & ~np.asarray(broken)
        return legal

    def _further(self, rows: Candidates) -> IntArray:
        """How many recomputations there are of each row besides the usual ones."""
        return len(self.modules) + 2 * np.maximum(self._chunk_layers(rows) - 1, 0) * self.counts

    def _chunk_layers(self, rows: Candidates) -> IntArray:
        """Layers of the fullest model chunk."""
        layers: IntArray = -(
            -self.problem.model.total_layers // (rows.pipeline_parallel_size * rows.virtual_pipeline_parallel_size)
        )
        return layers

    def _shard(self) -> None:
        """Cost the other ZeRO stages of layouts that may matter, then those of their shard groups that may fit."""
        if not self._unsharded:
            return
        every = Open.joined(self._unsharded)
        for block in self._blocks(every):
            fits = block.full_fits
            if self.stages:
                grid = spanned(block.candidates, recompute=self.axes.recompute, stages=self.stages)
                fits = fits | self._cost(grid, block.layout)[2].any(axis=(1, 2))
            row, size = np.nonzero(self._shard_groups(block.candidates) & fits[:, None])
            if len(row) and self._sharding_stages:
                groups = block.candidates.take(row)
                columns = {f.name: getattr(groups, f.name) for f in fields(Candidates)}
                columns["data_parallel_shard_size"] = np.array(self.shards)[size]
                grid = spanned(Candidates(**columns), recompute=self.axes.recompute, stages=self._sharding_stages)
                self._cost(grid, block.layout[row])

    def _recompute(self) -> None:
        """Cost the other recomputations of rows that may matter."""
        if not self._unrecomputed:
            return
        for block in self._blocks(Open.joined(self._unrecomputed)):
            if self.modules:
                self._cost(spanned(block.candidates, recompute=self.modules), block.layout, reopen=False)
            if self.counts:
                most = self._chunk_layers(block.candidates)
                self._layered(block, np.where(block.full_fits, most - 1, 0), method=FULL_BLOCK, first=1)
                again = block.full_s * ROUNDING <= self.limit_s
                self._layered(block, np.where(again, most - 1, 0), method=FULL_UNIFORM, first=2)

    def _layered(self, block: Open, number: IntArray, *, method: int, first: int) -> None:
        """Cost full recomputation with `number` different counts of layers, from `first` on, of each row."""
        row = np.repeat(np.arange(len(number)), number)
        if not len(row):
            return
        counts = first + np.arange(len(row)) - np.repeat(np.cumsum(number) - number, number)
        chosen = block.candidates.take(row)
        columns = {f.name: getattr(chosen, f.name) for f in fields(Candidates)}
        columns |= {"recompute_method": np.full(len(row), method), "recompute_num_layers": counts}
        self._cost(
            Candidates(**{name: column.reshape(-1, 1, 1) for name, column in columns.items()}), block.layout[row], reopen=False
        )

    def _blocks(self, rows: Open) -> Iterator[Open]:
        """The rows in blocks, by rising bound, until none can matter: each block may lower the limit."""
        order = np.argsort(rows.bound_s, kind="stable")
        for start in range(0, len(order), BLOCK):
            block = rows.take(order[start : start + BLOCK])
            near = np.flatnonzero(block.bound_s * ROUNDING <= self.limit_s)
            if not len(near):
                return
            bounds.check()
            yield block.take(near)

    def _cost(
        self, grid: Candidates, layout: IntArray, *, reopen: bool = True
    ) -> tuple[FloatArray, FloatArray, BoolArray, BoolArray]:
        """Cost a grid of layouts, recomputations and states, and keep what may matter.

        Returns, in the grid's shape, steps with and without the parts SHARDED, and whether any recomputation of the same states
        may fit, and this one does. `reopen`: note the rows of which other recomputations may matter.
        """
        shape = grid.shape
        costs = corrected_costs(grid, problem=self.problem, predictor=self.predictor)
        rows, limited = judged(grid, costs, problem=self.problem)
        self.rejections.update(limited)
        self.computed += len(grid)
        self.feasible += int(np.count_nonzero(rows.acceptable))
        self._keep(rows, np.repeat(layout, len(grid) // len(layout)))

        def shaped(column: Any) -> NDArray[Any]:
            return np.broadcast_to(column, shape) if np.ndim(column) != 1 else np.reshape(column, shape)

        step_s, fits = shaped(costs.step_s), shaped(costs.feasible)
        may_fit = np.ones(shape, dtype=np.bool_)
        if self.full is not None and reopen:
            least = shaped(costs.memory_total_bytes)[:, self.full] - shaped(costs.memory_parts["buffers"])[:, self.full]
            may_fit &= (least * ROUNDING <= shaped(costs.capacity_bytes)[:, self.full])[:, None]
        if reopen and self.plain is not None and (self.modules or self.counts):
            plain_s = step_s[:, self.plain]
            row, stage = np.nonzero(may_fit[:, 0] & (plain_s * ROUNDING <= self.limit_s))
            full_s = step_s[row, self.full, stage] if self.full is not None else np.full(len(row), np.inf)
            full_fits = fits[row, self.full, stage] if self.full is not None else np.zeros(len(row), dtype=np.bool_)
            chosen = grid.at((row, np.full(len(row), self.plain), stage))
            self._unrecomputed.append(
                Open(candidates=chosen, layout=layout[row], bound_s=plain_s[row, stage], full_s=full_s, full_fits=full_fits)
            )
        return step_s, step_s - sum(shaped(costs.parts[name]) for name in SHARDED), may_fit, fits

    def _keep(self, rows: CostedRows, layout: IntArray) -> None:
        """Keep the rows up to the limit, and lower it to `slack` times the `keep`-th best layout."""
        value = self.value(rows)
        near = np.flatnonzero(np.isfinite(value) & (value <= self.limit_s))
        if not len(near):
            return
        rows = CostedRows.concatenate([self.rows, rows.take(near)])
        layout = np.concatenate([self.layout, layout[near]])
        order = np.argsort(self.value(rows), kind="stable")
        _, first = np.unique(layout[order], return_index=True)
        if len(first) >= self.keep:
            nth = order[np.sort(first)[self.keep - 1]]
            self.limit_s = min(self.limit_s, self.slack * float(self.value(rows)[nth]))
            order = order[: np.searchsorted(self.value(rows)[order], self.limit_s, side="right")]
        self.rows, self.layout = rows.take(order), layout[order]


@dataclass(frozen=True, slots=True, kw_only=True)
class Best:
    """What may be among a query's best, best first; arrays of shape (n,)."""

    problems: tuple[TrainingProblem, ...]
    """The query's, and the same with strategies that it leaves open."""
    rows: CostedRows
    variant: IntArray
    """Which of `problems` each row belongs to."""
    layout: IntArray
    """Equal for rows that differ in recomputation and sharding alone."""
    value_s: FloatArray
    """What ranks them."""
    computed: int
    pruned: int
    feasible: int
    rejections: dict[str, int]

    def take(self, indices: NDArray[np.intp]) -> Best:
        """The chosen rows, in the given order."""
        chosen = {name: getattr(self, name)[indices] for name in ("variant", "layout", "value_s")}
        return replace(self, rows=self.rows.take(indices), **chosen)


def best_of(
    problem: TrainingProblem, *, keep: int, rank_by: RankBy = "expected", predictor: CalibratedPredictor | None = None
) -> Best:
    """Every candidate that at most `keep` layouts beat, or that is in a group with such a one, best first."""
    problems = (problem, *variants(problem))
    searches: list[BestSearch] = []
    for each in problems:
        limit_s = min((search.limit_s for search in searches), default=np.inf)
        searches.append(BestSearch(each, keep=keep, rank_by=rank_by, predictor=predictor, limit_s=limit_s).run())
    layouts = np.cumsum([0, *(search.layouts for search in searches)])
    rows = [search.rows for search in searches]
    if predictor is not None:
        rows = [_reranked(search, predictor) for search in searches]
    value_s = np.concatenate([search.value(each) for search, each in zip(searches, rows, strict=True)])
    best = Best(
        problems=problems,
        rows=CostedRows.concatenate(rows),
        variant=np.repeat(np.arange(len(rows)), [len(each.candidates) for each in rows]),
        layout=np.concatenate([search.layout + first for search, first in zip(searches, layouts[:-1], strict=True)]),
        value_s=value_s,
        computed=sum(search.computed for search in searches),
        pruned=sum(search.pruned for search in searches),
        feasible=sum(search.feasible for search in searches),
        rejections=dict(sum((search.rejections for search in searches), Counter())),
    )
    order = np.lexsort((best.rows.memory_total_bytes, value_s))
    return best.take(order[np.isfinite(value_s[order])])


def _reranked(search: BestSearch, predictor: CalibratedPredictor) -> CostedRows:
    """The search's rows with residuals, which are too slow for more than RERANKED of them."""
    kept = np.argsort(search.value(search.rows), kind="stable")[:RERANKED]
    search.rows, search.layout = search.rows.take(kept), search.layout[kept]
    if not len(kept):
        return search.rows
    rows, limited = with_residuals(search.rows.candidates, problem=search.problem, predictor=predictor)
    search.rejections.update(limited)
    search.feasible -= int(np.count_nonzero(~rows.acceptable))
    return rows
