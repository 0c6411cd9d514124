"""The estimate of a configuration after its own runs, and the ratio of two estimates, against
arithmetic done by hand.
"""

from __future__ import annotations

import math

import numpy as np
import pytest

from hp_tool.loop.calibration.posterior import OwnRuns, combine_with_runs, ratio_interval


def test_the_ratio_of_two_estimates_adds_their_variances() -> None:
    """3 s / 2 s = 1.5. ln(ratio) has variance 0.3^2 + 0.4^2 = 0.5^2; two standard deviations are
    1.0, a factor of e.
    """
    factor, low, high = ratio_interval((3.0, 0.3), (2.0, 0.4), quantile=2.0)
    assert (float(factor), float(low), float(high)) == pytest.approx(
        (1.5, 1.5 / math.e, 1.5 * math.e)
    )


@pytest.mark.parametrize(
    ("logs", "own_log_sd", "mean", "variance"),
    [
        # One run: y = 0.1, u = 0.1^2 = 0.01. (y - m)^2 - u = 0 < v, so v' = v = 0.04.
        # V = 0.04 * 0.01 / (0.04 + 0.01) = 0.008, M = 0.1 * 0.04 / 0.05 = 0.08.
        ([0.1], [0.0], 0.08, 0.008),
        # (y - m)^2 = 0.0441 > v, but 0.0441 - 0.01 = 0.0341 < v: the run's own noise explains the
        # distance. v' = 0.04, V = 0.008, M = 0.21 * 0.04 / 0.05 = 0.168.
        ([0.21], [0.0], 0.168, 0.008),
        # Two runs: 1 / u = 1 / 0.1^2 + 1 / 0.2^2 = 100 + 25 = 125, u = 0.008; y = (100 * 0.5 + 25 *
        # 0.7) / 125 = 0.54. v' = 0.54^2 - 0.008 = 0.2836 > v. v' + u = 0.2916: M = 0.54 * 0.2836 /
        # 0.2916, V = 0.2836 * 0.008 / 0.2916.
        ([0.5, 0.7], [0.0, 0.2], 0.54 * 0.2836 / 0.2916, 0.2836 * 0.008 / 0.2916),
    ],
)
def test_runs_of_a_configuration_correct_its_prediction(
    logs: list[float], own_log_sd: list[float], mean: float, variance: float
) -> None:
    """Row 1 is predicted at ln(t) = m = 0 with v = 0.2^2 = 0.04; runs repeat to 0.1. Row 0 has no
    run and stays.
    """
    runs = OwnRuns(
        row=np.ones(len(logs), dtype=np.int64), value=np.exp(logs), log_sd=np.array(own_log_sd)
    )
    median, log_sd = combine_with_runs(
        np.array([5.0, 1.0]), np.array([0.3, 0.2]), runs=runs, noise_log_sd=0.1
    )
    assert np.log(median) == pytest.approx([math.log(5.0), mean])
    assert log_sd**2 == pytest.approx([0.09, variance])
