"""Runs that contradict each other."""

import numpy as np
import pytest

from hp_tool.loop.calibration.plain import plain_factor


def test_runs_that_contradict_each_other_are_told_by_one_factor():
    """By hand: the fit takes the slow half for stalls and the fast half for the truth, 0.8 below
    them.
    """
    excess = np.array([0.4, -0.4, 0.4, -0.4, 0.4, -0.4]) + 0.1
    fitted = np.full(6, -0.3)
    factor = plain_factor(excess=excess, left_out_correction=fitted, slow=1.0 * (excess > 0.0))
    assert factor is not None
    assert factor.log_factor == pytest.approx(0.6 / 7)
    others = (0.6 - excess) / 6
    assert factor.log_sd == pytest.approx(np.sqrt(np.mean((excess - others) ** 2)))


@pytest.mark.parametrize(
    ("excess", "correction", "slow"),
    [
        ([1.6, 0.1, 0.1, 0.1, 0.1], [0.1] * 5, [1, 0, 0, 0, 0]),  # one stall
        (
            [2.0, 2.0, 2.0, 0.0, 0.0, 0.0],
            [0.0] * 6,
            [1, 1, 1, 0, 0, 0],
        ),  # stalls that a factor tells no better
        ([0.5, -0.5, 0.5], [-0.5] * 3, [1, 0, 1]),  # too few
    ],
)
def test_a_fit_stands_where_a_factor_is_no_better(excess, correction, slow):
    assert (
        plain_factor(
            excess=np.array(excess), left_out_correction=np.array(correction), slow=np.array(slow)
        )
        is None
    )
