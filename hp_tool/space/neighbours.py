"""Configurations near a given one: a chosen number of axes take another value, the rest stays."""

from __future__ import annotations

import itertools
from dataclasses import fields

import numpy as np

from hp_tool.cost.arrays import IntArray
from hp_tool.cost.candidates import FULL_BLOCK, RECOMPUTE_COLUMNS, Candidates
from hp_tool.space.axes import Axes

MAX_VALUES = 12
"""Other values of one axis that are tried; the nearest ones where there are more."""
SIZES = (
    "tensor_parallel_size",
    "pipeline_parallel_size",
    "virtual_pipeline_parallel_size",
    "context_parallel_size",
    "expert_parallel_size",
    "expert_tensor_parallel_size",
    "micro_batch_size",
)

Move = dict[str, IntArray]
"""Values of one axis as columns of Candidates; recomputation fills three of them."""


def neighbours(*, base: Candidates, axes: Axes, num_gpus: int, changes: int) -> Candidates:
    """Every way to give exactly `changes` axes of `base` (one alone) another of the values in `axes`, or another ZeRO stage.

    What follows from the axes follows here: data_parallel_size from the devices, sequence parallelism off where
    t = 1 and on where t rises from 1. Legality is not looked at. Block recomputation comes with 0 layers: all of them.
    """
    moves = _moves(base, axes)
    combined = [_combined(base, [moves[name] for name in names]) for names in itertools.combinations(moves, changes)]
    columns = {f.name: np.concatenate([rows[f.name] for rows in combined]) for f in fields(Candidates)}
    t, c = columns["tensor_parallel_size"], columns["context_parallel_size"]
    columns["data_parallel_size"] = np.maximum(num_gpus // (t * columns["pipeline_parallel_size"] * c), 1)
    shards = columns["sequence_parallel"]
    columns["sequence_parallel"] = (t > 1) * (shards if base.tensor_parallel_size > 1 else 1)
    # With one member to shard over, ZeRO means nothing, and sequence parallelism nothing without tensor parallelism.
    idle = (columns["zero_stage"] != base.zero_stage) & (columns["data_parallel_size"] * c == 1)
    idle |= (shards != base.sequence_parallel) & (t == 1)
    idle |= (columns["zero_stage"] == 0) & (columns["data_parallel_shard_size"] > 0)
    return Candidates.from_columns(columns).take(~idle)


def _moves(base: Candidates, axes: Axes) -> dict[str, Move]:
    moves: dict[str, Move] = {}
    for name in SIZES:
        here = getattr(base, name)
        others = sorted((k for k in getattr(axes, name) if k != here), key=lambda k: (abs(np.log(k / here)), k))
        moves[name] = {name: np.array(others[:MAX_VALUES], dtype=np.int64)}
    if base.tensor_parallel_size > 1:
        moves["sequence_parallel"] = {"sequence_parallel": np.array([1 - base.sequence_parallel])}
    moves["zero_stage"] = {"zero_stage": np.array([stage for stage in axes.known_zero_stages if stage != base.zero_stage])}
    if base.data_parallel_shard_size:
        moves["data_parallel_shard_size"] = {"data_parallel_shard_size": np.zeros(1, dtype=np.int64)}
    codes = np.array([*axes.recompute, (FULL_BLOCK, 0, 0)])
    here = [getattr(base, name) for name in RECOMPUTE_COLUMNS]
    moves["recompute"] = dict(zip(RECOMPUTE_COLUMNS, codes[np.any(codes != here, axis=1)].T, strict=True))
    return moves


def _combined(base: Candidates, moves: list[Move]) -> Move:
    """All combinations of the values of several axes as full columns."""
    lengths = [len(next(iter(move.values()))) for move in moves]
    picks = np.indices(lengths).reshape(len(moves), -1) if moves else np.zeros((0, 1), dtype=np.intp)
    columns = {f.name: np.full(picks.shape[1], getattr(base, f.name), dtype=np.int64) for f in fields(Candidates)}
    for move, pick in zip(moves, picks, strict=True):
        columns |= {name: values[pick] for name, values in move.items()}
    return columns
