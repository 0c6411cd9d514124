"""The Gaussian process against the closed form, and its hyperparameters against their priors."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from scipy.spatial.distance import cdist

from hp_tool.calibration.fitting import NUGGET, Process

PARAMETERS = (0.4, 1.3, 0.1)


def some_process(rows=20, seed=0):
    rng = np.random.default_rng(seed)
    points = rng.normal(size=(rows, 3))
    values = np.sin(points[:, 0]) + 0.1 * rng.normal(size=rows)
    return Process(points=points, values=values, doubt=rng.exponential(0.05, rows), parameters=PARAMETERS)


def test_each_observation_has_its_own_noise():
    """Rasmussen and Williams (2.23) and (2.24), with Matérn's covariance (4.17) written out."""
    process, points = some_process(), np.random.default_rng(1).normal(size=(7, 3))
    amplitude, length, noise = process.parameters

    def covariance(a, b):
        s = np.sqrt(5.0) * cdist(a, b) / length
        return amplitude**2 * (1.0 + s + s**2 / 3.0) * np.exp(-s)

    inverse = np.linalg.inv(covariance(process.points, process.points) + np.diag(noise**2 + process.doubt))
    cross = covariance(points, process.points)
    mean, variance = process.predict(points)
    np.testing.assert_allclose(mean, cross @ inverse @ process.values, rtol=1e-5)
    np.testing.assert_allclose(variance, amplitude**2 + noise**2 - np.diag(cross @ inverse @ cross.T), rtol=1e-5)


@pytest.mark.filterwarnings("ignore:The optimal value")  # on its bound, as ours
def test_predictions_and_parameters_are_those_of_scikit_learn():
    """Without a prior worth the name, the most likely parameters too."""
    gaussian_process = pytest.importorskip("sklearn.gaussian_process")
    kernels, bounds = gaussian_process.kernels, (1e-4, 10.0)
    process, points = some_process(rows=60), np.random.default_rng(1).normal(size=(7, 3))
    amplitude, length, noise = PARAMETERS
    shared = kernels.ConstantKernel(amplitude**2, bounds) * kernels.Matern(length, (0.1, 10.0), nu=2.5)
    kernel = shared + kernels.WhiteKernel(noise**2, (1e-4, 1.0))
    given = {"kernel": kernel, "alpha": process.doubt + NUGGET}
    mean, sd = (
        gaussian_process.GaussianProcessRegressor(**given, optimizer=None)
        .fit(process.points, process.values)
        .predict(points, return_std=True)
    )
    np.testing.assert_allclose(process.predict(points)[0], mean, rtol=1e-8)
    np.testing.assert_allclose(process.predict(points)[1], sd**2, rtol=1e-8)
    free = gaussian_process.GaussianProcessRegressor(**given).fit(process.points, process.values)
    expected = np.exp(free.kernel_.theta / np.array([2.0, 1.0, 2.0]))
    found = process.fitted(prior=PARAMETERS, prior_log_sd=np.full(3, 1e3)).parameters
    np.testing.assert_allclose(found, expected, rtol=0.02)


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
    process = replace(some_process(rows=80), doubt=np.zeros(80), parameters=PARAMETERS)
    held, free = (process.fitted(prior=PARAMETERS, prior_log_sd=np.full(3, width)).parameters for width in (1e-3, 2.0))
    np.testing.assert_allclose(held, PARAMETERS, rtol=0.01)
    assert free[0] > 0.5  # sin has a larger amplitude
    assert free[2] == pytest.approx(0.1, rel=0.35)
