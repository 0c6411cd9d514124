"""The Gaussian process is held to scikit-learn's, and its gradient to finite differences."""

from __future__ import annotations

import numpy as np
import pytest
from scipy.optimize import check_grad
from sklearn.gaussian_process import GaussianProcessRegressor
from sklearn.gaussian_process.kernels import ConstantKernel, Matern, WhiteKernel

from hp_tool.calibration.process import NUGGET, Process, distances, most_likely, negative_log_likelihood

PARAMETERS = (0.4, 1.3, 0.1)


def some_process(rows=20, seed=0):
    rng = np.random.default_rng(seed)
    points = rng.normal(size=(rows, 3))
    values = np.sin(points[:, 0]) + 0.1 * rng.normal(size=rows)
    return Process(points=points, values=values, doubt=rng.exponential(0.05, rows), parameters=PARAMETERS)


def reference(process):
    amplitude, length, noise = process.parameters
    kernel = ConstantKernel(amplitude**2) * Matern(length, nu=2.5) + WhiteKernel(noise**2)
    return GaussianProcessRegressor(kernel, alpha=process.doubt + NUGGET, optimizer=None).fit(process.points, process.values)


def test_predictions_and_likelihood_are_those_of_scikit_learn():
    process, points = some_process(), np.random.default_rng(1).normal(size=(7, 3))
    mean, sd = reference(process).predict(points, return_std=True)
    found_mean, found_variance = process.predict(points)
    np.testing.assert_allclose(found_mean, mean, rtol=1e-8)
    np.testing.assert_allclose(found_variance, sd**2, rtol=1e-8)
    theta = np.array([2.0, 1.0, 2.0]) * np.log(PARAMETERS)
    value, _ = negative_log_likelihood(theta, distances(process.points, process.points), process.values, process.doubt)
    assert value == pytest.approx(-reference(process).log_marginal_likelihood())


def test_the_gradient_is_the_likelihoods():
    process = some_process()
    arguments = (distances(process.points, process.points), process.values, process.doubt)
    for theta in (np.zeros(3), np.log([0.2, 3.0, 0.01])):
        error = check_grad(
            lambda t: negative_log_likelihood(t, *arguments)[0], lambda t: negative_log_likelihood(t, *arguments)[1], theta
        )
        assert error < 1e-4


def test_leaving_one_out_is_refitting_without_it():
    process = some_process()
    mean, variance = process.leave_one_out()
    for row in (0, 7):
        rest = np.arange(len(process.values)) != row
        others = Process(
            points=process.points[rest], values=process.values[rest], doubt=process.doubt[rest], parameters=PARAMETERS
        )
        expected_mean, expected_variance = others.predict(process.points[[row]])
        assert mean[row] == pytest.approx(expected_mean[0], abs=1e-6)
        assert variance[row] == pytest.approx(expected_variance[0], rel=1e-6)


def test_parameters_leave_their_prior_as_far_as_the_data_say():
    process = some_process(rows=80)
    held, free = (
        most_likely(
            points=process.points,
            values=process.values,
            doubt=np.zeros(80),
            start=PARAMETERS,
            prior=PARAMETERS,
            prior_log_sd=np.full(3, width),
        )
        for width in (1e-3, 2.0)
    )
    np.testing.assert_allclose(held, PARAMETERS, rtol=0.01)
    assert free[0] > 0.5  # sin has a larger amplitude
    assert free[2] == pytest.approx(0.1, rel=0.35)
