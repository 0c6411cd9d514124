"""Priors and the linear Gaussian model of step time and memory, with a closed-form posterior.

y = J x + model + layout + noise: parameters x shared by all runs, an effect of each model, an
effect of each layout, and the noise of repeated runs. All four are normally distributed. The last
three are Gaussian processes over features. Their variances come from the interval that the cost
model states, each multiplied by a factor that is fitted to the runs. Rasmussen and Williams,
Gaussian Processes for Machine Learning (2006): algorithm 2.1, leave-one-out by equation 5.12.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, fields, replace
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hp_tool.domain.hardware import Kind
from hp_tool.loop.assumptions import assumed
from hp_tool.loop.calibration.evidence import BoolArray, FloatArray, IntArray


@dataclass(frozen=True, slots=True, kw_only=True)
class Prior:
    """Standard deviations of the prior. Factors are log-normal around 1; overheads are half-normal
    with mode 0.

    If the cost model states the deviations of a step time and of a ratio of two, these are scaled
    to sum to them.
    """

    name: str
    common_log_sd: float
    """Factor on every part: the whole device is faster or slower than its profile."""
    group_log_sd: float
    """Additional factor on each group of parts (compute, attention, communication,
    memory-bound).
    """
    part_log_sd: float
    """Additional factor on each part of a group."""
    step_overhead_s: float
    """Scale of a fixed time per optimizer step: data loading, launch of the schedule, Python."""
    layer_overhead_s: float
    """Scale of a fixed time per layer and micro-batch, forward and backward: kernel launches."""
    model_log_sd: float
    """Deviation common to the runs of one model, in addition to the factors."""
    residual_log_sd: float
    """Residual deviation of a configuration."""
    residual_runs: float
    """Number of runs to which the prior of the residual and run deviations is equivalent."""
    run_log_sd: float
    """Standard deviation between runs of one configuration."""
    stated_share: float
    """Fraction of machines on which the cost model's stated deviations hold."""
    memory_log_sd: float
    """Factor on the predicted bytes."""
    memory_overhead_bytes: float
    """Scale of the additional bytes that every configuration needs."""
    memory_residual_log_sd: float
    """Residual deviation of a configuration's memory."""
    slow_share: float
    """Fraction of runs that stall; see `regimes`."""


def prior_for(*, kind: Kind) -> Prior:
    """Return the default prior of a device kind."""
    widths = assumed().device_priors
    return Prior(
        name=kind,
        run_log_sd=assumed().repeats.step_log_sd[kind],
        **{each.name: getattr(widths, each.name)[kind] for each in fields(widths)},
    )


COMPONENTS = ("common", "groups", "model", "layout", "noise")
WIDEST = 8.0
"""Limit of |ln(factor)| in the search."""
NUGGET = 1e-8


@dataclass(frozen=True, slots=True, kw_only=True)
class Rows:
    """Inputs of the model for n configurations."""

    jacobian: FloatArray
    """(n, p) derivative of y with respect to the parameters, in units of their prior standard
    deviations.

    The first parameter is the common factor.
    """
    model: FloatArray
    """(n, k) features of model and workload, in units of their length scales."""
    layout: FloatArray
    """(n, l) all features, in units of their length scales."""
    model_log_sd: FloatArray
    """(n,) standard deviation of the model's effect."""
    layout_log_sd: FloatArray
    """(n,) standard deviation of the layout's effect."""
    noise_log_sd: FloatArray
    """(n,) standard deviation between runs."""

    def variances(self) -> FloatArray:
        """Return the prior variances by component, shape (5, n)."""
        squares = self.jacobian**2
        sds = (self.model_log_sd, self.layout_log_sd, self.noise_log_sd)
        return np.stack([squares[:, 0], squares[:, 1:].sum(axis=1), *(sd**2 for sd in sds)])

    def covariances(self, others: Rows, *, effects: FloatArray | None = None) -> FloatArray:
        """Return the prior covariances with other configurations by component, shape (4, n, m),
        without noise.
        """
        one, two = self.jacobian, others.jacobian
        parameters = [one[:, :1] @ two[:, :1].T, one[:, 1:] @ two[:, 1:].T]
        return np.concatenate([parameters, self.effects(others) if effects is None else effects])

    def effects(self, others: Rows) -> FloatArray:
        """Return the prior covariances of the effects of models and layouts, shape (2, n, m)."""
        return np.stack(
            [
                np.outer(self.model_log_sd, others.model_log_sd) * matern(self.model, others.model),
                np.outer(self.layout_log_sd, others.layout_log_sd)
                * matern(self.layout, others.layout),
            ]
        )


@dataclass(frozen=True, kw_only=True)
class Process:
    """The linear Gaussian model conditioned on n runs."""

    rows: Rows
    values: FloatArray
    """(n,) observed y."""
    doubt: FloatArray
    """(n,) variance of each observation in addition to the common noise."""
    logs: FloatArray
    """(5,) logarithm of the factor on each component's variance."""
    effects: FloatArray | None = None
    """(2, n, n) result of `Rows.effects` for these rows, if known."""

    def improbability(self, logs: FloatArray) -> tuple[float, FloatArray]:
        """Return minus the log prior density of `logs`, and its gradient.

        A factor s on a variance worth w runs has the log density -w / 2 (ln s + 1 / s - 1) of a
        scaled inverse chi-square distribution. It increases easily and decreases only with much
        evidence, because similar runs that agree contain no information about others.
        """
        shrunk, worth = np.exp(-logs), self._worth
        return 0.5 * float(worth @ (logs + shrunk - 1.0)), 0.5 * worth * (1.0 - shrunk)

    @cached_property
    def _worth(self) -> FloatArray:
        """Return the number of runs to which the variance of each component of memory is
        equivalent, shape (5,).
        """
        return np.array([assumed().variances.memory_runs[name] for name in COMPONENTS])

    @property
    def scales(self) -> FloatArray:
        """Return the factors on the variances of the components, shape (5,)."""
        return np.exp(self.logs)

    @cached_property
    def _components(self) -> FloatArray:
        return self.rows.covariances(self.rows, effects=self.effects)

    @cached_property
    def _noise(self) -> FloatArray:
        return np.asarray(self.rows.noise_log_sd**2)

    def _covariance(self, scales: FloatArray) -> FloatArray:
        covariance: FloatArray = np.tensordot(scales[:-1], self._components, axes=1)
        covariance.flat[:: len(covariance) + 1] += scales[-1] * self._noise + self.doubt + NUGGET
        return covariance

    @cached_property
    def _root(self) -> FloatArray:
        """Return the inverse of the lower Cholesky factor of the runs' covariance, shape (n, n)."""
        return _inverse(np.linalg.cholesky(self._covariance(self.scales)))

    @cached_property
    def pull(self) -> FloatArray:
        """Return covariance^-1 y, shape (n,)."""
        return self._root.T @ (self._root @ self.values)

    def log_density(self, known: BoolArray) -> float:
        """Return the log density of some of the values, shape (n,), without their additional
        variance.
        """
        if not known.any():
            return 0.0
        covariance = self._covariance(self.scales) - np.diag(self.doubt)
        root = _inverse(np.linalg.cholesky(covariance[np.ix_(known, known)]))
        spread = known.sum() * np.log(2.0 * np.pi) - 2.0 * np.log(np.diag(root)).sum()
        return -0.5 * float(((root @ self.values[known]) ** 2).sum() + spread)

    @cached_property
    def parameters(self) -> FloatArray:
        """Return the posterior means of x, shape (p,)."""
        scales = np.full(self.rows.jacobian.shape[1], self.scales[1])
        scales[0] = self.scales[0]
        return np.asarray(scales * (self.rows.jacobian.T @ self.pull))

    @cached_property
    def usual_effect(self) -> float:
        """Return the mean effect of the measured models, for predictions without a named model."""
        return float(np.mean(self.scales[2] * self._components[2] @ self.pull))

    def predict(
        self, rows: Rows, *, effects: FloatArray | None = None
    ) -> tuple[FloatArray, FloatArray]:
        """Return the mean effect of model and layout, and the variance of one run, each (m,).

        The variance includes that of the parameters. `effects` are the covariances between rows and
        runs, if known.
        """
        covariances = rows.covariances(self.rows, effects=effects)
        covariances = self.scales[:-1, None, None] * covariances
        explained = covariances.sum(axis=0) @ self._root.T
        variance = self.scales @ rows.variances() - np.einsum("mn,mn->m", explained, explained)
        return covariances[2:].sum(axis=0) @ self.pull, variance

    def left_out(self, groups: IntArray | None = None) -> tuple[FloatArray, FloatArray]:
        """Return the mean and variance of each run given the runs of other groups, shape (n,) each.

        Without groups, each run is predicted from all others.
        """
        inverse = self._root.T @ self._root
        if groups is None:
            variance = 1.0 / np.diag(inverse)
            return self.values - variance * self.pull, variance - self.doubt
        mean, variance = np.empty_like(self.values), np.empty_like(self.values)
        for group in np.unique(groups):
            rows = np.flatnonzero(groups == group)
            covariance = np.linalg.inv(inverse[np.ix_(rows, rows)])
            mean[rows] = self.values[rows] - covariance @ self.pull[rows]
            variance[rows] = np.diag(covariance) - self.doubt[rows]
        return mean, variance

    def fitted(self) -> Process:
        """Return the process with its most likely factors on variances, starting from the current
        ones.

        The criterion is the marginal likelihood times the prior of the factors.
        """
        from scipy.optimize import minimize

        parts = np.concatenate([self._components, np.diag(self._noise)[None]]).reshape(
            len(self.logs), -1
        )

        def loss(logs: FloatArray) -> tuple[float, FloatArray]:
            scales = np.exp(logs)
            factor = np.linalg.cholesky(self._covariance(scales))
            root = _inverse(factor)
            pull = root.T @ (root @ self.values)
            curve = np.outer(pull, pull) - root.T @ root
            unlikely, slope = self.improbability(logs)
            value = (
                0.5 * float(self.values @ pull) + float(np.log(np.diag(factor)).sum()) + unlikely
            )
            return value, slope - 0.5 * scales * (parts @ curve.ravel())

        bounds, options = [(-WIDEST, WIDEST)] * len(self.logs), {"maxiter": 25, "ftol": 1e-5}
        optimum = minimize(
            loss, self.logs, jac=True, bounds=bounds, method="L-BFGS-B", options=options
        )
        fitted = replace(self, logs=optimum.x)
        fitted.__dict__["_components"] = self._components  # The factors do not affect them.
        return fitted


def inflation(squares: FloatArray, *, weight: FloatArray) -> float:
    """Return the factor, at least 1, by which the stated deviations were too small.

    The argument is (n,) squares of standardised leave-one-out errors. The stated deviation counts
    as a few errors of its size (`Variances.stated_errors`).
    """
    worth = assumed().variances.stated_errors
    return math.sqrt(max(1.0, (worth + float(weight @ squares)) / (worth + float(weight.sum()))))


def _inverse(factor: NDArray[np.floating[Any]]) -> FloatArray:
    """Return the inverse of a lower triangular matrix, shape (n, n), four times as fast as a
    general inverse.
    """
    from scipy.linalg.lapack import dtrtri

    return np.asarray(dtrtri(factor, lower=1)[0])


def matern(points: FloatArray, others: FloatArray) -> FloatArray:
    """Return the Matern correlation of smoothness 5/2, shape (n, m).

    (1 + u + u^2/3) e^-u with u = sqrt(5) distance / length.
    """
    squares = (
        np.sum(points**2, axis=1)[:, None] + np.sum(others**2, axis=1) - 2.0 * points @ others.T
    )
    u = np.sqrt(5.0 * np.maximum(squares, 0.0)) / assumed().variances.similar_distance
    return np.asarray((1.0 + u + u**2 / 3.0) * np.exp(-u))
