"""Mixtures of explanations: their intervals, and what residuals with a structure do to them."""

from __future__ import annotations

import numpy as np
import pytest
from scipy.stats import norm

from hp_tool.loop.calibration import Evidence, fit_calibration, prior_for
from hp_tool.loop.calibration.step_time import mixture_interval

RUNS = 8


def test_a_mixture_of_one_normal_is_that_normal() -> None:
    center, log_sd = mixture_interval(
        np.array([[0.3, -1.0]]), np.array([[0.1, 0.2]]), np.array([1.0])
    )
    np.testing.assert_array_equal(center, [0.3, -1.0])
    np.testing.assert_array_equal(log_sd, [0.1, 0.2])


def test_the_interval_of_a_mixture_holds_nine_tenths_of_it() -> None:
    centers, spreads = np.array([[0.0], [1.0]]), np.array([[0.1], [0.3]])
    weight = np.array([0.7, 0.3])
    (center,), (log_sd,) = mixture_interval(centers, spreads, weight)
    assert center == pytest.approx(0.3)
    low, high = center - 1.6449 * log_sd, center + 1.6449 * log_sd
    parts = norm.cdf(high, centers[:, 0], spreads[:, 0]) - norm.cdf(
        low, centers[:, 0], spreads[:, 0]
    )
    assert weight @ parts == pytest.approx(0.9, abs=1e-4)


def width(*, recompute_factor: float) -> tuple[float, float]:
    """(median, log_sd) of a layout that recomputes half of its step, of 1 s as predicted, after
    runs of which one recomputed a fifth.
    """
    recompute = np.zeros(RUNS)
    recompute[0] = 0.2
    parts = {"compute": 1.0 - recompute, "recompute": recompute}
    noise = 0.02 * np.random.default_rng(0).standard_normal(RUNS)
    measured = (parts["compute"] + recompute_factor * recompute) * np.exp(noise)
    evidence = Evidence(
        measurement_ids=tuple(map(str, range(RUNS))),
        parts_s=parts,
        layer_passes=np.zeros(RUNS),
        memory_bytes=np.ones(RUNS),
        capacity_bytes=np.full(RUNS, 2.0),
        measured_step_s=measured,
        measured_memory_bytes=np.full(RUNS, np.nan),
        out_of_memory=np.zeros(RUNS, dtype=bool),
    )
    fit = fit_calibration(evidence=evidence, prior=prior_for(kind="cpu")).step_time
    step = fit.predict(
        parts_s={"compute": np.array([0.5]), "recompute": np.array([0.5])},
        layer_passes=np.zeros(1),
    )
    return float(step.median_s[0]), float(step.log_sd[0])


def test_a_part_that_is_off_moves_layouts_with_more_of_it_and_widens_their_interval() -> None:
    usual_s, usual_sd = width(recompute_factor=1.0)
    slow_s, slow_sd = width(recompute_factor=3.0)
    assert usual_s == pytest.approx(1.0, rel=0.1)
    assert slow_s > 1.4
    assert slow_sd > usual_sd
    assert 1.0 < 2.0 / slow_s < np.exp(1.6449 * slow_sd)
