"""Candidates: many configurations as a struct of arrays, one entry each; or one alone, as plain numbers.

Formulas are written once and serve all forms, being elementwise. Arrays of shape (n,) make a million rows cheap; a grid,
whose arrays broadcast to one shape, cheaper still: what does not depend on an axis is computed once for all its values;
plain numbers make one candidate cheap.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hp_tool.cost.arrays import BoolArray, IntArray
from hp_tool.domain.parallel import OF_THE_QUERY, ParallelConfig, PipelineSchedule, Recompute, RecomputeModule, RecomputeName

NONE, SELECTIVE, FULL_UNIFORM, FULL_BLOCK = range(4)
"""Codes of Candidates.recompute_method."""

MODULES: dict[RecomputeModule, int] = {
    "core_attn": 1, "layernorm": 2, "mlp": 4, "moe": 8, "moe_act": 16, "shared_experts": 32, "mla_up_proj": 64
}  # fmt: skip
"""Bits of Candidates.recompute_modules."""
CORE_ATTN, LAYERNORM, MLP, MOE, MOE_ACT, SHARED_EXPERTS, MLA_UP_PROJ = MODULES.values()
PER_OP = 128
"""In recompute_modules in place of modules: recomputation of operations, see `per_op`."""

ONE_F_ONE_B, GPIPE, ZB_H1, ZBV, DUALPIPE = range(5)
"""Codes of Candidates.pipeline_schedule. From ZB_H1 on the backward pass is split; from ZBV on both ends of the model are on
the same rank."""
SCHEDULE_NAMES: tuple[PipelineSchedule | None, ...] = (None, "gpipe", "zb-h1", "zbv", "dualpipe")
"""ParallelConfig's word for each code."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Candidates:
    """n configurations; every array has shape (n,), or is a plain number for one alone, or all broadcast to one grid of n,
    numbered row by row. Fields are ParallelConfig's, recomputation split in code and layers.
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
    """Full only: layers per checkpoint (uniform) or recomputed layers per model chunk (block, 0: all)."""
    recompute_modules: IntArray
    """Selective only: sum of MODULES, or PER_OP; else 0."""
    zero_stage: IntArray
    data_parallel_shard_size: IntArray
    """0: the whole data-parallel group."""
    pipeline_schedule: IntArray
    """ONE_F_ONE_B (interleaved where v > 1), GPIPE, ZB_H1, ZBV, DUALPIPE."""

    def __len__(self) -> int:
        return math.prod(self.shape)

    @property
    def shape(self) -> tuple[int, ...]:
        """(n,), the grid's shape, or () for one alone."""
        if self.is_alone:
            return ()
        first = self.tensor_parallel_size.shape
        return first if len(first) == 1 else np.broadcast_shapes(*(getattr(self, f.name).shape for f in fields(Candidates)))

    @property
    def is_alone(self) -> bool:
        return not isinstance(self.tensor_parallel_size, np.ndarray)

    def take(self, indices: NDArray[np.intp] | BoolArray | slice) -> Candidates:
        """The chosen rows, in the given order; of a grid too as rows, numbered as they are there."""
        if len(shape := self.shape) > 1:
            return self.at(np.unravel_index(np.arange(len(self))[indices], shape))
        return Candidates(**{f.name: getattr(self, f.name)[indices] for f in fields(self)})

    def at(self, places: Sequence[NDArray[np.intp]]) -> Candidates:
        """The rows at these places of the grid, given by an index along each of its axes."""

        def chosen(column: IntArray) -> IntArray:
            where = tuple(0 if extent == 1 else place for place, extent in zip(places, column.shape, strict=True))
            return np.broadcast_to(column[where], places[0].shape)

        return Candidates(**{f.name: chosen(getattr(self, f.name)) for f in fields(Candidates)})

    def row(self, index: int) -> Candidates:
        """One of the rows alone."""
        numbers: dict[str, Any] = {f.name: int(getattr(self, f.name)[index]) for f in fields(self)}
        return Candidates(**numbers)

    def config(self, index: int) -> ParallelConfig:
        """One row as a domain object."""
        return self.row(index).only_config()

    def only_config(self) -> ParallelConfig:
        """The one candidate there is, alone, as a domain object."""
        values: dict[str, Any] = {f.name: getattr(self, f.name) for f in fields(self)}
        codes = [values.pop(name) for name in RECOMPUTE_COLUMNS]
        values["sequence_parallel"] = bool(values["sequence_parallel"])
        values["pipeline_schedule"] = SCHEDULE_NAMES[values["pipeline_schedule"]]
        return ParallelConfig(**values, recompute=recompute_from_codes(*codes))

    @classmethod
    def alone(cls, config: ParallelConfig) -> Candidates:
        """One configuration as plain numbers."""
        numbers: dict[str, Any] = _row(config)
        return cls(**numbers)

    @classmethod
    def from_configs(cls, configs: Iterable[ParallelConfig]) -> Candidates:
        """Rows in the order given."""
        rows = [_row(config) for config in configs]
        return cls.from_columns({f.name: [row[f.name] for row in rows] for f in fields(cls)})

    @classmethod
    def concatenate(cls, parts: Sequence[Candidates]) -> Candidates:
        """The rows of all parts, in order; of at least one part."""
        parts = [part.take(slice(None)) if len(part.shape) > 1 else part for part in parts]
        if len(parts) == 1:
            return parts[0]
        return cls(**{f.name: np.concatenate([getattr(part, f.name) for part in parts]) for f in fields(cls)})

    @classmethod
    def from_columns(cls, columns: Mapping[str, object]) -> Candidates:
        return cls(**{f.name: np.atleast_1d(np.asarray(columns[f.name], dtype=np.int64)) for f in fields(cls)})


def schedule_code(schedule: PipelineSchedule | None) -> int:
    """The code of a schedule's name; 1f1b and interleaved are one, which virtual_pipeline_parallel_size tells apart."""
    return ONE_F_ONE_B if schedule in ("1f1b", "interleaved") else SCHEDULE_NAMES.index(schedule)


RECOMPUTE_COLUMNS = ("recompute_method", "recompute_num_layers", "recompute_modules")
"""What recompute_codes gives."""


def recompute_codes(recompute: RecomputeName | Recompute) -> tuple[int, int, int]:
    """(recompute_method, recompute_num_layers, recompute_modules) of a domain value that a query may ask for."""
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
    """The shortest domain value with these codes."""
    if method == NONE:
        return "none"
    if method == SELECTIVE:
        if modules == PER_OP:
            return "per_op"
        if modules == CORE_ATTN:
            return "selective"
        return Recompute(granularity="selective", modules=tuple(name for name, bit in MODULES.items() if modules & bit))
    if method == FULL_BLOCK:
        return Recompute(granularity="full", method="block", num_layers=num_layers or None)
    return "full" if num_layers == 1 else Recompute(granularity="full", method="uniform", num_layers=num_layers)


def _row(config: ParallelConfig) -> dict[str, int]:
    codes = dict(zip(RECOMPUTE_COLUMNS, recompute_codes(config.recompute), strict=True))
    said_apart = ("recompute", "pipeline_schedule", *OF_THE_QUERY)
    row = {name: int(getattr(config, name)) for name in config.__slots__ if name not in said_apart}
    schedule = schedule_code(config.pipeline_schedule)
    return row | codes | {"pipeline_schedule": schedule}


# Evaluate a formula once per distinct combination of a few axes, and spread the answers.


MAX_TABLE = 1 << 22


def unique_rows(candidates: Candidates, names: Sequence[str]) -> tuple[Candidates, NDArray[np.intp] | None]:
    """(unique, inverse): one candidate for each combination of the named axes, and for each row which one is its own (None for
    at most one row). Of a grid `inverse` has an axis only for what the named axes vary along.

    Axes hold small integers, so combinations are numbered by mixed radix in a table: linear in n, without a sort.
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
