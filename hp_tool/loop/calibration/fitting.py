"""What step time and memory share: priors, and one linear Gaussian model whose posterior has a
closed form.

y = J x + model + layout + noise: parameters x that all runs share, an effect of each model, one of
each layout, and what runs of one configuration scatter by. All four are normal; the last three are
Gaussian processes over features. Their variances are those of the interval that the cost model
states, times one factor each, which the runs decide as far as there are any. Rasmussen and
Williams, Gaussian Processes for Machine Learning (2006): algorithm 2.1, leave-one-out by equation
5.12.
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
from hp_tool.loop.calibration.evidence import FloatArray, IntArray


@dataclass(frozen=True, slots=True, kw_only=True)
class Prior:
    """Widths of the prior. Factors are log-normal around 1; overheads are half-normal, most likely
    0.

    Where the cost model states how far off a step and the ratio of two are, that is what all of it
    adds up to.
    """

    name: str
    common_log_sd: float
    """One factor on every part: the device as a whole is faster or slower than its profile says."""
    group_log_sd: float
    """A further factor on each group of parts (compute, attention, communication, memory-bound)."""
    step_overhead_s: float
    """Scale of a fixed cost of each optimizer step: data loading, launch of the schedule,
    Python.
    """
    layer_overhead_s: float
    """Scale of a fixed cost of one micro-batch's forward and backward pass through one layer:
    kernel launches.
    """
    model_log_sd: float
    """What one model's runs have in common beyond the factors."""
    residual_log_sd: float
    """What remains per configuration."""
    memory_log_sd: float
    """One factor on the predicted bytes."""
    memory_overhead_bytes: float
    """Scale of bytes that every configuration needs on top."""
    memory_residual_log_sd: float
    """What remains of memory per configuration."""
    slow_share: float
    """Share of runs that stall; see `regimes`."""


def prior_for(*, kind: Kind) -> Prior:
    """The default prior of a device kind."""
    widths = assumed().device_priors
    return Prior(
        name=kind, **{each.name: getattr(widths, each.name)[kind] for each in fields(widths)}
    )


COMPONENTS = ("common", "groups", "model", "layout", "noise")
WIDEST = 8.0
"""ln(factor) up to which it is searched."""
NUGGET = 1e-8


@dataclass(frozen=True, slots=True, kw_only=True)
class Rows:
    """n configurations as the model sees them."""

    jacobian: FloatArray
    """(n, p) derivative of y by the parameters, in units of their prior standard deviations; the
    first is the common one.
    """
    model: FloatArray
    """(n, k) what tells models and workloads apart, in units of the features' scales."""
    layout: FloatArray
    """(n, l) all features."""
    model_log_sd: FloatArray
    """(n,) of the model's effect."""
    layout_log_sd: FloatArray
    """(n,) of the layout's."""
    noise_log_sd: FloatArray
    """(n,) of one run."""

    def variances(self) -> FloatArray:
        """(5, n) prior variance by component."""
        squares = self.jacobian**2
        sds = (self.model_log_sd, self.layout_log_sd, self.noise_log_sd)
        return np.stack([squares[:, 0], squares[:, 1:].sum(axis=1), *(sd**2 for sd in sds)])

    def covariances(self, others: Rows) -> FloatArray:
        """(4, n, m) prior covariance with other configurations by component, noise left out."""
        one, two = self.jacobian, others.jacobian
        return np.stack(
            [
                one[:, :1] @ two[:, :1].T,
                one[:, 1:] @ two[:, 1:].T,
                np.outer(self.model_log_sd, others.model_log_sd) * matern(self.model, others.model),
                np.outer(self.layout_log_sd, others.layout_log_sd)
                * matern(self.layout, others.layout),
            ]
        )


@dataclass(frozen=True, kw_only=True)
class Process:
    """The model given n runs."""

    rows: Rows
    values: FloatArray
    """(n,) y"""
    doubt: FloatArray
    """(n,) variance of an observation beyond the noise they all have."""
    logs: FloatArray
    """(5,) ln of the factor on each component's variance."""

    def improbability(self, logs: FloatArray) -> tuple[float, FloatArray]:
        """Minus the log density of `logs` a priori, and its slope.

        A factor s on a variance that is worth w runs has the log density -w / 2 (ln s + 1 / s - 1),
        that of scaled inverse chi-square: it grows easily and shrinks hardly, since runs close
        together that agree say nothing of others.
        """
        shrunk, worth = np.exp(-logs), self._worth
        return 0.5 * float(worth @ (logs + shrunk - 1.0)), 0.5 * worth * (1.0 - shrunk)

    @cached_property
    def _worth(self) -> FloatArray:
        """(5,) runs that each component's stated variance is worth."""
        return np.array([assumed().variances.prior_runs[name] for name in COMPONENTS])

    @property
    def scales(self) -> FloatArray:
        """(5,) factors on the components' variances."""
        return np.exp(self.logs)

    @cached_property
    def _components(self) -> FloatArray:
        return self.rows.covariances(self.rows)

    @cached_property
    def _noise(self) -> FloatArray:
        return np.asarray(self.rows.noise_log_sd**2)

    def _covariance(self, scales: FloatArray) -> FloatArray:
        covariance: FloatArray = np.tensordot(scales[:-1], self._components, axes=1)
        covariance.flat[:: len(covariance) + 1] += scales[-1] * self._noise + self.doubt + NUGGET
        return covariance

    @cached_property
    def _root(self) -> FloatArray:
        """(n, n) inverse of the lower Cholesky factor of the runs' covariance."""
        return _inverse(np.linalg.cholesky(self._covariance(self.scales)))

    @cached_property
    def pull(self) -> FloatArray:
        """(n,) covariance^-1 y."""
        return self._root.T @ (self._root @ self.values)

    @cached_property
    def parameters(self) -> FloatArray:
        """(p,) posterior mean of x."""
        scales = np.full(self.rows.jacobian.shape[1], self.scales[1])
        scales[0] = self.scales[0]
        return np.asarray(scales * (self.rows.jacobian.T @ self.pull))

    @cached_property
    def usual_effect(self) -> float:
        """Mean effect of the models that ran: for predictions that do not say of which model they
        are.
        """
        return float(np.mean(self.scales[2] * self._components[2] @ self.pull))

    def predict(self, rows: Rows) -> tuple[FloatArray, FloatArray]:
        """Return, each (m,), the mean effect of model and layout, and the variance of one run,
        parameters included.
        """
        covariances = self.scales[:-1, None, None] * rows.covariances(self.rows)
        explained = covariances.sum(axis=0) @ self._root.T
        variance = self.scales @ rows.variances() - np.einsum("mn,mn->m", explained, explained)
        return covariances[2:].sum(axis=0) @ self.pull, variance

    def left_out(self, groups: IntArray | None = None) -> tuple[FloatArray, FloatArray]:
        """(n,) mean and variance of each run given those of other groups; None: given all other
        runs.
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
        """The process under its most likely scales, searched from its own: marginal likelihood
        times their prior.
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
        fitted.__dict__["_components"] = self._components  # scales do not change them
        return fitted


def inflation(squares: FloatArray, *, weight: FloatArray) -> float:
    """Return the factor by which deviations were too small for (n,) squares of standardised
    leave-one-out errors; at least 1.

    What was stated is worth a few errors as large as stated (`Variances.stated_errors`).
    """
    worth = assumed().variances.stated_errors
    return math.sqrt(max(1.0, (worth + float(weight @ squares)) / (worth + float(weight.sum()))))


def _inverse(factor: NDArray[np.floating[Any]]) -> FloatArray:
    """(n, n) of a lower triangle: a quarter of the time of a general inverse."""
    from scipy.linalg.lapack import dtrtri

    return np.asarray(dtrtri(factor, lower=1)[0])


def matern(points: FloatArray, others: FloatArray) -> FloatArray:
    """(n, m) Matern's correlation of smoothness 5/2: (1 + u + u^2/3) e^-u with u = sqrt(5) distance
    / length.
    """
    squares = (
        np.sum(points**2, axis=1)[:, None] + np.sum(others**2, axis=1) - 2.0 * points @ others.T
    )
    u = np.sqrt(5.0 * np.maximum(squares, 0.0)) / assumed().variances.similar_distance
    return np.asarray((1.0 + u + u**2 / 3.0) * np.exp(-u))
