"""Candidates: many configurations as a struct of arrays, or one configuration as plain numbers.

Formulas are elementwise, so one implementation handles all three forms. Arrays of shape (n,) suit a
million rows. A grid consists of arrays that broadcast to one shape. It is faster, because a result
that does not depend on an axis is computed once for all values of that axis. Plain numbers suit a
single candidate.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, fields
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hp_tool.cost.arrays import BoolArray, Bools, IntArray, anywhere
from hp_tool.domain.parallel import (
    QUERY_STRATEGY_FIELDS,
    ParallelConfig,
    PipelineSchedule,
    Recompute,
    RecomputeModule,
    RecomputeName,
    TokenDispatcher,
)

NONE, SELECTIVE, FULL_UNIFORM, FULL_BLOCK = range(4)
"""Codes of Candidates.recompute_method."""

MODULES: dict[RecomputeModule, int] = {
    "core_attn": 1,
    "layernorm": 2,
    "mlp": 4,
    "moe": 8,
    "moe_act": 16,
    "shared_experts": 32,
    "mla_up_proj": 64,
}
"""Bit of each module in Candidates.recompute_modules."""
CORE_ATTN, LAYERNORM, MLP, MOE, MOE_ACT, SHARED_EXPERTS, MLA_UP_PROJ = MODULES.values()
PER_OP = 128
"""Value of `recompute_modules` for recomputation per operation (recompute per_op)."""

ONE_F_ONE_B, GPIPE, ZB_H1, ZBV, DUALPIPE, DUALPIPE_V = range(6)
"""Codes of Candidates.pipeline_schedule.

Schedules from ZB_H1 on split the backward pass. From ZBV on, the first and last layers of the model
are on the same rank.
"""
SCHEDULE_NAMES: tuple[PipelineSchedule | None, ...] = (
    None,
    "gpipe",
    "zb-h1",
    "zbv",
    "dualpipe",
    "dualpipe-v",
)
"""Schedule name of each code, as in ParallelConfig."""
DISPATCHERS: tuple[TokenDispatcher | None, ...] = (None, "alltoall", "flex", "allgather")
"""Dispatcher name of each code in Candidates.moe_token_dispatcher_type, as in ParallelConfig."""
ALLTOALL, FLEX, ALLGATHER = 1, 2, 3


@dataclass(frozen=True, kw_only=True)
class Candidates:
    """n configurations.

    Arrays have shape (n,), or broadcast to one grid of n candidates in row-major order. A single
    candidate has plain numbers. Fields are those of ParallelConfig, except that recomputation is
    encoded as a method code, a number of layers, and modules.
    """

    tensor_parallel_size: IntArray
    pipeline_parallel_size: IntArray
    virtual_pipeline_parallel_size: IntArray
    context_parallel_size: IntArray
    expert_parallel_size: IntArray
    expert_tensor_parallel_size: IntArray
    data_parallel_size: IntArray
    micro_batch_size: IntArray
    sequence_parallel: IntArray
    """0 or 1."""
    recompute_method: IntArray
    """NONE, SELECTIVE (some modules), FULL_UNIFORM, FULL_BLOCK."""
    recompute_num_layers: IntArray
    """Only for full recomputation: layers per checkpoint (uniform), or recomputed layers per model
    chunk (block; 0: all).
    """
    recompute_modules: IntArray
    """Only for selective recomputation: sum of MODULES, or PER_OP. Otherwise 0."""
    zero_stage: IntArray
    data_parallel_shard_size: IntArray
    """Number of ranks over which ZeRO shards; 0: the whole data-parallel group."""
    pipeline_schedule: IntArray
    """ONE_F_ONE_B (interleaved if v > 1), GPIPE, ZB_H1, ZBV, DUALPIPE, DUALPIPE_V."""
    moe_token_dispatcher_type: IntArray
    """Index into DISPATCHERS; 0: the strategy's dispatcher."""

    def __len__(self) -> int:
        return math.prod(self.shape)

    @property
    def shape(self) -> tuple[int, ...]:
        """Return the shape of the candidates: (n,), the grid's shape, or () for a single
        candidate.
        """
        if self.is_alone:
            return ()
        first = self.tensor_parallel_size.shape
        return (
            first
            if len(first) == 1
            else np.broadcast_shapes(*(getattr(self, f.name).shape for f in fields(Candidates)))
        )

    @property
    def is_alone(self) -> bool:
        return not isinstance(self.tensor_parallel_size, np.ndarray)

    @cached_property
    def recomputes_layers(self) -> bool:
        """Return whether any candidate recomputes complete layers."""
        return anywhere(self.recompute_method >= FULL_UNIFORM)

    @cached_property
    def names_modules(self) -> bool:
        """Return whether any candidate recomputes modules other than the attention core."""
        return anywhere(self.recompute_modules > CORE_ATTN)

    @cached_property
    def names_schedules(self) -> bool:
        """Return whether any candidate has a pipeline schedule other than 1F1B and interleaved
        1F1B.
        """
        return anywhere(self.pipeline_schedule)

    @cached_property
    def merges_passes(self) -> bool:
        """Return whether any candidate's schedule runs forward passes together with backward
        passes.
        """
        return self.names_schedules and anywhere(self.pipeline_schedule >= DUALPIPE)

    @property
    def splits_backward(self) -> Bools:
        """Return a mask of candidates whose schedule separates weight gradients from input
        gradients.
        """
        return self.pipeline_schedule >= ZB_H1

    @property
    def is_folded(self) -> Bools:
        """Return a mask of candidates whose first rank has both the embedding and the output layer.

        These are the V schedules, and DualPipe, in which the last rank has both, too.
        """
        return self.pipeline_schedule >= ZBV

    @property
    def is_v(self) -> Bools:
        """Return a mask of the V schedules, ZB-V and DualPipeV, in which rank r has the chunks r
        and 2p - 1 - r.
        """
        folded: Bools = (self.pipeline_schedule == ZBV) | (self.pipeline_schedule == DUALPIPE_V)
        return folded

    def take(self, indices: NDArray[np.intp] | BoolArray | slice) -> Candidates:
        """Return the rows at `indices`, in that order; rows of a grid are numbered in row-major
        order.
        """
        if len(shape := self.shape) > 1:
            return self.at(np.unravel_index(np.arange(len(self))[indices], shape))
        return self._each(lambda column: column[indices])

    def at(self, places: Sequence[NDArray[np.intp]]) -> Candidates:
        """Return the candidates at the given grid positions: one index array per axis."""

        def chosen(column: IntArray) -> IntArray:
            where = tuple(
                0 if extent == 1 else place
                for place, extent in zip(places, column.shape, strict=True)
            )
            return np.broadcast_to(column[where], places[0].shape)

        return self._each(chosen)

    def row(self, index: int) -> Candidates:
        """Return the candidate of one row as plain numbers."""
        return self._each(lambda column: int(column[index]))

    def _each(self, change: Callable[[IntArray], Any]) -> Candidates:
        return Candidates(**{f.name: change(getattr(self, f.name)) for f in fields(Candidates)})

    def config(self, index: int) -> ParallelConfig:
        """Return the configuration of one row."""
        return self.row(index).only_config()

    def only_config(self) -> ParallelConfig:
        """Return the configuration of this single candidate."""
        values: dict[str, Any] = {f.name: getattr(self, f.name) for f in fields(self)}
        codes = [values.pop(name) for name in RECOMPUTE_COLUMNS]
        values["sequence_parallel"] = bool(values["sequence_parallel"])
        values["pipeline_schedule"] = SCHEDULE_NAMES[values["pipeline_schedule"]]
        values["moe_token_dispatcher_type"] = DISPATCHERS[values["moe_token_dispatcher_type"]]
        return ParallelConfig(**values, recompute=recompute_from_codes(*codes))

    @classmethod
    def alone(cls, config: ParallelConfig) -> Candidates:
        """Return one configuration as a single candidate with plain numbers."""
        numbers: dict[str, Any] = _row(config)
        return cls(**numbers)

    @classmethod
    def from_configs(cls, configs: Iterable[ParallelConfig]) -> Candidates:
        """Return one row per configuration, in order."""
        rows = [_row(config) for config in configs]
        return cls.from_columns({f.name: [row[f.name] for row in rows] for f in fields(cls)})

    @classmethod
    def concatenate(cls, parts: Sequence[Candidates]) -> Candidates:
        """Concatenate the rows of one or more parts, in order."""
        parts = [part.take(slice(None)) if len(part.shape) > 1 else part for part in parts]
        if len(parts) == 1:
            return parts[0]
        return cls(
            **{
                f.name: np.concatenate([getattr(part, f.name) for part in parts])
                for f in fields(cls)
            }
        )

    @classmethod
    def from_columns(cls, columns: Mapping[str, object]) -> Candidates:
        return cls(
            **{
                f.name: np.atleast_1d(np.asarray(columns[f.name], dtype=np.int64))
                for f in fields(cls)
            }
        )


def schedule_code(schedule: PipelineSchedule | None) -> int:
    """Return the code of a schedule name.

    1f1b and interleaved have the same code; virtual_pipeline_parallel_size distinguishes them.
    """
    return ONE_F_ONE_B if schedule in ("1f1b", "interleaved") else SCHEDULE_NAMES.index(schedule)


RECOMPUTE_COLUMNS = ("recompute_method", "recompute_num_layers", "recompute_modules")
"""Fields returned by recompute_codes."""


def recompute_codes(recompute: RecomputeName | Recompute) -> tuple[int, int, int]:
    """Return (recompute_method, recompute_num_layers, recompute_modules) of `recompute`."""
    spec = Recompute(granularity=recompute) if isinstance(recompute, str) else recompute
    if spec.granularity == "none":
        return NONE, 0, 0
    if spec.granularity == "selective":
        return SELECTIVE, 0, sum(MODULES[name] for name in set(spec.modules or ("core_attn",)))
    if spec.granularity == "per_op":
        return SELECTIVE, 0, PER_OP
    if spec.method == "block":
        return FULL_BLOCK, spec.num_layers or 0, 0
    return FULL_UNIFORM, spec.num_layers or 1, 0


def recompute_from_codes(method: int, num_layers: int, modules: int) -> RecomputeName | Recompute:
    """Return the shortest `recompute` value that these codes represent."""
    if method == NONE:
        return "none"
    if method == SELECTIVE:
        if modules == PER_OP:
            return "per_op"
        if modules == CORE_ATTN:
            return "selective"
        return Recompute(
            granularity="selective",
            modules=tuple(name for name, bit in MODULES.items() if modules & bit),
        )
    if method == FULL_BLOCK:
        return Recompute(granularity="full", method="block", num_layers=num_layers or None)
    return (
        "full"
        if num_layers == 1
        else Recompute(granularity="full", method="uniform", num_layers=num_layers)
    )


def _row(config: ParallelConfig) -> dict[str, int]:
    codes = dict(zip(RECOMPUTE_COLUMNS, recompute_codes(config.recompute), strict=True))
    converted = (
        "recompute",
        "pipeline_schedule",
        "moe_token_dispatcher_type",
        *QUERY_STRATEGY_FIELDS,
    )
    row = {name: int(getattr(config, name)) for name in config.__slots__ if name not in converted}
    row["pipeline_schedule"] = schedule_code(config.pipeline_schedule)
    row["moe_token_dispatcher_type"] = DISPATCHERS.index(config.moe_token_dispatcher_type)
    return row | codes


# Evaluate a formula once per distinct combination of a few axes.


MAX_TABLE = 1 << 22


def unique_rows(
    candidates: Candidates, names: Sequence[str]
) -> tuple[Candidates, NDArray[np.intp] | None]:
    """Return (unique, inverse): one candidate for each distinct combination of the named axes, and
    the index of each row's combination.

    `inverse` is None if there is at most one row. For a grid, it has only the axes along which the
    named axes vary. Axis values are small integers, so a mixed-radix table numbers the combinations
    in O(n), without sorting.
    """
    if len(candidates) <= 1:
        return candidates, None
    columns = [getattr(candidates, name) for name in names]
    shape = np.broadcast_shapes(*(column.shape for column in columns))
    key = np.zeros(shape, dtype=np.int64)
    size = 1
    for values in columns:
        if values.min() == values.max():
            continue
        levels = np.zeros(int(values.max()) + 1, dtype=np.int64)
        levels[values] = 1
        codes = np.cumsum(levels) - 1
        key = key * (codes[-1] + 1) + codes[values]
        size *= int(codes[-1] + 1)
    if size > MAX_TABLE:
        _, first, inverse = np.unique(key, return_index=True, return_inverse=True)
        return candidates.at(np.unravel_index(first, shape)), inverse.reshape(shape)
    row = np.full(size, -1, dtype=np.intp)
    row[key.ravel()] = np.arange(key.size)
    occurs = row >= 0
    inverse = (np.cumsum(occurs) - 1)[key]
    return candidates.at(np.unravel_index(row[occurs], shape)), inverse
