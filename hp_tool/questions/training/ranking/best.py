"""Search for the best candidates of a problem over all settings and context exchanges that it
leaves open.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from hp_tool.cost.arrays import FloatArray, IntArray
from hp_tool.cost.flops import step_tokens
from hp_tool.domain.query import RankBy
from hp_tool.questions.training.calibrated import CalibratedPredictor
from hp_tool.questions.training.problem import TrainingProblem
from hp_tool.questions.training.ranking.balanced import balanced_problems
from hp_tool.questions.training.ranking.exact import BestSearch, UnfinishedRows
from hp_tool.questions.training.ranking.free_axes import strategy_variants
from hp_tool.questions.training.ranking.rank import (
    RERANKED,
    CostedRows,
    with_recorded,
    with_residuals,
)
from hp_tool.questions.training.usual_settings import usual_problems


@dataclass(frozen=True, slots=True, kw_only=True)
class Best:
    """The best candidates of a query, best first. Arrays have shape (n,)."""

    problems: tuple[TrainingProblem, ...]
    """Problems with which the rows are costed: the query's problem with each group of usual
    settings, context exchange and balanced pipeline, for each listed value of `training`.
    """
    predictors: tuple[CalibratedPredictor | None, ...]
    """Calibrated predictor for each problem; None without a calibration."""
    rows: CostedRows
    variant: IntArray
    """Index into `problems` for each row."""
    layout: IntArray
    """Layout number of each row. Rows of one layout differ only in recomputation and sharding."""
    value_s: FloatArray
    """Ranking criterion in seconds."""
    computed: int
    """Number of costed candidates."""
    pruned: int
    """Number of legal combinations that were excluded by bounds."""
    feasible: int
    """Number of acceptable candidates."""
    rejections: dict[str, int]
    bases: tuple[int, ...]
    """Indices of the problems with the query's own context exchange and pipeline layout, one for
    each group of usual settings (`training.usual_settings`).
    """
    rank_by: RankBy
    limit_s: float
    """Maximum ranking criterion, in seconds, of rows that may be shown."""

    def with_usual_graphs(self) -> Best:
        """Return the rows, best first. Rows whose steps are limited by kernel launches have the
        usual CUDA graphs.
        """
        if not (self.rows.waits_s > 0.0).any():
            return self
        near = (self.rows.waits_s == 0.0) | (self.rows.least_value(self.rank_by) <= self.limit_s)
        best = self.take(np.flatnonzero(near))
        rows = best.rows
        for number, problem in enumerate(self.problems):
            rows = with_recorded(rows, problem=problem, own=best.variant == number)
        best = replace(best, rows=rows, value_s=rows.value(self.rank_by)).ordered()
        return best if len(best.value_s) else replace(best, feasible=0)

    def take(self, indices: NDArray[np.intp]) -> Best:
        """Return the selected rows, in the given order."""
        chosen = {name: getattr(self, name)[indices] for name in ("variant", "layout", "value_s")}
        return replace(self, rows=self.rows.take(indices), **chosen)

    def ordered(self) -> Best:
        """Return the acceptable rows, best first."""
        order = np.lexsort((self.rows.memory_total_bytes, self.value_s))
        return self.take(order[np.isfinite(self.value_s[order])])

    @staticmethod
    def joined(parts: Sequence[Best]) -> Best:
        """Join the rows of several training workloads, best first.

        Step times are scaled to the tokens per step of the first workload.
        """
        if len(parts) == 1:
            return parts[0]
        tokens = [step_tokens(part.problems[0].workload) for part in parts]
        scales = np.repeat(tokens[0] / np.array(tokens), [len(part.layout) for part in parts])
        rows = CostedRows.concatenate([part.rows for part in parts])
        variants = np.cumsum([0, *(len(part.problems) for part in parts)])
        layouts = np.cumsum([0, *(part.layout.max(initial=-1) + 1 for part in parts)])
        return Best(
            problems=tuple(problem for part in parts for problem in part.problems),
            predictors=tuple(predictor for part in parts for predictor in part.predictors),
            rows=replace(rows, step_s=rows.step_s * scales, expected_s=rows.expected_s * scales),
            variant=np.concatenate(
                [part.variant + first for part, first in zip(parts, variants, strict=False)]
            ),
            layout=np.concatenate(
                [part.layout + first for part, first in zip(parts, layouts, strict=False)]
            ),
            value_s=np.concatenate([part.value_s for part in parts]) * scales,
            computed=sum(part.computed for part in parts),
            pruned=sum(part.pruned for part in parts),
            feasible=sum(part.feasible for part in parts),
            rejections=dict(sum((Counter(part.rejections) for part in parts), Counter())),
            bases=parts[0].bases,
            rank_by=parts[0].rank_by,
            limit_s=max(part.limit_s for part in parts),
        ).ordered()


def search_best(
    problem: TrainingProblem,
    *,
    keep: int,
    rank_by: RankBy = "expected",
    predictor: CalibratedPredictor | None = None,
) -> Best:
    """Return all candidates that fewer than `keep` layouts beat or that are nearly as fast as the
    fastest, best first.

    The result may contain other candidates too.
    """
    best = search_without_graphs(problem, keep=keep, rank_by=rank_by, predictor=predictor)
    return best.with_usual_graphs()


def search_without_graphs(
    problem: TrainingProblem,
    *,
    keep: int,
    rank_by: RankBy,
    predictor: CalibratedPredictor | None,
) -> Best:
    """Return the result of `search_best` before `Best.with_usual_graphs` is applied."""
    problems: list[TrainingProblem] = []
    searches: list[BestSearch] = []
    bases: list[int] = []

    def search_on(variant: TrainingProblem, layouts: UnfinishedRows | None) -> BestSearch:
        reach_s = searches[-1].reach_s if searches else np.inf
        search = BestSearch(
            variant, keep=keep, rank_by=rank_by, predictor=predictor, reach_s=reach_s
        )
        problems.append(variant)
        searches.append(search.run() if layouts is None else search.run_on(layouts))
        return search

    for base in usual_problems(problem) if predictor is None else (problem,):
        bases.append(len(searches))
        first = search_on(base, None)
        for variant in strategy_variants(base) if first.exchanged else ():
            search_on(variant, UnfinishedRows.joined(first.exchanged))
        for variant, layouts in balanced_problems(first):
            if layouts.bound_s[0] <= searches[-1].reach_s:
                search_on(variant, layouts)
    rows = [search.rows for search in searches]
    if predictor is not None:
        rows = [_rerank(search, predictor) for search in searches]
    return Best(
        problems=tuple(problems),
        predictors=(predictor,) * len(problems),
        rows=CostedRows.concatenate(rows),
        variant=np.repeat(np.arange(len(rows)), [len(row.candidates) for row in rows]),
        layout=np.concatenate([search.layout for search in searches]),
        value_s=np.concatenate(
            [search.value(each) for search, each in zip(searches, rows, strict=True)]
        ),
        computed=sum(search.computed for search in searches),
        pruned=sum(search.pruned for search in searches),
        feasible=sum(search.feasible for search in searches),
        rejections=dict(
            sum((search.rejections for search in searches), searches[bases[-1]].illegal)
        ),
        bases=tuple(bases),
        rank_by=rank_by,
        limit_s=min(search.limit_s for search in searches),
    ).ordered()


def _rerank(search: BestSearch, predictor: CalibratedPredictor) -> CostedRows:
    """Return the RERANKED best rows of the search, costed with the calibration's residuals."""
    kept = np.argsort(search.value(search.rows), kind="stable")[:RERANKED]
    search.rows, search.layout = search.rows.take(kept), search.layout[kept]
    if not len(kept):
        return search.rows
    rows, limited = with_residuals(
        search.rows.candidates, problem=search.problem, predictor=predictor
    )
    search.rejections.update(limited)
    search.feasible -= int(np.count_nonzero(~rows.acceptable))
    return rows
