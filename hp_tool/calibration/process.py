"""A Gaussian process over few points, with noise of its own for each: conditioned, left out one by one, fitted.

Rasmussen and Williams, Gaussian Processes for Machine Learning (2006): algorithm 2.1, equations 5.9 and 5.10 to 5.12.
A proposal fits some dozens of them. scikit-learn's takes ten times as long (it works out distances and parameter
names again at each step of the optimizer) and seconds to import; the tests hold this one to it.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np

from hp_tool.calibration.evidence import FloatArray

Parameters = tuple[float, float, float]
"""Amplitude (standard deviation of the function), its correlation length, standard deviation of one observation's noise."""

NUGGET = 1e-8
MAX_ITERATIONS = 15
_BOUNDS = np.log([(1e-4, 10.0), (0.1, 10.0), (1e-4, 1.0)])
"""Of amplitude^2, length, noise^2."""
_POWERS = np.array([2.0, 1.0, 2.0])


@dataclass(frozen=True, kw_only=True)
class Process:
    """y_i = g(x_i) + e_i with g of mean 0 and covariance a^2 M(|x - x'| / l), M Matérn's of smoothness 5/2, and
    e_i ~ N(0, noise^2 + doubt_i)."""

    points: FloatArray
    """(n, k)"""
    values: FloatArray
    """(n,) y"""
    doubt: FloatArray
    """(n,) variance of an observation beyond the noise they all have."""
    parameters: Parameters

    @cached_property
    def _inverse(self) -> FloatArray:
        """(n, n) of the covariance of the observations."""
        amplitude, length, noise = self.parameters
        covariance = amplitude**2 * matern(distances(self.points, self.points) / length)[0]
        return _inverse_and_log_determinant(covariance, noise**2 + self.doubt)[0]

    def predict(self, points: FloatArray) -> tuple[FloatArray, FloatArray]:
        """Mean of g and variance of an observation without doubt, each (m,), at m points."""
        amplitude, length, noise = self.parameters
        cross = amplitude**2 * matern(distances(points, self.points) / length)[0]
        reduction = np.einsum("mn,mn->m", cross @ self._inverse, cross)
        return cross @ (self._inverse @ self.values), np.maximum(amplitude**2 - reduction, 0.0) + noise**2

    def leave_one_out(self) -> tuple[FloatArray, FloatArray]:
        """The same for each observation given the others, each (n,)."""
        variance = 1.0 / np.diag(self._inverse)
        noise = self.parameters[-1]
        return self.values - variance * (self._inverse @ self.values), np.maximum(variance - self.doubt, noise**2)


def distances(a: FloatArray, b: FloatArray) -> FloatArray:
    """(m, n) Euclidean."""
    from scipy.spatial.distance import cdist

    return np.asarray(cdist(a, b), dtype=np.float64)


def matern(ratio: FloatArray) -> tuple[FloatArray, FloatArray]:
    """Correlation (1 + s + s^2/3) e^-s, s = sqrt(5) distance / length, and its derivative by ln length."""
    s = np.sqrt(5.0) * ratio
    decay = np.exp(-s)
    return (1.0 + s + s**2 / 3.0) * decay, s**2 * (1.0 + s) / 3.0 * decay


def most_likely(
    *, points: FloatArray, values: FloatArray, doubt: FloatArray, start: Parameters, prior: Parameters, prior_log_sd: FloatArray
) -> Parameters:
    """argmax of the marginal likelihood times log-normal priors: `prior` are their medians, `prior_log_sd` (3,) widths."""
    from scipy.optimize import minimize

    between = distances(points, points)
    centre, width = _POWERS * np.log(prior), _POWERS * prior_log_sd

    def posterior(theta: FloatArray) -> tuple[float, FloatArray]:
        value, gradient = negative_log_likelihood(theta, between, values, doubt)
        z = (theta - centre) / width
        return value + 0.5 * float(z @ z), gradient + z / width

    found = minimize(
        posterior, _POWERS * np.log(start), jac=True, bounds=_BOUNDS, method="L-BFGS-B", options={"maxiter": MAX_ITERATIONS}
    )
    amplitude, length, noise = np.exp(found.x / _POWERS).tolist()
    return amplitude, length, noise


def negative_log_likelihood(
    theta: FloatArray, between: FloatArray, values: FloatArray, doubt: FloatArray
) -> tuple[float, FloatArray]:
    """-ln p(values), with its gradient by theta = (ln amplitude^2, ln length, ln noise^2); `between`: (n, n) distances."""
    signal, length, noise = np.exp(theta)
    correlation, slope = matern(between / length)
    inverse, log_determinant = _inverse_and_log_determinant(signal * correlation, noise + doubt)
    weights = inverse @ values
    # d(-ln p)/dt = tr((K^-1 - w w^T) dK/dt) / 2
    pull = inverse - np.outer(weights, weights)
    gradient = 0.5 * np.array([signal * np.vdot(pull, correlation), signal * np.vdot(pull, slope), noise * np.trace(pull)])
    return 0.5 * float(values @ weights + log_determinant + len(values) * np.log(2 * np.pi)), gradient


def _inverse_and_log_determinant(covariance: FloatArray, variance: FloatArray) -> tuple[FloatArray, float]:
    """Of covariance + diag(variance); the nugget keeps it positive definite whatever the parameters."""
    from scipy.linalg.lapack import dpotrf, dpotri

    total = covariance.copy()
    total[np.diag_indices_from(total)] += variance + NUGGET
    lower, failed = dpotrf(total, lower=1, overwrite_a=1, clean=1)
    if failed:
        raise np.linalg.LinAlgError("covariance of measurements is not positive definite")
    half = dpotri(lower, lower=1)[0]
    inverse = np.tril(half) + np.tril(half, -1).T
    return inverse, 2.0 * float(np.sum(np.log(np.diag(lower))))
