"""Legal neighbours of a configuration, costed as one batch and ranked."""

from __future__ import annotations

import math
from dataclasses import dataclass, fields, replace

import numpy as np
from numpy.typing import NDArray

from hp_tool.cost.arrays import BoolArray, FloatArray, IntArray
from hp_tool.cost.candidates import FULL_BLOCK, Candidates
from hp_tool.cost.legality import legality
from hp_tool.cost.training import TrainingCosts
from hp_tool.domain.parallel import ParallelConfig, ParallelQuery, PipelineSchedule
from hp_tool.problem import TrainingProblem
from hp_tool.space import default_axes, scheduled_chunks
from hp_tool.space.neighbours import SIZES, neighbours
from hp_tool.targets import longest_step_s


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
    axes = default_axes(query=ParallelQuery(pipeline_layout=problem.parallel.pipeline_layout), **problem.nouns)
    chunks = (asked.virtual_pipeline_parallel_size, *axes.virtual_pipeline_parallel_size)
    every = neighbours(
        asked=Candidates.alone(asked),
        axes=replace(axes, virtual_pipeline_parallel_size=scheduled_chunks(chunks, schedule=schedule)),
        num_gpus=problem.cluster.num_gpus,
        changes=changes,
    )
    legal = every.take(legality(**problem.nouns, candidates=every, strategy=problem.strategy) == 0)
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
