"""Expected gains of sequences of runs, by hand and against brute force."""

from __future__ import annotations

import numpy as np
import pytest

from hp_tool.loop.calibration.prediction import JointSteps
from hp_tool.loop.search.account import Spent, why_stop
from hp_tool.loop.search.acquisition import Proposal
from hp_tool.loop.search.lookahead import further_gains
from tests.search.search_engine import make_problem

MEASURED_S = np.array([1.0, np.nan])
"""The first row ran and is the best, the second did not."""


def gains(steps, *, measured_s=MEASURED_S, hold=1.0):
    holds = np.full(len(measured_s), hold)
    return further_gains(steps, measured_s=measured_s, holds=holds, rng=np.random.default_rng(0))[0]


def normal(*, mean, variance, noise=0.0):
    mean = np.atleast_2d(np.asarray(mean, dtype=float))
    covariance = np.array([np.diag(one) for one in np.atleast_2d(variance)], dtype=float)
    return JointSteps(
        weight=np.full(len(mean), 1.0 / len(mean)),
        mean=mean,
        covariance=covariance,
        noise=np.full(mean.shape, noise),
    )


def test_one_row_wins_what_expected_improvement_says_and_no_more_afterwards():
    """E[max(1 - e^X, 0)] of X ~ N(0, 0.1^2) is 1/2 - e^0.005 Phi(-0.1) = 0.5 - 1.005013 x
    0.460172 = 0.037521.
    """
    found = gains(normal(mean=[0.0, 0.0], variance=[[0.0, 0.01]]))
    assert found == pytest.approx([0.037521] * 4, abs=1e-5)


def test_a_run_that_may_fail_wins_less():
    certain = gains(normal(mean=[0.0, 0.0], variance=[[0.0, 0.01]]))
    assert gains(normal(mean=[0.0, 0.0], variance=[[0.0, 0.01]]), hold=0.5)[0] == pytest.approx(
        0.5 * certain[0]
    )


def test_the_scatter_of_runs_is_no_gain_but_that_of_layouts_is():
    """Without variance of its own, a row wins only if the scatter of 0.1 is of layouts: half of
    0.037521.
    """
    found = gains(normal(mean=[0.0, 0.0], variance=[[0.0, 0.0]], noise=0.01))
    assert found[0] == pytest.approx(0.5 * 0.037521, abs=1e-5)


def test_several_rows_win_the_expected_minimum():
    """Of independent rows without noise, k runs win E[1 - min(1, X_1, ..., X_k)]."""
    measured_s = np.array([1.0, np.nan, np.nan, np.nan, np.nan])
    found = gains(normal(mean=np.zeros(5), variance=[[0.0, *[0.01] * 4]]), measured_s=measured_s)
    draws = np.exp(0.1 * np.random.default_rng(1).standard_normal((400_000, 4)))
    expected = [np.mean(1.0 - np.minimum(1.0, draws[:, :k].min(axis=1))) for k in (1, 2, 3, 4)]
    assert found == pytest.approx(expected, rel=0.12)


def test_a_run_that_tells_explanations_apart_leaves_nothing_for_the_next():
    """Either both rows are faster than the best, or both are slower: the first run, of the row that
    may win most, shows which.
    """
    steps = normal(
        mean=[[0.0, -0.3, -0.6], [0.0, 0.3, 0.6]],
        variance=[[0.0, 1e-6, 1e-6], [0.0, 1e-6, 1e-6]],
    )
    found = gains(steps, measured_s=np.array([1.0, np.nan, np.nan]))
    assert found[0] == pytest.approx(0.5 * (1.0 - np.exp(-0.6)), rel=1e-3)
    assert found[1] == pytest.approx(found[0], rel=1e-3)


def proposal(*further):
    return Proposal(
        row=0,
        expected_gain=0.05,
        reason="expected_improvement",
        hold_probability=1.0,
        further_gains=further,
    )


@pytest.mark.parametrize(
    ("further", "stops"),
    [
        ((0.009, 0.015, 0.025, 0.039), True),
        ((0.011, 0.012, 0.012, 0.012), False),
        ((0.002, 0.021, 0.021, 0.021), False),
        ((0.002, 0.003, 0.004, 0.041), False),
    ],
)
def test_a_search_stops_where_no_sequence_is_worth_its_runs(further, stops):
    """Each run must save `min_gain_fraction`, 1%, on average of some sequence."""
    reason = why_stop(
        settings=make_problem(budget_runs=20).settings,
        spent=Spent(profile_runs=6, gpu_seconds=0.0),
        next_run_gpu_seconds=0.0,
        proposal=proposal(*further),
    )
    assert (reason == "no_expected_gain") is stops
