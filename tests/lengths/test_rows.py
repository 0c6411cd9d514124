"""Distributions, packing, and what unequal rows make replicas wait."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hp_tool.cost.lengths.imbalance import expected_extra
from hp_tool.cost.lengths.sequences import (
    LengthDistribution,
    Rows,
    best_fit,
    packed_rows,
    padded_rows,
)

ROW = 4096
lengths = st.lists(st.integers(1, ROW), min_size=1, max_size=60)
few = settings(max_examples=15)


def distribution(values: list[int]) -> LengthDistribution:
    return LengthDistribution.from_counts(name="test", lengths=values, counts=[1.0] * len(values))


@few
@given(lengths, st.randoms(use_true_random=False))
def test_the_order_of_the_sequences_does_not_matter(values: list[int], random) -> None:  # type: ignore[no-untyped-def]
    shuffled = list(values)
    random.shuffle(shuffled)
    one, other = (
        packed_rows(distribution(values), row_tokens=ROW),
        packed_rows(distribution(shuffled), row_tokens=ROW),
    )
    assert (one.mean_tokens, one.mean_squares) == (other.mean_tokens, other.mean_squares)
    np.testing.assert_array_equal(one.squares, other.squares)


@few
@given(lengths)
def test_packing_keeps_every_token_and_overfills_no_row(values: list[int]) -> None:
    packed = best_fit(np.array(values), capacity=ROW)
    assert packed.tokens.sum() == sum(values) and packed.tokens.max() <= ROW
    assert packed.squares.sum() == pytest.approx(sum(value**2 for value in values))
    assert sorted(set(packed.row_of.tolist())) == list(range(len(packed.tokens)))
    # Best fit opens a row only for what no open row takes: at most one row is no more than half
    # full.
    assert np.count_nonzero(packed.tokens <= ROW / 2) <= 1


@few
@given(lengths)
def test_a_token_attends_to_its_own_sequence_packed_or_not(values: list[int]) -> None:
    attended = sum(value**2 for value in values) / sum(values)
    for rows in (
        packed_rows(distribution(values), row_tokens=ROW),
        padded_rows(distribution(values), row_tokens=ROW),
    ):
        assert rows.mean_squares / rows.mean_tokens == pytest.approx(attended)
        assert rows.squares.mean() == pytest.approx(rows.mean_squares)


@pytest.mark.parametrize("parts", [1, 2, 8, 64])
def test_equal_lengths_that_divide_the_row_fill_it(parts: int) -> None:
    rows = packed_rows(distribution([ROW // parts]), row_tokens=ROW)
    assert (rows.mean_tokens, rows.mean_squares) == (ROW, ROW**2 / parts)
    assert expected_extra(rows, batch=64, replicas=8, micro_batch=1, fill=3.0) == 0.0


def test_sequences_longer_than_the_row_are_cut() -> None:
    rows = packed_rows(distribution([10 * ROW]), row_tokens=ROW)
    assert (rows.mean_tokens, rows.mean_squares) == (ROW, ROW**2)


def test_a_log_normal_has_the_moments_of_one() -> None:
    """Far from the limits: mean exp(mu + sigma^2/2), mean square exp(2 mu + 2 sigma^2)."""
    found = LengthDistribution.log_normal_mixture(
        name="", components=[(1.0, 2000, 0.5)], shortest=1, longest=1 << 20
    )
    assert found.shares.sum() == pytest.approx(1.0)
    assert found.mean == pytest.approx(2000 * math.exp(0.125), rel=2e-3)
    assert found.mean_square == pytest.approx(2000**2 * math.exp(0.5), rel=2e-3)


def unequal(seed: int) -> Rows:
    squares = np.random.default_rng(seed).uniform(0.1, 1.0, 500) * ROW**2
    return Rows(
        row_tokens=ROW, mean_tokens=ROW, mean_squares=float(squares.mean()), squares=squares
    )


@few
@given(
    st.integers(0, 100), st.sampled_from((1, 2, 4, 8)), st.sampled_from((1, 2, 4)), st.floats(0, 8)
)
def test_waiting_only_grows_with_replicas_pipelines_and_lockstep(
    seed: int, d: int, b: int, fill: float
) -> None:
    rows = unequal(seed)
    assert expected_extra(rows, batch=64, replicas=1, micro_batch=b) == pytest.approx(0.0, abs=1e-6)
    found = expected_extra(rows, batch=64, replicas=d, micro_batch=b, fill=fill)
    assert found == expected_extra(rows, batch=64, replicas=d, micro_batch=b, fill=fill)
    assert (
        0.0 <= found <= expected_extra(rows, batch=64, replicas=d, micro_batch=b, fill=fill + 1.0)
    )
    assert (
        found
        <= expected_extra(rows, batch=64, replicas=d, micro_batch=b, fill=fill, lockstep=d)
        * (1 + 1e-9)
        + 1e-9
    )
    # Without a pipeline only a replica's sum counts: half as many micro-batches, each twice as
    # long.
    once, half = (
        expected_extra(rows, batch=64, replicas=d, micro_batch=size * b) for size in (1, 2)
    )
    assert once == pytest.approx(2 * half, abs=1e-6)


@pytest.mark.parametrize("replicas", [2, 3, 8])
def test_the_expected_maximum_is_that_of_order_statistics(replicas: int) -> None:
    """One uniform row a replica: E[max of n] = n/(n+1)."""
    squares = np.linspace(0.0, 1.0, 10_001) * ROW**2
    rows = Rows(row_tokens=ROW, mean_tokens=ROW, mean_squares=ROW**2 / 2, squares=squares)
    batches = [
        expected_extra(rows, batch=replicas * scale, replicas=replicas * scale, micro_batch=1) / ROW
        for scale in (1, 100)
    ]
    for scale, found in zip((1, 100), batches, strict=True):
        n = replicas * scale
        assert found == pytest.approx(n / (n + 1) - 0.5, abs=0.08)
    assert batches[0] < batches[1]
