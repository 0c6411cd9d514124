"""The harness of fits: constants that made the rows, priors where rows say nothing, rows left out,
and written profiles.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import numpy as np
import pytest

from benchmarks.accuracy.comparison import Comparison
from benchmarks.accuracy.fit_frameworks import FIXED
from benchmarks.accuracy.fit_intervals import normal_log_sd
from benchmarks.accuracy.fitting import (
    Fit,
    Floats,
    Prior,
    Values,
    conformal_sd,
    linear_beyond,
    split_by_key,
    with_constants,
)
from hp_tool.cost.uncertainty import NORMAL_QUANTILE

Row = tuple[float, float]
"""(x, y)"""
PRIORS = {"slope": Prior(1.0, 1.0, 0.0, 10.0), "offset": Prior(0.5, 0.1, 0.0, 1.0)}


def errors(rows: Sequence[Row]) -> Callable[[Values], Floats]:
    """Return log ratios of slope x + offset to y, over 1%."""
    x, y = np.array(rows).T
    return lambda values: np.log((values["slope"] * x + values["offset"]) / y) / 0.01


FIT = Fit[Row, Values](priors=PRIORS, constants=dict, errors=errors)
ROWS = [(float(x), 3.0 * x + 0.4) for x in range(1, 9)]


@pytest.mark.parametrize("in_deviations", [True, False])
def test_constants_that_made_the_rows_are_found_with_four_digits(in_deviations: bool) -> None:
    fit = Fit[Row, Values](
        priors=PRIORS, constants=dict, errors=errors, in_deviations=in_deviations
    )
    values = fit(ROWS)
    assert values["slope"] == pytest.approx(3.0, rel=1e-2) and values["offset"] == pytest.approx(
        0.4, abs=0.05
    )
    assert all(value == float(f"{value:.4g}") for value in values.values())


def test_a_row_far_out_of_line_hardly_bends_the_constants() -> None:
    assert FIT([*ROWS, (9.0, 270.0)])["slope"] == pytest.approx(3.0, rel=0.05)


def test_a_constant_that_no_row_tells_stays_at_its_prior() -> None:
    assert FIT([(1e6, 2e6)])["offset"] == pytest.approx(0.5, abs=0.01)


def test_of_several_starts_the_best_solution_is_kept() -> None:
    """cos has a worse minimum at 2 pi, where the prior weighs more."""
    wave = Fit[Row, Values](
        priors={"x": Prior(1.0, 10.0, -1.0, 9.0)},
        constants=dict,
        options={},
        errors=lambda rows: lambda values: np.array([10.0 * (1.0 - np.cos(values["x"]))]),
    )
    (far,) = wave.values([], starts=[{"x": 7.0}]).values()
    (near,) = wave.values([], starts=[{"x": 7.0}, {"x": 0.5}]).values()
    assert far == pytest.approx(2.0 * np.pi, abs=0.3) and near == pytest.approx(0.0, abs=0.3)


def test_each_key_is_left_out_of_the_others_once() -> None:
    parts = list(split_by_key(["a1", "b1", "a2"], lambda row: row[0]))
    assert parts == [("a", ["a1", "a2"], ["b1"]), ("b", ["b1"], ["a1", "a2"])]


def test_log_ratios_beyond_the_scale_count_linearly() -> None:
    near, far, twice = linear_beyond(np.array([0.001, 10.0, -20.0]), 0.1) ** 2
    assert near == pytest.approx(1e-6, rel=1e-3) and twice / far == pytest.approx(2.0, rel=0.01)


def test_scatter_holds_nine_in_ten_and_one_more_to_come() -> None:
    assert conformal_sd(np.arange(1.0, 20.0)) == pytest.approx(18.0 / NORMAL_QUANTILE)


def test_network_constants_go_into_the_link() -> None:
    profile = with_constants(FIXED, {"network_latency_s": 3e-6, "host_launch_s": 2e-5})
    assert (profile.network.latency_s, profile.host_launch_s) == (3e-6, 2e-5)
    assert profile.network.bandwidth_fraction == FIXED.network.bandwidth_fraction


def test_the_likeliest_scatter_counts_repeats_of_a_setting_once() -> None:
    """Root mean square of ln(published / predicted): 0.1 of one setting, 0.2 of another that three
    rows repeat.
    """

    def row(logarithm: float, setting: str) -> Comparison:
        return Comparison(
            source="s",
            model="m",
            what="w",
            published=math.exp(logarithm),
            predicted=1.0,
            setting=setting,
        )

    rows = [row(0.1, "one"), *(row(-0.2, "other") for _ in range(3))]
    assert normal_log_sd(rows) == pytest.approx(math.sqrt((0.1**2 + 0.2**2) / 2.0))
    assert normal_log_sd([]) == 0.0
