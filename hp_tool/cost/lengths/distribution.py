"""How long the sequences of a data set are."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np

from hp_tool.cost.arrays import FloatArray, IntArray

BINS = 1024
"""Lengths that stand for a continuous distribution; neighbouring ones differ by about one per cent."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class LengthDistribution:
    """Shares of sequences by length. Two orders of the same sequences are the same distribution."""

    name: str
    lengths: IntArray
    """(k,) distinct lengths in tokens, rising, at least 1."""
    shares: FloatArray
    """(k,) of all sequences; sums to 1."""

    @classmethod
    def from_counts(cls, *, name: str, lengths: Iterable[int], counts: Iterable[float]) -> LengthDistribution:
        """From lengths and how often each occurs, in any order; a length may stand more than once."""
        given = np.fromiter(lengths, dtype=np.int64)
        weights = np.fromiter(counts, dtype=np.float64)
        distinct, kind_of = np.unique(given, return_inverse=True)
        # Summed from small to large: the order of the input must not show in the last digit.
        order = np.lexsort((weights, kind_of))
        totals = np.bincount(kind_of[order], weights=weights[order], minlength=len(distinct))
        occurs = totals > 0
        return cls(name=name, lengths=distinct[occurs], shares=totals[occurs] / totals.sum())

    @classmethod
    def log_normal_mixture(
        cls, *, name: str, components: Iterable[tuple[float, float, float]], shortest: int, longest: int
    ) -> LengthDistribution:
        """From (share, median in tokens, standard deviation of the logarithm) of each component, within the limits."""
        edges = np.geomspace(shortest, longest, BINS + 1)
        middles = np.maximum(np.rint(np.sqrt(edges[:-1] * edges[1:])), 1).astype(np.int64)
        counts = np.zeros(BINS)
        for share, median, sigma in components:
            below = np.array([0.5 * math.erfc(-math.log(edge / median) / (sigma * math.sqrt(2.0))) for edge in edges])
            inside = np.diff(below)
            counts += share * inside / inside.sum()
        return cls.from_counts(name=name, lengths=middles.tolist(), counts=counts.tolist())

    def cut(self, longest: int) -> LengthDistribution:
        """The same with every longer sequence cut to `longest` tokens, as fine-tuning does; the rest of it is dropped."""
        cut = np.minimum(self.lengths, longest)
        return LengthDistribution.from_counts(name=self.name, lengths=cut.tolist(), counts=self.shares.tolist())

    @property
    def mean(self) -> float:
        """Tokens a sequence, E[l]."""
        return float(self.shares @ self.lengths)

    @property
    def mean_square(self) -> float:
        """E[l^2]."""
        return float(self.shares @ self.lengths.astype(np.float64) ** 2)

    @property
    def attended_length(self) -> float:
        """E[l^2] / E[l]: length of the sequence that a token belongs to, mean over tokens."""
        return self.mean_square / self.mean

    def sample(self, count: int, *, seed: int) -> IntArray:
        """(count,) lengths drawn independently; the same for the same seed."""
        return np.random.default_rng(seed).choice(self.lengths, size=count, p=self.shares)
