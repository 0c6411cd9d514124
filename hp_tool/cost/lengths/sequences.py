"""Sequence lengths of a data set, and packing of sequences into rows."""

from __future__ import annotations

import functools
import math
from bisect import bisect_left, insort
from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np

from hp_tool.cost.arrays import FloatArray, IntArray

BINS = 1024
"""Number of lengths that represent a continuous distribution; adjacent lengths differ by about
1%.
"""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class LengthDistribution:
    """Fraction of sequences of each length, regardless of their order."""

    name: str
    lengths: IntArray
    """Distinct lengths in tokens, ascending, at least 1; shape (k,)."""
    shares: FloatArray
    """Fractions of all sequences, which sum to 1; shape (k,)."""

    @classmethod
    def from_counts(
        cls, *, name: str, lengths: Iterable[int], counts: Iterable[float]
    ) -> LengthDistribution:
        """Return the distribution of these lengths and counts, in any order and with
        repetitions.
        """
        values = np.fromiter(lengths, dtype=np.int64)
        weights = np.fromiter(counts, dtype=np.float64)
        distinct, inverse = np.unique(values, return_inverse=True)
        # Summed from small to large, so that the order of the input does not affect the last digit.
        order = np.lexsort((weights, inverse))
        totals = np.bincount(inverse[order], weights=weights[order], minlength=len(distinct))
        occurs = totals > 0
        return cls(name=name, lengths=distinct[occurs], shares=totals[occurs] / totals.sum())

    @classmethod
    def log_normal_mixture(
        cls,
        *,
        name: str,
        components: Iterable[tuple[float, float, float]],
        shortest: int,
        longest: int,
    ) -> LengthDistribution:
        """Return a weighted sum of log-normal distributions, limited to a range of lengths.

        Each component is (share, median in tokens, standard deviation of the logarithm).
        """
        edges = np.geomspace(shortest, longest, BINS + 1)
        middles = np.maximum(np.rint(np.sqrt(edges[:-1] * edges[1:])), 1).astype(np.int64)
        counts = np.zeros(BINS)
        for share, median, sigma in components:
            below = np.array(
                [
                    0.5 * math.erfc(-math.log(edge / median) / (sigma * math.sqrt(2.0)))
                    for edge in edges
                ]
            )
            inside = np.diff(below)
            counts += share * inside / inside.sum()
        return cls.from_counts(name=name, lengths=middles.tolist(), counts=counts.tolist())

    def cut(self, longest: int) -> LengthDistribution:
        """Return the distribution with sequences truncated to `longest` tokens, as in
        fine-tuning.
        """
        cut = np.minimum(self.lengths, longest)
        return LengthDistribution.from_counts(
            name=self.name, lengths=cut.tolist(), counts=self.shares.tolist()
        )

    @property
    def mean(self) -> float:
        """Return E[l], the mean tokens per sequence."""
        return float(self.shares @ self.lengths)

    @property
    def mean_square(self) -> float:
        """Return E[l^2], in tokens squared."""
        return float(self.shares @ self.lengths.astype(np.float64) ** 2)

    @property
    def attended_length(self) -> float:
        """Return E[l^2] / E[l]: the mean, over tokens, of the length of the token's sequence."""
        return self.mean_square / self.mean

    def sample(self, count: int, *, seed: int) -> IntArray:
        """Return `count` independently sampled lengths, which the seed determines; shape
        (count,).
        """
        return np.random.default_rng(seed).choice(self.lengths, size=count, p=self.shares)


# Packing: several sequences share a row, each attending only to itself (Megatron Core's thd
# layout).


SAMPLE = 1 << 16
"""Number of sequences that are packed to estimate how full rows are."""
SEED = 0


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Packed:
    """An assignment of sequences to rows."""

    row_of: IntArray
    """Row of each sequence; shape (n,)."""
    tokens: IntArray
    """Tokens of each row, excluding padding; shape (r,)."""
    squares: FloatArray
    """Sum of l^2 over the sequences of each row; attention is proportional to it. Shape (r,)."""


def best_fit(lengths: IntArray, *, capacity: int) -> Packed:
    """Pack the sequences in order, each into the fullest row with enough room (best-fit bin
    packing).

    Data pipelines differ in how many sequences they consider at a time. Offline packing by
    histogram fills rows equally well.
    """
    row_of = np.empty(len(lengths), dtype=np.int64)
    shortest = int(lengths.min(initial=capacity))
    open_rows: list[tuple[int, int]] = []  # (free tokens, row), fullest first.
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
    """A data set's sequences arranged in rows of `row_tokens` tokens."""

    row_tokens: int
    mean_tokens: float
    """Mean tokens of a row, excluding padding."""
    mean_squares: float
    """Mean, over rows, of the sum of l^2 over a row's sequences."""
    squares: FloatArray
    """Sum of l^2 of sampled rows, scaled to `mean_squares`; shape (r,)."""


@functools.lru_cache(maxsize=16)
def padded_rows(distribution: LengthDistribution, *, row_tokens: int) -> Rows:
    """Return rows with one sequence each, padded to row_tokens.

    Kernels process the padding too, so all rows have the same cost.
    """
    short = distribution.cut(row_tokens)
    return Rows(
        row_tokens=row_tokens,
        mean_tokens=short.mean,
        mean_squares=short.mean_square,
        squares=np.full(1, short.mean_square),
    )


@functools.lru_cache(maxsize=16)
def packed_rows(distribution: LengthDistribution, *, row_tokens: int) -> Rows:
    """Return rows that are each packed with as many sequences as fit.

    How full rows are is estimated from a sample; E[l^2]/E[l] is exact.
    """
    short = distribution.cut(row_tokens)
    packed = best_fit(short.sample(SAMPLE, seed=SEED), capacity=row_tokens)
    # The sample ends in the last row, which may be incomplete.
    complete_rows = slice(0, max(len(packed.tokens) - 1, 1))
    fill = float(packed.tokens[complete_rows].mean())
    squares = packed.squares[complete_rows]
    mean_squares = fill * short.attended_length
    return Rows(
        row_tokens=row_tokens,
        mean_tokens=fill,
        mean_squares=mean_squares,
        squares=squares * (mean_squares / squares.mean()),
    )
