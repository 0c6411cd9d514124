"""Figures of groups of evidence, on rows whose scatter is known."""

from __future__ import annotations

import math
from dataclasses import replace
from statistics import NormalDist

import numpy as np
import pytest

from benchmarks.accuracy.comparison import Comparison
from benchmarks.accuracy.groups import Group, LeftOut, figures, pools, votes

QUANTILES = [NormalDist().inv_cdf((k + 0.5) / 1000) for k in range(1000)]


def rows(*, scatter: float, stated: float | None) -> list[Comparison]:
    """1,000 rows whose logarithms of predicted over published are spread normally, in intervals for
    a scatter of `stated`.
    """
    found = []
    for x in QUANTILES:
        predicted = float(np.exp(scatter * x))
        bounds = (
            {}
            if stated is None
            else {
                "low": predicted / math.exp(1.6449 * stated),
                "high": predicted * math.exp(1.6449 * stated),
            }
        )
        found.append(
            Comparison(
                source="s",
                model="m",
                what=f"{scatter} {x}",
                published=1.0,
                predicted=predicted,
                **bounds,
            )
        )
    return found


def group(left_out: LeftOut, *, scatter: float, stated: float | None = None) -> Group:
    return Group(
        title=f"{left_out} {scatter}",
        left_out=left_out,
        saw="",
        rows=rows(scatter=scatter, stated=stated),
    )


def test_coverage_is_that_of_the_scatter() -> None:
    honest, narrow = (figures(rows(scatter=scatter, stated=0.05)) for scatter in (0.05, 0.1))
    assert honest["coverage"] == pytest.approx(0.9, abs=2e-3)
    # Half the true width: 1.645 / 2 standard deviations hold 59%.
    assert narrow["coverage"] == pytest.approx(2 * NormalDist().cdf(1.6449 / 2) - 1, abs=2e-3)
    assert honest["width"] == pytest.approx(math.exp(2 * 1.6449 * 0.05))


def test_range_of_right_coverage_is_the_binomial_one() -> None:
    """Of 20, 15 to 20 lie inside a right 90% interval in 95% of samples; of 80, 66 to 77."""
    for count, low, high in ((20, 0.75, 1.0), (80, 66 / 80, 77 / 80)):
        assert figures(rows(scatter=0.1, stated=0.1)[:count])["coverage_range"] == [low, high]


def test_score_is_best_at_the_true_width() -> None:
    scores = [
        figures(rows(scatter=0.05, stated=stated))["interval_score"] for stated in (0.03, 0.05, 0.1)
    ]
    assert scores[1] < min(scores[0], scores[2])


def test_score_of_a_row_outside_is_its_width_and_twenty_times_its_distance() -> None:
    row = Comparison(
        source="s",
        model="m",
        what="w",
        published=math.e,
        predicted=1.0,
        low=math.exp(-0.5),
        high=math.exp(0.5),
    )
    assert figures([row])["interval_score"] == pytest.approx(1.0 + 20.0 * 0.5)


def test_no_interval_is_no_coverage() -> None:
    assert "coverage" not in figures(rows(scatter=0.1, stated=None))


def test_releases_of_one_setting_are_one_vote_their_median() -> None:
    base = Comparison(source="s", model="m", what="w", published=1.0, predicted=1.0, setting="one")
    three = [base, replace(base, published=1.25), replace(base, published=4.0)]
    alone = replace(base, setting="other", published=2.0)
    assert sorted(row.published for row in votes([*three, alone])) == [1.25, 2.0]
    found = figures([*three, alone])
    assert (found["rows"], found["configurations"]) == (4, 2)
    assert found["mean_error"] == pytest.approx((0.2 + 0.5) / 2)


def test_median_is_of_the_ratio_where_releases_are_predicted_differently() -> None:
    base = Comparison(source="s", model="m", what="w", published=1.0, predicted=1.0, setting="one")
    (row,) = votes([base, replace(base, published=3.0, predicted=2.0)])
    assert row.error == pytest.approx(1.0 / 1.25 - 1.0)


def test_refused_rows_are_counted_by_code_and_have_no_vote_without_a_prediction() -> None:
    base = Comparison(
        source="s", model="m", what="w", published=1.0, predicted=1.1, refused="memory"
    )
    found = figures([base, replace(base, predicted=math.nan, refused="unsupported")])
    assert found["refused"] == {"memory": 1, "unsupported": 1}
    assert found["configurations"] == 1 and found["mean_error"] == pytest.approx(0.1)


def test_pool_has_each_row_once_and_none_that_was_seen() -> None:
    honest = group("model", scatter=0.05, stated=0.05)
    again = replace(honest, title="another way", rows=rows(scatter=0.05, stated=1.0))
    seen, foreign = group("seen", scatter=0.9), group("framework", scatter=0.8)
    found = pools([honest, again, seen, foreign])
    assert set(found) == {"training steps"}
    assert found["training steps"]["rows"] == 1000
    assert found["training steps"]["coverage"] == figures(honest.rows)["coverage"]


def test_parts_come_in_order() -> None:
    parts = [
        replace(row, part=part)
        for row, part in zip(rows(scatter=0.1, stated=None), ("16 nodes", "2 nodes"), strict=False)
    ]
    assert list(Group(title="t", left_out="model", saw="", rows=parts).parts) == [
        "2 nodes",
        "16 nodes",
    ]
