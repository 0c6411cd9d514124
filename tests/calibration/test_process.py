"""The linear Gaussian model against the closed form, and its scales against their priors."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from scipy.optimize import approx_fprime

from hp_tool.loop.assumptions import assumed
from hp_tool.loop.calibration.fitting import COMPONENTS, NUGGET, Process, Rows

LOGS = np.array([0.5, -0.1, 0.4, 0.8, 0.1])


def some_rows(count=20, seed=0):
    rng = np.random.default_rng(seed)
    return Rows(
        jacobian=rng.uniform(0.1, 0.5, (count, 3)),
        model=rng.integers(0, 3, (count, 2)).astype(float),
        layout=rng.normal(size=(count, 3)),
        model_log_sd=rng.uniform(0.1, 0.3, count),
        layout_log_sd=rng.uniform(0.1, 0.3, count),
        noise_log_sd=np.full(count, 0.1),
    )


def some_process(count=20, seed=0, logs=LOGS):
    rng = np.random.default_rng(seed)
    return Process(
        rows=some_rows(count, seed),
        values=rng.normal(0.1, 0.3, count),
        doubt=rng.exponential(0.05, count),
        logs=logs,
    )


def covariance(process, one, other):
    """Written out, with scikit-learn's Matern."""
    kernels = pytest.importorskip("sklearn.gaussian_process.kernels")

    matern = kernels.Matern(assumed().variances.similar_distance, nu=2.5)
    common, groups, model, layout, _ = process.scales
    found = one.jacobian @ np.diag([common, groups, groups]) @ other.jacobian.T
    found = found + model * np.outer(one.model_log_sd, other.model_log_sd) * matern(
        one.model, other.model
    )
    return found + layout * np.outer(one.layout_log_sd, other.layout_log_sd) * matern(
        one.layout, other.layout
    )


def test_predictions_are_the_closed_form():
    """Rasmussen and Williams (2.23) and (2.24): the parameters' effect and the rest add up to the
    mean.
    """
    process, asked = some_process(), some_rows(7, seed=1)
    noise = process.scales[-1] * process.rows.noise_log_sd**2 + process.doubt + NUGGET
    inverse = np.linalg.inv(covariance(process, process.rows, process.rows) + np.diag(noise))
    cross = covariance(process, asked, process.rows)
    mean, variance = process.predict(asked)
    np.testing.assert_allclose(
        mean + asked.jacobian @ process.parameters, cross @ inverse @ process.values, rtol=1e-8
    )
    whole = np.diag(covariance(process, asked, asked)) + process.scales[-1] * asked.noise_log_sd**2
    np.testing.assert_allclose(variance, whole - np.diag(cross @ inverse @ cross.T), rtol=1e-8)


def test_leaving_out_is_fitting_without():
    process = some_process()
    groups = np.arange(20) // 4
    mean, variance = process.left_out(groups)
    alone, alone_variance = process.left_out()
    for one, (rows, found, spread) in enumerate(
        [(groups == 2, mean, variance), (np.arange(20) == 5, alone, alone_variance)]
    ):
        rest = np.flatnonzero(~rows)
        fewer = Process(
            rows=Rows(**{name: getattr(process.rows, name)[rest] for name in Rows.__slots__}),
            values=process.values[rest],
            doubt=process.doubt[rest],
            logs=process.logs,
        )
        asked = Rows(**{name: getattr(process.rows, name)[rows] for name in Rows.__slots__})
        effects, expected = fewer.predict(asked)
        np.testing.assert_allclose(
            found[rows], effects + asked.jacobian @ fewer.parameters, rtol=1e-6, err_msg=str(one)
        )
        np.testing.assert_allclose(spread[rows], expected + NUGGET, rtol=1e-6)


def test_scales_are_the_most_likely_ones():
    """No step from them raises marginal likelihood times prior."""
    process = some_process(logs=np.zeros(5)).fitted()

    def loss(logs):
        one = replace(process, logs=logs)
        matrix = covariance(one, one.rows, one.rows) + np.diag(
            one.scales[-1] * one.rows.noise_log_sd**2 + one.doubt + NUGGET
        )
        value = (
            0.5 * one.values @ np.linalg.solve(matrix, one.values)
            + 0.5 * np.linalg.slogdet(matrix)[1]
        )
        return value + one.improbability(logs)[0]

    np.testing.assert_allclose(approx_fprime(process.logs, loss, 1e-6), 0.0, atol=0.03)


def test_what_is_stated_is_doubted_upwards_before_it_is_downwards():
    """A third and three times the scatter that is stated, in six runs."""
    process = some_process(6)
    values = process.values / process.values.std() * 0.1
    rows = replace(
        process.rows,
        **{name: np.full(6, 0.05) for name in ("model_log_sd", "layout_log_sd", "noise_log_sd")},
    )
    narrow, wide = (
        replace(
            process,
            rows=rows,
            values=factor * values,
            doubt=np.zeros(6),
            logs=np.zeros(len(COMPONENTS)),
        ).fitted()
        for factor in (1.0 / 9.0, 9.0)
    )
    assert narrow.logs.min() < 0.0 < wide.logs.max()
    assert wide.logs.max() > -3.0 * narrow.logs.min()
