"""The table of interval coverage, on rows whose scatter is known."""

from __future__ import annotations

from dataclasses import replace
from statistics import NormalDist

import numpy as np
import pytest

from benchmarks.accuracy.coverage import as_text, coverage
from benchmarks.accuracy.comparison import Comparison
from benchmarks.accuracy.sections import Role, Section

QUANTILES = [NormalDist().inv_cdf((k + 0.5) / 1000) for k in range(1000)]


def section(role: Role, *, scatter: float, stated: float | None) -> Section:
    """1,000 rows whose logarithms of predicted over published are spread normally."""
    rows = [
        Comparison(source="s", model="m", what=f"{scatter} {x}", published=1.0, predicted=float(np.exp(scatter * x)))
        for x in QUANTILES
    ]
    return Section(title=f"{role} {scatter}", role=role, fitted_on="", comparisons=rows, stated_log_sd=stated)


def test_shares_are_those_of_the_scatter() -> None:
    honest, narrow = section("held out", scatter=0.05, stated=0.05), section("headline", scatter=0.1, stated=0.05)
    seen, silent = section("in sample", scatter=0.9, stated=0.05), section("held out", scatter=0.9, stated=None)
    lines = coverage([honest, seen, narrow, silent])
    assert [line["title"] for line in lines] == [honest.title, narrow.title, "all held-out rows, each once"]
    assert [line["rows"] for line in lines] == [1000, 1000, 2000]
    assert lines[0]["within_50%"] == pytest.approx(0.5, abs=2e-3)
    assert lines[0]["within_90%"] == pytest.approx(0.9, abs=2e-3)
    # Half the true width: 1.645 / 2 standard deviations hold 59 %.
    assert lines[1]["within_90%"] == pytest.approx(2 * NormalDist().cdf(1.6449 / 2) - 1, abs=2e-3)
    assert lines[2]["within_90%"] == pytest.approx((lines[0]["within_90%"] + lines[1]["within_90%"]) / 2)
    assert "2000 rows" in as_text(lines)


def test_a_row_left_out_in_two_ways_counts_once() -> None:
    once = section("held out", scatter=0.05, stated=0.05)
    again = replace(once, title="another way", stated_log_sd=1.0)
    lines = coverage([once, again])
    assert [line["rows"] for line in lines] == [1000, 1000, 1000]
    assert lines[2]["within_90%"] == lines[0]["within_90%"] < lines[1]["within_90%"]


def test_the_side_decides_the_width_where_sides_differ() -> None:
    """More published than predicted is within 0.1, less within 0.05; the rows scatter by 0.1 on both."""
    one = replace(section("held out", scatter=0.1, stated=0.1), stated_log_sd_below=0.05)
    line = coverage([one])[0]
    assert line["within_90%"] == pytest.approx(0.45 + (2 * NormalDist().cdf(1.6449 / 2) - 1) / 2, abs=2e-3)
    assert one.summary()["within_interval_share"] == pytest.approx(line["within_90%"], abs=2e-3)


def test_nothing_held_out_is_no_table() -> None:
    assert coverage([section("in sample", scatter=0.1, stated=0.1)]) == []
