"""Positions of the leading dense layers of a mixture of experts on the stages of a pipeline."""

import functools
from dataclasses import dataclass
from itertools import accumulate
from typing import Any, NamedTuple

import numpy as np

from hp_tool.cost.arrays import Bools, Floats, Ints
from hp_tool.cost.candidates import DUALPIPE, DUALPIPE_V, ONE_F_ONE_B, ZBV, Candidates, unique_rows
from hp_tool.domain.model import ModelSpec
from hp_tool.domain.pipeline_layout import chunk_layers


class FullStage(NamedTuple):
    """A full stage between the first and the last; shape (n,)."""

    rank: Ints | Floats
    dense: Floats
    mirrored: Floats
    """Dense layers of stage p - 1 - rank, which the same rank stores too under DualPipe."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DenseLayers:
    """Numbers of dense layers on the stages that may be slowest, and on all stages; shape (n,) or
    common to all.

    A stage's time is linear in its dense layers. Among equally full stages, the slowest therefore
    has the most or the fewest.
    """

    first: Floats
    last: Floats
    between: Bools
    """Whether there are stages between the first and the last."""
    full: Floats
    """Number of layers of the fullest of these. Under DualPipe, the mean of the rank's two stages,
    each of which runs half of the micro-batches.
    """
    most: Floats
    """Largest number of dense layers on one of these."""
    fewest: Floats
    total: Floats
    fullest: tuple[FullStage, ...] = ()
    """Stages between the ends that may have the highest memory; empty for a part of a pipeline."""


def has_both_kinds(model: ModelSpec) -> bool:
    """Return whether a model without `blocks` has dense layers followed by layers with experts."""
    return (
        model.blocks is None
        and bool(model.num_experts)
        and model.moe_layers < model.num_hidden_layers
    )


def dense_layers(model: ModelSpec, c: Candidates, *, late: bool) -> DenseLayers:
    """Return the dense layers of a whole pipeline that `domain.pipeline_layout.chunk_layers` lays
    out.

    `late` is passed to that function. Each combination of stages, chunks and schedule is laid out
    once.
    """
    unique, inverse = unique_rows(
        c, ("pipeline_parallel_size", "virtual_pipeline_parallel_size", "pipeline_schedule")
    )
    leading = model.num_hidden_layers - model.moe_layers
    keys = (
        unique.pipeline_parallel_size,
        unique.virtual_pipeline_parallel_size,
        unique.pipeline_schedule,
    )

    def row(p: int, v: int, schedule: int) -> tuple[float, ...]:
        return _row(model.num_hidden_layers, leading, p, v, schedule, late=late)

    columns: list[Any]
    if c.is_alone:
        columns = list(row(*(int(key) for key in keys)))
    else:
        table = np.array(
            [
                row(*key)
                for key in np.stack(
                    [np.ravel(key) for key in np.broadcast_arrays(*keys)]
                ).T.tolist()
            ]
        )
        rows = (
            np.zeros(c.pipeline_parallel_size.shape, dtype=np.intp) if inverse is None else inverse
        )
        columns = (
            [column[rows] for column in table.T]
            if len(table)
            else [np.zeros(rows.shape)] * _COLUMNS
        )
    stages = [
        FullStage(*columns[place : place + 3]) for place in range(_BEFORE_STAGES, _COLUMNS, 3)
    ]
    different = [
        stage
        for place, stage in enumerate(stages)
        if not place or np.any(stage.rank != stages[place - 1].rank)
    ]
    return DenseLayers(
        first=columns[0],
        last=columns[1],
        between=columns[2] > 0,
        full=columns[3],
        most=columns[4],
        fewest=columns[5],
        total=leading,
        fullest=tuple(different),
    )


_BEFORE_STAGES, _COLUMNS = 6, 6 + 4 * 3


@functools.lru_cache(maxsize=1 << 14)
def _row(
    layers: int, leading: int, p: int, v: int, schedule: int, *, late: bool
) -> tuple[float, ...]:
    """Return the fields of DenseLayers for one pipeline, with the four stages that may have the
    highest memory.

    These are the first full stage, the one with layers of both kinds, the first with the fewest
    dense layers, and the last, which has the most delayed weight gradients in ZB-H1.
    """
    counts, dense = stage_counts(layers, leading, p, v, schedule, late=late)
    paired = [_mean_pairs(column) if schedule == DUALPIPE else column for column in (counts, dense)]
    inner = range(1, p - 1)
    full = max((paired[0][rank] for rank in inner), default=0)
    ranks = [rank for rank in inner if paired[0][rank] == full] or [0]
    of_full = [paired[1][rank] for rank in ranks]
    pure = min(ranks, key=lambda rank: dense[rank])
    mixed = next((rank for rank in ranks if 0 < dense[rank] < counts[rank]), pure)
    last = pure if schedule == ONE_F_ONE_B else ranks[-1]
    fullest = [
        value
        for rank in (ranks[0], mixed, pure, last)
        for value in (rank, dense[rank], dense[p - 1 - rank])
    ]
    return (dense[0], dense[-1], p > 2, full, max(of_full), min(of_full), *fullest)


def stage_counts(
    layers: int, leading: int, p: int, v: int, schedule: int, *, late: bool = False
) -> tuple[list[float], list[float]]:
    """Return (number of layers, number of dense layers) of each stage.

    Chunk i is on stage i mod p. In a V, chunk 2p - 1 - r is also on stage r.
    """
    chunks = chunk_layers(
        num_layers=layers, stages=p, chunks=v, late=late, begins_dense=0 < leading < layers
    )
    dense = [
        min(max(leading - before, 0), count)
        for before, count in zip(accumulate([0, *chunks]), chunks, strict=False)
    ]

    def of_stages(column: list[int]) -> list[float]:
        if schedule in (ZBV, DUALPIPE_V) and v == 2:
            return [float(column[rank] + column[2 * p - 1 - rank]) for rank in range(p)]
        return [float(sum(column[rank::p])) for rank in range(p)]

    return of_stages(chunks), of_stages(dense)


def _mean_pairs(column: list[float]) -> list[float]:
    return [0.5 * (one + other) for one, other in zip(column, reversed(column), strict=True)]
