"""Fixes for an infeasible configuration: changes of a few axes that make it feasible, fastest
first.
"""

import itertools
import math
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hp_tool.cost.arrays import BoolArray, FloatArray, IntArray
from hp_tool.cost.breakdown import estimate_row
from hp_tool.cost.candidates import FULL_BLOCK, RECOMPUTE_COLUMNS, Candidates
from hp_tool.cost.legality import legality
from hp_tool.cost.optimizer import gradient_precision, stored_precision
from hp_tool.cost.training import TrainingCosts
from hp_tool.cost.uncertainty import out_of_memory_probability
from hp_tool.domain.fit import SAFE_PROBABILITY
from hp_tool.domain.frameworks import DEGREES, framework_facts
from hp_tool.domain.parallel import ParallelConfig, ParallelQuery, PipelineSchedule
from hp_tool.domain.query import Query
from hp_tool.domain.result import Estimate, Fix
from hp_tool.domain.workload import TrainingWorkload
from hp_tool.errors import InputError
from hp_tool.questions.training.problem import TrainingProblem, resolve_training
from hp_tool.space import Axes, default_axes, is_default_layout, scheduled_chunks
from hp_tool.wording.words import change_in_words, changed_fields

MAX_FIXES = 5
MAX_CHANGES = 3
"""Maximum number of axes changed at once. Another axis is changed only if fewer changes give too
few fixes. Three axes are changed only if no other change fits in memory.
"""
MAX_STEP_RATIO = 0.9
"""Maximum step time of a fix with two changes, relative to one with a single change, for both to be
listed.
"""
GROWTH = (2, 4, 8)
"""Multiples of the number of devices to try. The smallest one that fixes the configuration is
listed.
"""
MAX_VALUES = 12
"""Maximum number of values tried per axis: those nearest to the configuration's value."""
NUM_BISECTIONS = 8
"""Number of parts into which each iteration divides the range of recomputed layers."""
SIZES = (*DEGREES, "micro_batch_size")

Move = dict[str, IntArray]
"""Values of one axis as columns of Candidates. Recomputation has three columns."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Neighbours:
    """Legal configurations that differ from `base` in a given number of axes, with their costs.
    Arrays have shape (n,).
    """

    problem: TrainingProblem
    base: ParallelConfig
    candidates: Candidates
    costs: TrainingCosts

    @property
    def acceptable(self) -> BoolArray:
        """Return whether each configuration fits and satisfies max_days and max_cost."""
        return self.costs.feasible & (self.costs.step_s <= self.problem.longest_step_s)

    def best(self, *, nearest: bool = False, limit_s: float = math.inf) -> NDArray[np.intp]:
        """Return the indices of acceptable rows with a step time below `limit_s`, fastest first.
        Ties are broken by memory.

        Of rows that change the same axes in the same directions, only the fastest is returned or,
        with `nearest`, the one with the smallest changes.
        """
        rows = np.flatnonzero(self.acceptable & (self.costs.step_s < limit_s))
        directions, distance = _move_codes(self.candidates, self.base)
        fastest = (self.costs.memory_total_bytes, self.costs.step_s)
        order = rows[np.lexsort([key[rows] for key in (*fastest, distance)[: 3 if nearest else 2]])]
        first = order[np.unique(directions[order], return_index=True)[1]]
        ranked: NDArray[np.intp] = first[np.lexsort([key[first] for key in fastest])]
        return ranked


def fixes(*, query: Query, problem: TrainingProblem, infeasible: Estimate) -> tuple[Fix, ...]:
    """Return up to MAX_FIXES of the smallest changes that make the infeasible configuration
    feasible.

    Layout changes come first, fastest first. Of changes to the same axes in the same directions,
    only the fastest is listed, or the smallest if the configuration is illegal. Then follow changes
    with the same layout: narrower gradients or frozen weights, and offload. A fix on more devices
    comes last. If neither a layout change nor the smallest precision change suffices, both are
    combined. If no change satisfies max_days or max_cost, the fastest change that fits is listed
    with the limits that it still misses.
    """
    on_more_devices = _fix_on_more_devices(query, infeasible, num_gpus=problem.cluster.num_gpus)
    with_narrower_states = _with_narrower_states(query, problem, infeasible)
    with_same_layout = [*with_narrower_states, *_with_offload(query, problem, infeasible)]
    max_layout_changes = MAX_FIXES - len(on_more_devices) - len(with_same_layout)
    layout_changes = _fixes_on_same_devices(query, problem, infeasible, room=max_layout_changes)
    if not any(not fix.remaining for fix in layout_changes):
        with_same_layout = [
            *_with_narrower_states_and_layout(query, problem, infeasible),
            *with_same_layout,
        ]
    return (*layout_changes, *with_same_layout, *on_more_devices)


def _with_narrower_states(
    query: Query, problem: TrainingProblem, infeasible: Estimate
) -> list[Fix]:
    """Return the smallest precision change with which the layout fits.

    The options are gradients in bf16, and LoRA base weights in 16, 8 or 4 bits, if the framework
    supports them.
    """
    for key, before, value in _narrower_states(problem.workload):
        if fix := _fix_with_same_layout(
            query, infeasible, {key: value}, num_gpus=problem.cluster.num_gpus
        ):
            return [replace(fix, change=f"{key} {before} -> {value}")]
    return []


def _with_narrower_states_and_layout(
    query: Query, problem: TrainingProblem, infeasible: Estimate
) -> list[Fix]:
    """Return the smallest precision change combined with the fastest single-axis change with which
    the configuration fits, if possible with a low risk of running out of memory.

    Empty if the precision change alone suffices.
    """
    for key, before, value in _narrower_states(problem.workload)[:1]:
        num_gpus = problem.cluster.num_gpus
        if _fix_with_same_layout(query, infeasible, {key: value}, num_gpus=num_gpus):
            return []
        narrow_query, changed = _with_training(query, {key: value})
        neighbours = legal_neighbours(narrow_query, changed, infeasible, changes=1)
        if neighbours is None or not neighbours.acceptable.any():
            return []
        rows = np.flatnonzero(neighbours.acceptable)
        fails = out_of_memory_probability(
            case=changed,
            candidates=neighbours.candidates.take(rows),
            total_bytes=neighbours.costs.memory_total_bytes[rows],
            device_bytes=np.broadcast_to(neighbours.costs.device_bytes, len(neighbours.candidates))[
                rows
            ],
        )
        row = rows[
            np.lexsort((neighbours.costs.step_s[rows], np.asarray(fails > SAFE_PROBABILITY)))[0]
        ]
        fix = _fix_of_row(neighbours, int(row), infeasible, num_gpus=num_gpus)
        return [replace(fix, change=f"{key} {before} -> {value}, {fix.change}")]
    return []


def _with_offload(query: Query, problem: TrainingProblem, infeasible: Estimate) -> list[Fix]:
    """Return the faster kind of offload (optimizer states or activations) with which the same
    layout fits.

    Empty if neither fits, or if the query or its recipe sets offload.
    """
    assert query.training is not None
    if query.training.offload is not None or problem.workload.offload not in (None, "none"):
        return []
    offloads = []
    for offload in ("optimizer", "activations"):
        values = {"offload": offload}
        try:
            fix = _fix_with_same_layout(
                query, infeasible, values, num_gpus=problem.cluster.num_gpus
            )
        except InputError:  # The framework or the device does not support it.
            continue
        if fix is not None:
            offloads.append(replace(fix, change=f"offload none -> {offload}"))
    return sorted(offloads, key=lambda fix: fix.step_s)[:1]


def _fix_with_same_layout(
    query: Query, infeasible: Estimate, values: Mapping[str, Any], *, num_gpus: int
) -> Fix | None:
    """Return the fix with the same layout and these values of `training`; None if it is not
    acceptable.

    Raises:
        InputError: The values are not supported.
    """
    config = infeasible.parallel
    assert config is not None
    if infeasible.memory is None:
        return None
    _, changed = _with_training(query, values)
    candidates = Candidates.from_configs([config])
    if legality(case=changed, candidates=candidates)[0]:
        return None
    neighbours = Neighbours(
        problem=changed, base=config, candidates=candidates, costs=changed.costs(candidates)
    )
    return (
        _fix_of_row(neighbours, 0, infeasible, num_gpus=num_gpus)
        if neighbours.acceptable[0]
        else None
    )


def _with_training(query: Query, values: Mapping[str, Any]) -> tuple[Query, TrainingProblem]:
    """Return the query with these values of `training`, and its problem."""
    assert query.training is not None
    query = replace(query, training=replace(query.training, **values))
    chosen = {f"training.{name}": value for name, value in values.items()}
    return query, resolve_training(query).choosing(chosen)


def _narrower_states(workload: TrainingWorkload) -> list[tuple[str, str, str]]:
    """Return precision changes, smallest first: (key of `training`, current value, narrower
    value).
    """
    framework = framework_facts(workload.framework)
    if framework.is_plain:
        return []
    if workload.lora is not None:
        base = workload.frozen_precision or stored_precision(workload)
        loaded = (
            [("parameter_precision", base, "bf16")]
            if base == "fp32" and workload.precision != "fp32"
            else []
        )
        narrower = {"nf4": (), "fp8": ("nf4",)}.get(base, ("fp8", "nf4"))
        widths = [width for width in framework.frozen_precisions if width in narrower]
        return loaded + [("frozen_precision", base, width) for width in widths]
    gradients = gradient_precision(workload)
    return [("gradient_precision", gradients, "bf16")] if gradients == "fp32" else []


def _fixes_on_same_devices(
    query: Query, problem: TrainingProblem, infeasible: Estimate, *, room: int
) -> list[Fix]:
    illegal, num_gpus = infeasible.memory is None, problem.cluster.num_gpus
    fixes: list[Fix] = []
    fitting: list[Fix] = []
    for changes in range(0 if illegal else 1, MAX_CHANGES + 1):
        has_enough = len(fixes) == room or (fixes and illegal)
        if has_enough or (changes == MAX_CHANGES and fitting):
            break
        neighbours = legal_neighbours(query, problem, infeasible, changes=changes)
        if neighbours is None:
            continue
        limit_s = min((MAX_STEP_RATIO * fix.step_s for fix in fixes), default=math.inf)
        rows = neighbours.best(nearest=illegal, limit_s=limit_s)[: room - len(fixes)]
        fixes += [_fix_of_row(neighbours, int(row), infeasible, num_gpus=num_gpus) for row in rows]
        if len(
            fits := np.flatnonzero(neighbours.costs.feasible)
        ):  # Ignoring max_days and max_cost.
            fitting.append(
                _fix_of_row(
                    neighbours,
                    int(fits[np.argmin(neighbours.costs.step_s[fits])]),
                    infeasible,
                    num_gpus=num_gpus,
                )
            )
    return (
        sorted(fixes, key=lambda fix: fix.step_s) if fixes else _faster_fixes(fitting, infeasible)
    )


def _faster_fixes(fitting: list[Fix], infeasible: Estimate) -> list[Fix]:
    """Return the fastest change that fits in memory but misses a limit.

    Empty if there is none, or if the infeasible configuration fits and is at least as fast.
    """
    best = min(fitting, key=lambda fix: fix.step_s, default=None)
    if best is None:
        return []
    memory, time = infeasible.memory, infeasible.time
    fits = memory is not None and time is not None and memory.total_bytes <= memory.capacity_bytes
    return [] if fits and time is not None and best.step_s >= time.step_s else [best]


def _fix_on_more_devices(query: Query, infeasible: Estimate, *, num_gpus: int) -> list[Fix]:
    """Return the fastest fix on the smallest multiple of the devices that has a fix.

    For an illegal configuration, more devices are tried only if the layout needs more than the
    cluster has.
    """
    config = infeasible.parallel
    assert config is not None
    ranks = (
        config.tensor_parallel_size * config.pipeline_parallel_size * config.context_parallel_size
    )
    if infeasible.memory is None and ranks * config.data_parallel_size <= num_gpus:
        return []
    for factor in GROWTH:
        try:
            larger = factor * num_gpus
            problem = resolve_training(query.with_num_gpus(larger)).choosing(
                {"cluster.num_gpus": larger}
            )
        except InputError:  # Too many devices, or not a whole number of NVLink domains.
            break
        for changes in (0, 1) if infeasible.memory is not None else (0,):
            neighbours = legal_neighbours(query, problem, infeasible, changes=changes)
            if neighbours is not None and len(rows := neighbours.best()):
                neighbours, row = _prefer_within_nodes(
                    neighbours, int(rows[0]), query, infeasible, changes=changes + 1
                )
                return [_fix_of_row(neighbours, row, infeasible, num_gpus=num_gpus)]
    return []


def _prefer_within_nodes(
    near: Neighbours, row: int, query: Query, infeasible: Estimate, *, changes: int
) -> tuple[Neighbours, int]:
    """If tensor parallelism in `row` spans NVLink domains, return a faster configuration in which
    it does not, if there is one; else the row.
    """
    domain, step_s = near.problem.cluster.nvlink_domain_size, float(near.costs.step_s[row])
    size = near.candidates.tensor_parallel_size[row]
    if size <= max(domain, near.base.tensor_parallel_size):
        return near, row
    further = legal_neighbours(query, near.problem, infeasible, changes=changes)
    if further is not None:
        for faster in further.best(limit_s=step_s).tolist():
            if further.candidates.tensor_parallel_size[faster] <= domain:
                return further, faster
    return near, row


def legal_neighbours(
    query: Query, problem: TrainingProblem, infeasible: Estimate, *, changes: int
) -> Neighbours | None:
    """Return the legal configurations that differ from the infeasible one in exactly `changes`
    axes, all with the query's pipeline schedule; None if there are none.
    """
    base, schedules = infeasible.parallel, query.parallel.pipeline_schedule
    assert base is not None
    schedule: PipelineSchedule | None = schedules[0] if isinstance(schedules, tuple) else schedules
    axes = default_axes(
        query=ParallelQuery(pipeline_layout=problem.parallel.pipeline_layout), case=problem
    )
    chunks = (base.virtual_pipeline_parallel_size, *axes.virtual_pipeline_parallel_size)
    candidates_with_changes = layout_neighbours(
        base=Candidates.alone(base),
        axes=replace(
            axes, virtual_pipeline_parallel_size=scheduled_chunks(chunks, schedule=schedule)
        ),
        num_gpus=problem.cluster.num_gpus,
        changes=changes,
    )
    has_default_layout = is_default_layout(
        candidates_with_changes, layers=problem.model.num_hidden_layers
    ) | (
        candidates_with_changes.virtual_pipeline_parallel_size
        == base.virtual_pipeline_parallel_size
    )
    legal = candidates_with_changes.take(
        (legality(case=problem, candidates=candidates_with_changes) == 0) & has_default_layout
    )
    candidates = _with_fewest_layers(problem, legal)
    if len(candidates) == 0:
        return None
    return Neighbours(
        problem=problem, base=base, candidates=candidates, costs=problem.costs(candidates)
    )


def layout_neighbours(*, base: Candidates, axes: Axes, num_gpus: int, changes: int) -> Candidates:
    """Return all configurations that differ from `base` (a single row) in exactly `changes` axes,
    with values from `axes` or another ZeRO stage.

    Derived values are updated: data_parallel_size follows from the number of devices, and sequence
    parallelism is off for t = 1 and turned on if t increases from 1. Legality is not checked. Block
    recomputation has 0 layers, which `_with_fewest_layers` replaces.
    """
    moves = _axis_values(base, axes)
    combined = [
        _combine_moves(base, [moves[name] for name in names])
        for names in itertools.combinations(moves, changes)
    ]
    columns = {
        f.name: np.concatenate([rows[f.name] for rows in combined]) for f in fields(Candidates)
    }
    t, c = columns["tensor_parallel_size"], columns["context_parallel_size"]
    columns["data_parallel_size"] = np.maximum(
        num_gpus // (t * columns["pipeline_parallel_size"] * c), 1
    )
    shards = columns["sequence_parallel"]
    columns["sequence_parallel"] = (t > 1) * (shards if base.tensor_parallel_size > 1 else 1)
    # ZeRO has no effect with a single rank to shard over, nor sequence parallelism without tensor
    # parallelism.
    idle = (columns["zero_stage"] != base.zero_stage) & (columns["data_parallel_size"] * c == 1)
    idle |= (shards != base.sequence_parallel) & (t == 1)
    idle |= (columns["zero_stage"] == 0) & (columns["data_parallel_shard_size"] > 0)
    return Candidates.from_columns(columns).take(~idle)


def _axis_values(base: Candidates, axes: Axes) -> dict[str, Move]:
    moves: dict[str, Move] = {}
    for name in SIZES:
        present = getattr(base, name)
        nearest = sorted(
            (k for k in getattr(axes, name) if k != present),
            key=lambda k: (abs(np.log(k / present)), k),
        )
        moves[name] = {name: np.array(nearest[:MAX_VALUES], dtype=np.int64)}
    if base.tensor_parallel_size > 1:
        moves["sequence_parallel"] = {"sequence_parallel": np.array([1 - base.sequence_parallel])}
    moves["zero_stage"] = {
        "zero_stage": np.array(
            [stage for stage in axes.known_zero_stages if stage != base.zero_stage]
        )
    }
    if base.data_parallel_shard_size:
        moves["data_parallel_shard_size"] = {
            "data_parallel_shard_size": np.zeros(1, dtype=np.int64)
        }
    codes = np.array([*axes.recompute, (FULL_BLOCK, 0, 0)])
    present = [getattr(base, name) for name in RECOMPUTE_COLUMNS]
    moves["recompute"] = dict(
        zip(RECOMPUTE_COLUMNS, codes[np.any(codes != present, axis=1)].T, strict=True)
    )
    return moves


def _combine_moves(base: Candidates, moves: list[Move]) -> Move:
    """Return all combinations of the values of several axes as columns of Candidates."""
    lengths = [len(next(iter(move.values()))) for move in moves]
    picks = (
        np.indices(lengths).reshape(len(moves), -1) if moves else np.zeros((0, 1), dtype=np.intp)
    )
    columns = {
        f.name: np.full(picks.shape[1], getattr(base, f.name), dtype=np.int64)
        for f in fields(Candidates)
    }
    for move, pick in zip(moves, picks, strict=True):
        columns |= {name: values[pick] for name, values in move.items()}
    return columns


def _with_fewest_layers(problem: TrainingProblem, candidates: Candidates) -> Candidates:
    """Return the candidates with block recomputation of the fewest layers with which they fit.

    Each further layer reduces memory and adds time. All rows are searched together. Each iteration
    divides the range of layers into NUM_BISECTIONS parts. Rows that need all layers are dropped,
    because `full` recomputation without a number of layers is a separate value.
    """
    block = (candidates.recompute_method == FULL_BLOCK) & (candidates.recompute_num_layers == 0)
    if not np.any(block):
        return candidates
    rows = candidates.take(block)
    chunk = problem.model.num_hidden_layers // (
        rows.pipeline_parallel_size * rows.virtual_pipeline_parallel_size
    )
    columns = {f.name: getattr(rows, f.name)[:, None] for f in fields(Candidates)}
    low, high = np.zeros_like(chunk), chunk
    while np.any(high - low > 1):
        middle = low[:, None] + -(
            -(high - low)[:, None] * np.arange(1, NUM_BISECTIONS) // NUM_BISECTIONS
        )
        costs = problem.costs(Candidates(**columns | {"recompute_num_layers": middle})).rows(
            middle.shape
        )
        fits = costs.feasible.reshape(middle.shape)
        low = np.where(fits, low[:, None], middle).max(axis=1)
        high = np.where(fits, middle, high[:, None]).min(axis=1)
    num_layers, keep = candidates.recompute_num_layers.copy(), np.ones(len(candidates), dtype=bool)
    num_layers[block], keep[block] = high, high < chunk
    return replace(candidates, recompute_num_layers=num_layers).take(keep)


def _move_codes(candidates: Candidates, config: ParallelConfig) -> tuple[IntArray, FloatArray]:
    """Return a code for the axes that increase and decrease, and the sum of the changes'
    logarithms, each of shape (n,).
    """
    base = Candidates.alone(config)
    directions, distance = np.zeros(len(candidates), dtype=np.int64), np.zeros(len(candidates))
    for name in (f.name for f in fields(Candidates) if f.name != "data_parallel_size"):
        values, present = getattr(candidates, name), getattr(base, name)
        directions = 3 * directions + np.sign(values - present) + 1
        if name in SIZES:
            distance += np.abs(np.log(values / present))
    return directions, distance


def _fix_of_row(near: Neighbours, row: int, infeasible: Estimate, *, num_gpus: int) -> Fix:
    """Return a row as a fix for the infeasible configuration on `num_gpus` devices."""
    problem = near.problem
    after = estimate_row(row, case=problem, costs=near.costs, candidates=near.candidates)
    assert after.parallel is not None and after.memory is not None and after.time is not None
    before_bytes = infeasible.memory.total_bytes if infeasible.memory is not None else None
    return Fix(
        change=change_in_words(
            near.base, after.parallel, gpus=(num_gpus, problem.cluster.num_gpus)
        ),
        changed=changed_fields(near.base, after.parallel),
        parallel=problem.with_common_settings(after.parallel),
        set=dict(problem.chosen),
        num_gpus=problem.cluster.num_gpus,
        memory_total_bytes=after.memory.total_bytes,
        out_of_memory_probability=after.out_of_memory_probability,
        fit=after.fit,
        memory_saved_bytes=before_bytes - after.memory.total_bytes
        if before_bytes is not None
        else None,
        step_s=after.time.step_s,
        step_change_fraction=after.time.step_s / infeasible.time.step_s - 1.0
        if infeasible.time is not None
        else None,
        days=after.calendar_days,
        cost=after.cost,
        remaining=problem.missed_targets(after),
    )
