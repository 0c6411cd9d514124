"""Runs that contradict each other."""

import numpy as np
import pytest

from hp_tool.loop.calibration.plain import plain_factor


def test_one_factor_replaces_a_fit_that_most_runs_contradict():
    """By hand: the fit classifies the slow half as stalls and predicts the fast half."""
    excess = np.array([0.4, -0.4, 0.4, -0.4, 0.4, -0.4]) + 0.1
    factor = plain_factor(excess=excess, left_out_correction=np.full(6, -0.3), stated_log_sd=0.1)
    assert factor is not None
    # Without the fastest and the slowest, with one run at 0: (0.5 + 0.5 - 0.3 - 0.3) / 5.
    assert factor.log_factor == pytest.approx(0.4 / 5)
    # Without a slow run (0.5 - 0.3 - 0.3) / 4, without a fast one (0.5 + 0.5 - 0.3) / 4.
    errors = np.array([0.5 + 0.1 / 4, -0.3 - 0.7 / 4])
    assert factor.log_sd == pytest.approx(np.sqrt(np.mean(errors**2)))


@pytest.mark.parametrize(
    ("excess", "correction", "stated"),
    [
        pytest.param([1.6, 0.1, 0.1, 0.1, 0.1], [0.1] * 5, 0.1, id="one stall"),
        pytest.param([0.4, -0.4, 0.4, -0.4], [0.0] * 4, 0.3, id="inside the stated interval"),
        pytest.param([0.5, -0.5, 0.5], [-0.5] * 3, 0.1, id="too few runs"),
    ],
)
def test_the_fit_stays_unless_most_runs_contradict_it(excess, correction, stated):
    assert (
        plain_factor(
            excess=np.array(excess), left_out_correction=np.array(correction), stated_log_sd=stated
        )
        is None
    )
