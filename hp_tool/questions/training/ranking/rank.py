"""Enumerate, cost and rank the layouts of a training query in chunks."""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from hp_tool.cost.arrays import BoolArray, FloatArray
from hp_tool.cost.breakdown import (
    estimate_row,
    host_waits_s,
    launch_bound,
    may_be_launch_bound,
)
from hp_tool.cost.candidates import Candidates
from hp_tool.cost.legality import MEMORY, legality
from hp_tool.cost.strategy_legality import GRAPHS, has_invalid_graphs
from hp_tool.cost.training import TrainingCosts
from hp_tool.cost.uncertainty import out_of_memory_probability
from hp_tool.domain.query import RankBy
from hp_tool.domain.result import Recommendation
from hp_tool.domain.units import MIB
from hp_tool.questions.training.calibrated import CRASHED, CalibratedPredictor
from hp_tool.questions.training.problem import TrainingProblem
from hp_tool.questions.training.usual_settings import (
    assume_usual,
    assumes_graphs,
    recorded_problem,
)
from hp_tool.space import default_axes, legal_chunks

Row = TypeVar("Row")
_HEAP_BYTES = 16 * MIB
RERANKED = 4096
"""Number of candidates, best by a calibration's factors, that are ranked again by its residuals.
Residuals are too slow for millions of candidates.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class CostedRows:
    """Legal candidates with their ranking criteria. Arrays have shape (n,)."""

    candidates: Candidates
    step_s: FloatArray
    memory_total_bytes: FloatArray
    acceptable: BoolArray
    """Fits in memory and satisfies all constraints."""
    expected_s: FloatArray
    """step_s divided by the probability that the run does not run out of memory; infinity for
    candidates that are not acceptable.
    """
    own: BoolArray
    """Whether the row has the usual settings of the problem with which it is costed. True if the
    problem has none.
    """
    waits_s: FloatArray
    """Maximum seconds that the usual CUDA graphs can save; 0 if they do not apply or the row
    already has them.
    """
    recorded: BoolArray
    """Whether the row has the usual CUDA graphs (`usual_settings.recorded_problem`)."""

    def take(self, rows: NDArray[np.intp]) -> CostedRows:
        """Return the selected rows, in the given order."""
        return CostedRows(**{name: column.take(rows) for name, column in self.columns().items()})

    def columns(self) -> dict[str, Any]:
        """Return the columns of the rows, by name."""
        return {f.name: getattr(self, f.name) for f in fields(CostedRows)}

    def value(self, rank_by: RankBy) -> FloatArray:
        """Return (n,) the ranking criterion in seconds; infinity for candidates that are not
        acceptable.
        """
        return (
            self.expected_s
            if rank_by == "expected"
            else np.where(self.acceptable, self.step_s, np.inf)
        )

    def least_value(self, rank_by: RankBy) -> FloatArray:
        """Return (n,) a lower bound of the ranking criterion with the usual CUDA graphs."""
        value = self.value(rank_by)
        return value * (1.0 - self.waits_s / self.step_s) if self.waits_s.any() else value

    def best(self, count: int) -> NDArray[np.intp]:
        """Return the indices of the `count` fastest acceptable candidates, fastest first.

        Ties are broken by memory, then by row number.
        """
        rows = np.flatnonzero(self.acceptable)
        if len(rows) > count:
            rows = rows[self.step_s[rows] <= np.partition(self.step_s[rows], count - 1)[count - 1]]
        return rows[np.lexsort((self.memory_total_bytes[rows], self.step_s[rows]))][:count]

    @staticmethod
    def concatenate(parts: Sequence[CostedRows]) -> CostedRows:
        """Concatenate the rows of all parts, in order. There must be at least one part."""
        return CostedRows(
            candidates=Candidates.concatenate([part.candidates for part in parts]),
            **{
                f.name: np.concatenate([getattr(part, f.name) for part in parts])
                for f in fields(CostedRows)[1:]
            },
        )


_EMPTY = np.zeros(0)
NO_ROWS = CostedRows(
    candidates=Candidates.from_columns({f.name: () for f in fields(Candidates)}),
    step_s=_EMPTY,
    memory_total_bytes=_EMPTY,
    acceptable=_EMPTY > 0.0,
    expected_s=_EMPTY,
    own=_EMPTY > 0.0,
    waits_s=_EMPTY,
    recorded=_EMPTY > 0.0,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class CostedSpace(CostedRows):
    """All legal candidates of a space, or only the best acceptable ones, with counts for the whole
    space.
    """

    legal: int
    """Number of candidates whose memory and time were fully computed."""
    feasible: int
    """Number of acceptable candidates."""
    rejections: dict[str, int]
    """Number of combinations rejected by each rule, and of legal candidates rejected by each
    limit.
    """


def cost_space(
    *,
    problem: TrainingProblem,
    keep: int | None = None,
    predictor: CalibratedPredictor | None = None,
) -> CostedSpace:
    """Enumerate the legal candidates and cost them in chunks.

    Args:
        keep: Number of best candidates to return; None returns all.
        predictor: Calibration of the costs. The RERANKED best candidates by its factors are
            ranked again by its residuals.
    """
    rejections: Counter[str] = Counter()
    kept: list[CostedRows] = []
    legal = feasible = 0
    max_rows = None if keep is None else keep if predictor is None else max(keep, RERANKED)
    for rows, turned_away in costed_chunks(problem=problem, predictor=predictor):
        rejections.update(turned_away)
        legal += len(rows.candidates)
        feasible += int(np.count_nonzero(rows.acceptable))
        kept.append(rows)
        if max_rows is not None:
            kept = [_merge_best(kept, max_rows)]
    rows = CostedRows.concatenate(kept)
    if keep is not None and predictor is not None and len(rows.candidates):
        rows, limited = with_residuals(rows.candidates, problem=problem, predictor=predictor)
        rejections.update(limited)
        feasible -= int(np.count_nonzero(~rows.acceptable))
        rows = rows.take(rows.best(keep))
    return CostedSpace(
        **rows.columns(), legal=legal, feasible=feasible, rejections=dict(rejections)
    )


def costed_chunks(
    *, problem: TrainingProblem, predictor: CalibratedPredictor | None = None
) -> Iterator[tuple[CostedRows, Counter[str]]]:
    """Yield the space in chunks: legal candidates with their costs, and the number of combinations
    rejected by each rule or limit.

    Only the factors of `predictor` are applied, not its residuals.
    """
    keep_heap()
    axes = default_axes(query=problem.parallel, case=problem)
    for chunk in legal_chunks(case=problem, axes=axes):
        costs = corrected_costs(chunk.candidates, problem=problem, predictor=predictor)
        rows, limited = with_criteria(chunk.candidates, costs, problem=problem, predictor=predictor)
        rows = with_recorded(rows, problem=problem)
        if not rows.own.all():
            rows = rows.take(np.flatnonzero(rows.own))
        yield rows, chunk.rejections + Counter(limited)


def corrected_costs(
    candidates: Candidates, *, problem: TrainingProblem, predictor: CalibratedPredictor | None
) -> TrainingCosts:
    """Return the costs of rows or of a grid. If there is a `predictor`, its factors are applied."""
    costs = problem.costs(candidates)
    if predictor is None:
        return costs
    rows = costs.rows(candidates.shape)
    return predictor.costs(rows, candidates=candidates.take(slice(None)), problem=problem)


def with_residuals(
    candidates: Candidates, *, problem: TrainingProblem, predictor: CalibratedPredictor
) -> tuple[CostedRows, dict[str, int]]:
    """Return candidates costed with a calibration including its residuals, and the number of
    candidates rejected by each limit.
    """
    costs, fails = predictor.costs_and_risks(
        problem.costs(candidates), candidates=candidates, problem=problem
    )
    return with_criteria(candidates, costs, problem=problem, predictor=predictor, fails=fails)


def with_criteria(
    candidates: Candidates,
    costs: TrainingCosts,
    *,
    problem: TrainingProblem,
    predictor: CalibratedPredictor | None = None,
    fails: FloatArray | None = None,
) -> tuple[CostedRows, dict[str, int]]:
    """Return legal candidates with their ranking criteria, and the number of candidates rejected by
    each limit.

    Candidates that crashed, according to `predictor`, are not acceptable. `fails` is (n,) the
    probability of running out of memory; if None, it is computed by the cost model. Rows without
    the problem's usual settings are not acceptable and do not count.
    """
    shape = candidates.shape
    own = np.ones(len(candidates), dtype=np.bool_)
    if problem.usual is not None:
        own = problem.usual.belong(candidates, problem=problem)
    step_s, total_bytes = (
        _flatten_column(costs.step_s, shape),
        _flatten_column(costs.memory_total_bytes, shape),
    )
    fits = _flatten_column(costs.feasible, shape)
    waits_s = _usual_waits_s(costs, step_s, problem=problem, shape=shape)
    in_time = step_s - waits_s <= problem.longest_step_s
    crashed = np.zeros(len(candidates), dtype=np.bool_)
    if predictor is not None:
        crashed = predictor.crashes(candidates, problem=problem) > 0
    # Legality is checked before recomputation is known, but captured graphs may exclude
    # recomputations.
    excluded = np.zeros(len(candidates), dtype=np.bool_)
    if problem.workload.cuda_graphs:
        broken = np.asarray(has_invalid_graphs(problem, candidates), dtype=np.bool_)
        excluded = excluded | (_flatten_column(broken, shape) if broken.ndim else broken)
    acceptable = own & fits & in_time & ~crashed & ~excluded
    expected_s = np.full(len(candidates), np.inf)
    if len(good := np.flatnonzero(acceptable)):
        if fails is None:
            device_bytes = _flatten_column(np.asarray(costs.device_bytes, dtype=np.float64), shape)[
                good
            ]
            risk = out_of_memory_probability(
                case=problem,
                candidates=candidates.take(good),
                total_bytes=total_bytes[good],
                device_bytes=device_bytes,
            )
        else:
            risk = fails[good]
        with np.errstate(divide="ignore"):  # infinite if it certainly runs out of memory
            expected_s[good] = step_s[good] / (1.0 - risk)
    counts = {
        MEMORY: int(np.count_nonzero(own & ~fits)),
        "target_missed": int(np.count_nonzero(own & ~in_time)),
    }
    counts[CRASHED] = int(np.count_nonzero(crashed))
    counts[GRAPHS] = int(np.count_nonzero(own & excluded))
    rows = CostedRows(
        candidates=candidates,
        step_s=step_s,
        memory_total_bytes=total_bytes,
        acceptable=acceptable,
        expected_s=expected_s,
        own=own,
        waits_s=waits_s,
        recorded=np.zeros(len(candidates), dtype=np.bool_),
    )
    return rows, {name: count for name, count in counts.items() if count}


def _usual_waits_s(
    costs: TrainingCosts, step_s: FloatArray, *, problem: TrainingProblem, shape: tuple[int, ...]
) -> FloatArray:
    """Return (n,) `CostedRows.waits_s` for costs without CUDA graphs."""
    if not assumes_graphs(problem):
        return np.zeros(len(step_s))
    waits_s = _flatten_column(np.asarray(host_waits_s(costs, case=problem)), shape)
    return np.where(may_be_launch_bound(waits_s, step_s=step_s), waits_s, 0.0)


def with_recorded(
    rows: CostedRows, *, problem: TrainingProblem, own: BoolArray | bool = True
) -> CostedRows:
    """Return the rows, with the usual CUDA graphs where kernel launches limit the step.

    Only rows with `own` belong to the problem. Other rows are unchanged.
    """
    places = np.flatnonzero((rows.waits_s > 0.0) & own)
    if not len(places):
        return rows
    columns = {f.name: getattr(rows, f.name).copy() for f in fields(CostedRows)[1:]}
    late = places[rows.step_s[places] > problem.longest_step_s]  # unless graphs shorten them
    columns["acceptable"][late], columns["expected_s"][late] = False, np.inf
    columns["waits_s"][places] = 0.0
    places = places[launch_bound(rows.candidates.take(places), case=problem)]
    recorded = recorded_problem(problem) if len(places) else None
    if recorded is not None:
        chosen = rows.candidates.take(places)
        supported = legality(case=recorded, candidates=chosen) == 0
        places, chosen = places[supported], chosen.take(supported)
        changed, _ = with_criteria(chosen, recorded.costs(chosen), problem=recorded)
        changed = replace(changed, recorded=np.ones(len(chosen), dtype=np.bool_))
        for name, column in columns.items():
            column[places] = getattr(changed, name)
    return CostedRows(candidates=rows.candidates, **columns)


def _flatten_column(column: NDArray[Any], shape: tuple[int, ...]) -> NDArray[Any]:
    """Return a column of a grid of this shape as a vector with one value per row."""
    return column if column.ndim == 1 else np.broadcast_to(column, shape).ravel()


def _merge_best(parts: list[CostedRows], count: int) -> CostedRows:
    """Return the `count` best rows of the parts, which are the best rows so far and a new chunk.

    Most chunks contain no row that is fast enough, and they are not sorted.
    """
    *before, new = parts
    if before and len(ranked := before[0].step_s) == count:
        rows = np.flatnonzero(new.acceptable & (new.step_s <= ranked[-1]))
        if len(rows) == 0:
            return before[0]
        new = new.take(rows)
    joined = CostedRows.concatenate([*before, new.take(new.best(count))])
    return joined.take(joined.best(count))


def recommendations_of_rows(
    ranked: CostedRows, *, problem: TrainingProblem, predictor: CalibratedPredictor | None = None
) -> tuple[Recommendation, ...]:
    """Return a recommendation for each row of a problem, with ranks in the order of the rows.

    Either all rows or none must have the usual CUDA graphs (`CostedRows.recorded`).
    """
    if len(chosen := ranked.candidates) == 0:
        return ()
    if ranked.recorded[0] and (recorded := recorded_problem(problem)) is not None:
        problem = recorded
    costs = problem.scheduled(problem.costs(chosen), chosen)
    configs = [problem.with_common_settings(chosen.config(index)) for index in range(len(chosen))]
    estimates = [
        estimate_row(index, costs=costs, candidates=chosen, case=problem, config=config)
        for index, config in enumerate(configs)
    ]
    estimates = assume_usual(estimates, candidates=chosen, problem=problem)
    rows = []
    for index, (config, estimate) in enumerate(zip(configs, estimates, strict=True)):
        calibrated = None
        if predictor is not None:
            calibrated = predictor.estimate(index, costs=costs, candidates=chosen, problem=problem)
            calibrated = replace(calibrated, parallel=config)
        rows.append(
            Recommendation(
                rank=index + 1,
                parallel=config,
                set=dict(problem.chosen),
                estimate=estimate,
                calibrated_estimate=calibrated,
            )
        )
    return tuple(rows)


def group_numbers(rows: Sequence[Row], *, alike: Callable[[Row, Row], bool]) -> list[int]:
    """Return the group number of each ranked row, from 1. Rows of a group are `alike` its first
    row.
    """
    groups: list[int] = []
    first: Row | None = None
    for row in rows:
        groups.append(
            groups[-1] if first is not None and alike(row, first) else len(set(groups)) + 1
        )
        first = row if first is None or len(groups) == 1 or groups[-1] != groups[-2] else first
    return groups


@functools.cache
def keep_heap() -> None:
    """Make the C library keep freed memory, so that a chunk can reuse the memory of the previous
    one.

    glibc returns large blocks to the system until a block of that size has been freed (mallopt(3)).
    Allocating them again takes longer than the arithmetic.
    """
    np.empty(_HEAP_BYTES, dtype=np.uint8)
