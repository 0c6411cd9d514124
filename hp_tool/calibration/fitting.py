"""What fits share: the widths of their priors, posteriors that are robust to outliers, and Gaussian processes over few points.

Rasmussen and Williams, Gaussian Processes for Machine Learning (2006): algorithm 2.1, leave-one-out by equation 5.12. Plain
NumPy: to import scikit-learn takes longer than a whole estimate.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np

from hp_tool.calibration.evidence import FloatArray
from hp_tool.domain.hardware import Kind
from hp_tool.units import GIB


@dataclass(frozen=True, slots=True, kw_only=True)
class Prior:
    """Widths of the prior. Factors are log-normal around 1; overheads are half-normal, most likely 0."""

    name: str
    common_log_sd: float
    """One factor on every part: the device as a whole is faster or slower than its profile says."""
    group_log_sd: float
    """A further factor on each group of parts (compute, communication, memory-bound)."""
    step_overhead_s: float
    """Scale of a fixed cost of each optimizer step: data loading, launch of the schedule, Python."""
    layer_overhead_s: float
    """Scale of a fixed cost of one micro-batch's forward and backward pass through one layer: kernel launches."""
    residual_log_sd: float
    """What remains per configuration once the factors are right."""
    memory_log_sd: float
    """One factor on the predicted bytes."""
    memory_overhead_bytes: float
    """Scale of bytes that every configuration needs on top."""
    memory_residual_log_sd: float
    """What remains of memory per configuration."""
    degrees_of_freedom: float = 4.0
    """Observations that the residual widths above are worth against measured residuals."""
    alike_log_sd: float = 0.15
    """Median of the standard deviation of what configurations alike have in common beyond the factors."""
    alike_length: float = 1.0
    """Median of the distance over which they have, in units of the features' scales."""
    slow_share: float = 0.1
    """Share of runs that stall; see `residual`."""


GPU_PRIOR = Prior(
    name="gpu",
    common_log_sd=0.10,
    group_log_sd=0.20,
    step_overhead_s=5e-3,
    layer_overhead_s=50e-6,
    residual_log_sd=0.06,
    memory_log_sd=0.05,
    memory_overhead_bytes=0.5 * GIB,
    memory_residual_log_sd=0.04,
)
"""A device with a datasheet and an efficiency profile: predictions are within tens of per cent."""

CPU_PRIOR = Prior(
    name="cpu",
    common_log_sd=1.0,
    group_log_sd=0.7,
    step_overhead_s=20e-3,
    layer_overhead_s=1e-3,
    residual_log_sd=0.15,
    memory_log_sd=0.30,
    memory_overhead_bytes=0.5 * GIB,
    memory_residual_log_sd=0.10,
)
"""Hosts differ by whole factors from each other and share their cores: the profile says little until something ran."""


def prior_for(*, kind: Kind) -> Prior:
    """The default prior of a device kind."""
    return CPU_PRIOR if kind == "cpu" else GPU_PRIOR


Parameters = tuple[float, float, float]
"""Amplitude (standard deviation of the function), its correlation length, standard deviation of one observation's noise."""

NUGGET = 1e-8
OPTIONS = {"maxiter": 15, "ftol": 1e-4}
"""Of the search for hyperparameters: their priors are wide, the last digits of the likelihood decide nothing."""
_BOUNDS = np.log([(1e-4, 10.0), (0.1, 10.0), (1e-4, 1.0)])
"""Of amplitude^2, length, noise^2."""
_POWERS = np.array([2.0, 1.0, 2.0])
_KNEE = 1.5
"""Standardised residual beyond which a row's pull grows only linearly (soft L1)."""


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
        """(n, n) of the lower Cholesky factor of the observations' covariance."""
        return np.asarray(np.linalg.inv(np.linalg.cholesky(self._covariances(self.parameters)[0])))

    def _covariances(self, parameters: Parameters) -> tuple[FloatArray, FloatArray, FloatArray]:
        """(n, n) of the observations; the part that is g's, and its derivative by ln(length)."""
        amplitude, length, noise = parameters
        shared, slope = (amplitude**2 * each for each in matern(self._squares, length=length))
        return shared + np.diag(noise**2 + self.doubt + NUGGET), shared, slope

    @cached_property
    def _squares(self) -> FloatArray:
        return squared_distances(self.points, self.points)

    def predict(self, points: FloatArray) -> tuple[FloatArray, FloatArray]:
        """Mean of g and variance of an observation without doubt, each (m,), at m points."""
        amplitude, length, noise = self.parameters
        covariance = amplitude**2 * matern(squared_distances(points, self.points), length=length)[0]
        explained = covariance @ self._inverse.T
        variance = amplitude**2 + noise**2 - np.einsum("mn,mn->m", explained, explained)
        return explained @ (self._inverse @ self.values), variance

    def leave_one_out(self) -> tuple[FloatArray, FloatArray]:
        """The same for each observation given the others, each (n,)."""
        variance = 1.0 / np.einsum("mn,mn->n", self._inverse, self._inverse)
        pull = self._inverse.T @ (self._inverse @ self.values)
        return self.values - variance * pull, np.maximum(variance - self.doubt, self.parameters[-1] ** 2)

    def fitted(self, *, prior: Parameters, prior_log_sd: FloatArray) -> Process:
        """The process under its most likely parameters, searched from its own: argmax of the marginal likelihood times
        log-normal priors, whose medians are `prior` and whose widths are `prior_log_sd` (3,).
        """
        from scipy.optimize import minimize

        centre, width = _POWERS * np.log(prior), _POWERS * prior_log_sd

        def posterior(theta: FloatArray) -> tuple[float, FloatArray]:
            amplitude, length, noise = np.exp(theta / _POWERS).tolist()
            covariance, shared, slope = self._covariances((amplitude, length, noise))
            factor = np.linalg.cholesky(covariance)
            inverse = np.linalg.inv(factor)
            pull = inverse.T @ (inverse @ self.values)
            curve = np.outer(pull, pull) - inverse.T @ inverse
            gradient = np.array([np.vdot(curve, shared), np.vdot(curve, slope), noise**2 * np.trace(curve)])
            z = (theta - centre) / width
            value = 0.5 * float(self.values @ pull) + float(np.log(np.diag(factor)).sum()) + 0.5 * float(z @ z)
            return value, z / width - 0.5 * gradient

        initial = _POWERS * np.log(self.parameters)
        result = minimize(posterior, initial, jac=True, bounds=_BOUNDS, method="L-BFGS-B", options=OPTIONS)
        amplitude, length, noise = np.exp(result.x / _POWERS).tolist()
        return replace(self, parameters=(amplitude, length, noise))


def squared_distances(points: FloatArray, others: FloatArray) -> FloatArray:
    """(m, n) between m and n points."""
    squares = np.sum(points**2, axis=1)[:, None] + np.sum(others**2, axis=1) - 2.0 * points @ others.T
    return np.asarray(np.maximum(squares, 0.0))


def matern(squares: FloatArray, *, length: float) -> tuple[FloatArray, FloatArray]:
    """M(r / l) = (1 + u + u^2/3) e^-u with u = sqrt(5) r / l, of squared distances r^2; and its derivative by ln l."""
    u = np.sqrt(5.0 * squares) / length
    decay = np.exp(-u)
    return (1.0 + u + u**2 / 3.0) * decay, u**2 / 3.0 * (1.0 + u) * decay


@dataclass(frozen=True, kw_only=True)
class Residuals:
    """What corrected predictions leave of n runs: observations of a process g over configurations."""

    names: tuple[str, ...]
    points: FloatArray
    """(n, k) features in units of their scales."""
    residual: FloatArray
    """(n,) ln(measured / corrected prediction)."""
    amplitude: float
    """Standard deviation of g."""
    length: float
    """Its correlation length, in units of the features' scales."""
    noise: float
    """Standard deviation of one run about g."""
    scale: float = 1.0
    """How far runs were from what the others said of them, in units of what was to be expected, at least 1: widens what is
    said of configurations that did not run."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Posterior:
    """Of p standardised parameters, about its mode (Laplace)."""

    x: FloatArray
    """(p,) the mode."""
    covariance: FloatArray
    """(p, p)"""
    degrees_of_freedom: float
    """The prior's, and one for each row less one for each parameter that the rows decide: few runs are no perfect model."""
    scatter: float
    """Standard deviation of the rows about the mode, in units of the one that `residuals` were standardised by."""


def posterior(
    *,
    residuals: Callable[[FloatArray], FloatArray],
    jacobian: Callable[[FloatArray], FloatArray],
    lower: FloatArray,
    trust: FloatArray,
    prior_degrees: float,
) -> Posterior:
    """The mode is argmin over x >= lower of sum rho(r_i(x)) over the rows plus sum x_j^2 over the parameters.

    Parameters are standardised: each has prior mean 0 and standard deviation 1. `residuals(x)` is (rows,) in units
    of its standard deviation, `jacobian(x)` is (rows, parameters). rho is soft L1 (linear far out), so that one
    disturbed run does not drag the rest; the prior keeps its full quadratic pull. `trust`: (rows,) how much each row says of
    the scatter, from 0 to 1. Without rows this is the prior.
    """
    from scipy.optimize import Bounds, minimize

    def loss(x: FloatArray) -> tuple[float, FloatArray]:
        r = residuals(x)
        root = np.sqrt(1.0 + (r / _KNEE) ** 2)
        value = 2.0 * _KNEE**2 * np.sum(root - 1.0) + x @ x
        return float(value), 2.0 * (jacobian(x).T @ (r / root) + x)

    # Overheads often end on their bound: interior methods of least squares take long to reach it, others get stuck there.
    options = {"ftol": 1e-14, "gtol": 1e-8}
    solution = minimize(
        loss, np.zeros(lower.size), jac=True, method="L-BFGS-B", bounds=Bounds(lb=lower, ub=np.inf), options=options
    )
    x = np.asarray(solution.x, dtype=np.float64)
    row_weights = _weights(residuals(x))
    information = (jacobian(x) * row_weights[:, None]).T @ jacobian(x)
    covariance = np.asarray(np.linalg.inv(information + np.eye(x.size)), dtype=np.float64)
    degrees = prior_degrees + max(float(trust.sum()) - float(np.trace(covariance @ information)), 0.0)
    squares = prior_degrees + float(np.sum((row_weights * residuals(x) ** 2)[trust > 0]))
    return Posterior(x=x, covariance=covariance, degrees_of_freedom=degrees, scatter=float(np.sqrt(squares / degrees)))


def _weights(residuals: FloatArray) -> FloatArray:
    """(rows,) weight of each row at the solution: 1 for small standardised residuals, falling for outliers."""
    return 1.0 / np.sqrt(1.0 + (residuals / _KNEE) ** 2)


def doubts(residuals: FloatArray, *, noise: float) -> FloatArray:
    """(rows,) variance beyond noise^2 that gives a row of a least-squares problem the weight above."""
    return noise**2 * (1.0 / _weights(residuals) - 1.0)
