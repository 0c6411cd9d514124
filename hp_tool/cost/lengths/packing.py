"""Packing: several sequences share a row, each attending to itself alone (Megatron Core's thd layout)."""

from __future__ import annotations

import functools
from bisect import bisect_left, insort
from dataclasses import dataclass

import numpy as np

from hp_tool.cost.arrays import FloatArray, IntArray
from hp_tool.cost.lengths.distribution import LengthDistribution

SAMPLE = 1 << 16
"""Sequences packed to learn what rows look like."""
SEED = 0


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Packed:
    """Rows and what is in them."""

    row_of: IntArray
    """(n,) the row of each sequence."""
    tokens: IntArray
    """(r,) tokens of each row that are no padding."""
    squares: FloatArray
    """(r,) sum of l^2 over the row's sequences: what its attention costs."""


def best_fit(lengths: IntArray, *, capacity: int) -> Packed:
    """Each sequence in the order given goes into the fullest row that still takes it (best-fit bin packing).

    Data pipelines differ in how far they look ahead; offline packing by histogram fills rows as well as this does.
    """
    row_of = np.empty(len(lengths), dtype=np.int64)
    shortest = int(lengths.min(initial=capacity))
    open_rows: list[tuple[int, int]] = []  # (free tokens, row), fullest first
    rows = 0
    for index, length in enumerate(lengths.tolist()):
        place = bisect_left(open_rows, (length, -1))
        if place == len(open_rows):
            free, row = capacity, rows
            rows += 1
        else:
            free, row = open_rows.pop(place)
        if free - length >= shortest:
            insort(open_rows, (free - length, row))
        row_of[index] = row
    wide = lengths.astype(np.float64)
    return Packed(
        row_of=row_of,
        tokens=np.bincount(row_of, weights=wide, minlength=rows).astype(np.int64),
        squares=np.bincount(row_of, weights=wide**2, minlength=rows).astype(np.float64),
    )


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Rows:
    """A data set's sequences in rows of `row_tokens` tokens."""

    row_tokens: int
    mean_tokens: float
    """Tokens of a row that are no padding."""
    mean_squares: float
    """Sum of l^2 over a row's sequences."""
    squares: FloatArray
    """(r,) the same of sampled rows, scaled to that mean."""


@functools.lru_cache(maxsize=16)
def padded_rows(distribution: LengthDistribution, *, row_tokens: int) -> Rows:
    """One sequence a row, padded to row_tokens: kernels compute the padding too, so all rows cost the same."""
    short = distribution.cut(row_tokens)
    return Rows(
        row_tokens=row_tokens,
        mean_tokens=short.mean,
        mean_squares=short.mean_square,
        squares=np.full(1, short.mean_square),
    )


@functools.lru_cache(maxsize=16)
def packed_rows(distribution: LengthDistribution, *, row_tokens: int) -> Rows:
    """As many sequences a row as fit. How full rows get is seen on a sample; E[l^2]/E[l] is exact."""
    short = distribution.cut(row_tokens)
    packed = best_fit(short.sample(SAMPLE, seed=SEED), capacity=row_tokens)
    whole = slice(0, max(len(packed.tokens) - 1, 1))  # the sample ended in the last row
    fill = float(packed.tokens[whole].mean())
    squares = packed.squares[whole]
    mean_squares = fill * short.attended_length
    return Rows(
        row_tokens=row_tokens,
        mean_tokens=fill,
        mean_squares=mean_squares,
        squares=squares * (mean_squares / squares.mean()),
    )
