"""The space of a training query, costed chunk by chunk and ranked."""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hp_tool.cost.arrays import BoolArray, FloatArray
from hp_tool.cost.candidates import Candidates
from hp_tool.cost.legality import MEMORY
from hp_tool.cost.training import TrainingCosts
from hp_tool.domain.query import Query
from hp_tool.space import add_counts, default_axes, legal_chunks
from hp_tool.training.calibrated import Correction, corrected_costs
from hp_tool.training.limits import longest_step_s
from hp_tool.training.problem import TrainingProblem
from hp_tool.units import MIB

_HEAP_BYTES = 16 * MIB
RERANKED = 4096
"""Candidates, the best by what a calibration's few factors say, that its residuals are asked about: those are dear by the
million."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CostedRows:
    """Legal candidates with what ranks them; arrays of shape (n,)."""

    candidates: Candidates
    step_s: FloatArray
    memory_total_bytes: FloatArray
    acceptable: BoolArray
    """True where the candidate fits and keeps to the constraints."""

    def take(self, rows: NDArray[np.intp]) -> CostedRows:
        """The chosen rows, in the given order."""
        return CostedRows(**{f.name: getattr(self, f.name).take(rows) for f in fields(CostedRows)})

    def best(self, count: int) -> NDArray[np.intp]:
        """Indices of the `count` fastest acceptable candidates; equal times prefer less memory, then the earlier row."""
        rows = np.flatnonzero(self.acceptable)
        if len(rows) > count:
            rows = rows[self.step_s[rows] <= np.partition(self.step_s[rows], count - 1)[count - 1]]
        return rows[np.lexsort((self.memory_total_bytes[rows], self.step_s[rows]))][:count]

    @staticmethod
    def concatenate(parts: Sequence[CostedRows]) -> CostedRows:
        """The rows of all parts, in order; of at least one part."""
        columns: dict[str, Any] = {
            f.name: np.concatenate([getattr(part, f.name) for part in parts]) for f in fields(CostedRows)[1:]
        }
        return CostedRows(candidates=Candidates.concatenate([part.candidates for part in parts]), **columns)


@dataclass(frozen=True, slots=True, kw_only=True)
class CostedSpace(CostedRows):
    """Every legal candidate, or where only some were asked for the best acceptable ones, best first; and what became of
    all combinations of the axes.
    """

    legal: int
    """Candidates of which all memory and time parts were computed."""
    feasible: int
    """How many of them are acceptable."""
    rejections: dict[str, int]
    """How many combinations each rule turned away, and how many legal ones each limit."""


def cost_space(
    *, query: Query, problem: TrainingProblem, keep: int | None = None, correction: Correction | None = None
) -> CostedSpace:
    """Enumerate the legal candidates and cost them chunk by chunk. With `keep`, only that many of the best are kept on the
    way, the same as ranking all of them would give, and memory stays bounded however large the space is. With a
    `correction`, costs are those that it makes of them: its factors decide which RERANKED are the best, its residuals their
    order.
    """
    rejections: dict[str, int] = {}
    kept: list[CostedRows] = []
    legal = feasible = 0
    reach = None if keep is None else keep if correction is None else max(keep, RERANKED)
    for rows, turned_away in costed_chunks(query=query, problem=problem, correction=correction):
        add_counts(rejections, turned_away)
        legal += len(rows.candidates)
        feasible += int(np.count_nonzero(rows.acceptable))
        kept.append(rows)
        if reach is not None:
            kept = [_best_of(kept, reach)]
    rows = CostedRows.concatenate(kept)
    if keep is not None and correction is not None and len(rows.candidates):
        rows, turned_away = with_residuals(rows.candidates, problem=problem, correction=correction)
        add_counts(rejections, turned_away)
        feasible -= int(np.count_nonzero(~rows.acceptable))
        rows = rows.take(rows.best(keep))
    columns: dict[str, Any] = {f.name: getattr(rows, f.name) for f in fields(CostedRows)}
    return CostedSpace(**columns, legal=legal, feasible=feasible, rejections=rejections)


def costed_chunks(
    *, query: Query, problem: TrainingProblem, correction: Correction | None = None
) -> Iterator[tuple[CostedRows, dict[str, int]]]:
    """The space chunk by chunk: legal candidates with their costs, and what was turned away on the way to them. Of a
    `correction` only the factors are used.
    """
    keep_heap()
    axes = default_axes(query=query.parallel, case=problem)
    for chunk in legal_chunks(case=problem, axes=axes):
        costs: TrainingCosts = problem.costs(chunk.candidates)
        if correction is not None:
            every = chunk.candidates.take(slice(None))
            costs = corrected_costs(
                costs.rows(chunk.candidates.shape), candidates=every, problem=problem, calibration=correction.calibration
            )
        rows, limited = _judged(chunk.candidates, costs, problem=problem)
        turned_away = dict(chunk.rejections)
        add_counts(turned_away, limited)
        yield rows, turned_away


def with_residuals(
    candidates: Candidates, *, problem: TrainingProblem, correction: Correction
) -> tuple[CostedRows, dict[str, int]]:
    """Candidates costed by all that a calibration knows, and how many of them each limit turns away."""
    costs = corrected_costs(
        problem.costs(candidates), candidates=candidates, problem=problem, calibration=correction.calibration, residuals=True
    )
    return _judged(candidates, costs, problem=problem)


def _judged(candidates: Candidates, costs: TrainingCosts, *, problem: TrainingProblem) -> tuple[CostedRows, dict[str, int]]:
    """Legal candidates with what ranks them, and how many of them each limit turns away."""
    shape = candidates.shape
    step_s = _each(costs.step_s, shape)
    fits, in_time = _each(costs.feasible, shape), step_s <= longest_step_s(problem)
    counts = {MEMORY: int(np.count_nonzero(~fits)), "target_missed": int(np.count_nonzero(~in_time))}
    rows = CostedRows(
        candidates=candidates,
        step_s=step_s,
        memory_total_bytes=_each(costs.memory_total_bytes, shape),
        acceptable=fits & in_time,
    )
    return rows, {name: count for name, count in counts.items() if count}


def _each(column: NDArray[Any], shape: tuple[int, ...]) -> NDArray[Any]:
    """A value for each row of a grid of this shape; of rows as they are."""
    return column if column.ndim == 1 else np.broadcast_to(column, shape).ravel()


def _best_of(parts: list[CostedRows], count: int) -> CostedRows:
    """The best of some ranked before and of a new chunk; most chunks have none that is fast enough."""
    *before, new = parts
    if before and len(ranked := before[0].step_s) == count:
        rows = np.flatnonzero(new.acceptable & (new.step_s <= ranked[-1]))
        if len(rows) == 0:
            return before[0]
        new = new.take(rows)
    both = CostedRows.concatenate([*before, new.take(new.best(count))])
    return both.take(both.best(count))


@functools.cache
def keep_heap() -> None:
    """Let the C library keep the memory of one chunk for the next: glibc returns large blocks to the system when freed,
    and fetching them again costs more than the arithmetic, until one block of this size has been freed (mallopt(3)).
    """
    np.empty(_HEAP_BYTES, dtype=np.uint8)
