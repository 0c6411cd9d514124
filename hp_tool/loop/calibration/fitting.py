"""Priors and the linear Gaussian model of step time and memory, with a closed-form posterior.

y = J x + model + layout + noise. The parameters x are shared by all runs. Each model and each
layout adds an effect, and repeated runs add noise. All four are normally distributed, and the last
three are Gaussian processes over features. Their variances come from the interval that the cost
model states, and each is multiplied by a factor fitted to the runs. See Rasmussen and Williams,
Gaussian Processes for Machine Learning (2006): algorithm 2.1, and equation 5.12 for leave-one-out
predictions.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, fields, replace
from functools import cached_property

import numpy as np

from hp_tool.domain.hardware import Kind
from hp_tool.loop.assumptions import assumed
from hp_tool.loop.calibration.evidence import BoolArray, FloatArray, IntArray


@dataclass(frozen=True, slots=True, kw_only=True)
class Prior:
    """Prior standard deviations.

    Factors are log-normal around 1; overheads are half-normal with mode 0. If the cost model states
    the deviation of a step time and that of a ratio of two, the deviations here are scaled so that
    they sum to the stated ones.
    """

    name: str
    common_log_sd: float
    """Log deviation of the factor common to all parts: a device can be faster or slower than its
    profile.
    """
    group_log_sd: float
    """Log deviation of an additional factor on each group of parts (compute, attention,
    communication, memory-bound).
    """
    part_log_sd: float
    """Log deviation of an additional factor on each part of a group."""
    step_overhead_s: float
    """Scale of a fixed time per optimizer step: data loading, schedule launch, Python."""
    layer_overhead_s: float
    """Scale of a fixed time per layer and micro-batch (forward and backward): kernel launches."""
    model_log_sd: float
    """Log deviation of an effect shared by all runs of a model, in addition to the factors."""
    residual_log_sd: float
    """Residual log deviation of a configuration."""
    residual_runs: float
    """Weight of the prior on the residual and run deviations, in equivalent runs."""
    run_log_sd: float
    """Log deviation between runs of one configuration."""
    stated_share: float
    """Fraction of machines for which the cost model's stated deviations are right."""
    memory_log_sd: float
    """Log deviation of the factor on predicted bytes."""
    memory_overhead_bytes: float
    """Scale of additional bytes that every configuration needs."""
    memory_residual_log_sd: float
    """Residual log deviation of a configuration's memory."""
    slow_share: float
    """Fraction of runs that stall; see `regimes`."""


def prior_for(*, kind: Kind) -> Prior:
    """Return the default prior for a kind of device."""
    widths = assumed().device_priors
    return Prior(
        name=kind,
        run_log_sd=assumed().repeats.step_log_sd[kind],
        **{each.name: getattr(widths, each.name)[kind] for each in fields(widths)},
    )


COMPONENTS = ("common", "groups", "model", "layout", "noise")
WIDEST = 8.0
"""Maximum |ln(factor)| when searching for the most likely factors on variances."""
NUGGET = 1e-8


@dataclass(frozen=True, slots=True, kw_only=True)
class Rows:
    """Model inputs for n configurations."""

    jacobian: FloatArray
    """(..., n, p) derivative of y with respect to the parameters, in units of their prior standard
    deviations.

    The first parameter is the common factor.
    """
    model: FloatArray
    """(n, k) features of model and workload, in units of their length scales."""
    layout: FloatArray
    """(n, l) all features, in units of their length scales."""
    model_log_sd: FloatArray
    """(n,) standard deviation of the model effect."""
    layout_log_sd: FloatArray
    """(n,) standard deviation of the layout effect."""
    noise_log_sd: FloatArray
    """(n,) standard deviation between repeated runs."""

    def variances(self) -> FloatArray:
        """Return the prior variances by component, shape (5, ..., n)."""
        squares = self.jacobian**2
        sds = (self.model_log_sd, self.layout_log_sd, self.noise_log_sd)
        each = (squares[..., 0], squares[..., 1:].sum(axis=-1), *(sd**2 for sd in sds))
        return np.stack(np.broadcast_arrays(*each))

    def effects(self, others: Rows) -> FloatArray:
        """Return the prior covariances of model effects and layout effects, shape (2, n, m)."""
        return np.stack(
            [
                np.outer(self.model_log_sd, others.model_log_sd)
                * matern_correlation(self.model, others.model),
                np.outer(self.layout_log_sd, others.layout_log_sd)
                * matern_correlation(self.layout, others.layout),
            ]
        )


@dataclass(frozen=True, kw_only=True)
class Process:
    """The Gaussian model conditioned on n runs. Leading axes (...,) hold several such models."""

    rows: Rows
    values: FloatArray
    """(..., n) observed values of y."""
    doubt: FloatArray
    """(..., n) additional variance of each observation. It grows with the probability that the
    observation is an outlier.
    """
    logs: FloatArray
    """(..., 5) ln of the factor on each variance component."""
    effects: FloatArray | None = None
    """(2, n, n) covariances from `Rows.effects` for these rows, if already computed."""

    def improbability(self, logs: FloatArray) -> tuple[float, FloatArray]:
        """Return minus the log prior density of `logs`, and its gradient.

        A factor s on a variance worth w runs has the log density -w / 2 (ln s + 1 / s - 1) of a
        scaled inverse chi-square distribution. It increases easily and decreases only with much
        evidence, because similar runs that agree contain no information about others.
        """
        shrunk, worth = np.exp(-logs), self._prior_runs
        return 0.5 * float(worth @ (logs + shrunk - 1.0)), 0.5 * worth * (1.0 - shrunk)

    @cached_property
    def _prior_runs(self) -> FloatArray:
        """Return how many runs the prior of each variance of memory is worth, shape (5,)."""
        return np.array([assumed().variances.memory_runs[name] for name in COMPONENTS])

    @property
    def scales(self) -> FloatArray:
        """Return (..., 5) factors on the components' variances."""
        return np.exp(self.logs)

    @cached_property
    def _effects(self) -> FloatArray:
        return self.rows.effects(self.rows) if self.effects is None else self.effects

    def _scaled(self, jacobian: FloatArray) -> FloatArray:
        """Return the (..., n, p) derivatives times the factors on the parameters' variances."""
        scales = self.scales[..., None, :]
        return np.concatenate(
            [scales[..., :1] * jacobian[..., :1], scales[..., 1:2] * jacobian[..., 1:]], axis=-1
        )

    def _scaled_effects(self, effects: FloatArray) -> FloatArray:
        """Return (..., m, n) the sum of both effects' covariances, scaled."""
        scales = self.scales[..., None, None]
        return np.asarray(scales[..., 2, :, :] * effects[0] + scales[..., 3, :, :] * effects[1])

    @cached_property
    def _covariance(self) -> FloatArray:
        """(..., n, n) covariance of the effects and parameters of the runs, with noise."""
        jacobian = self.rows.jacobian
        noise = self.scales[..., -1:] * self.rows.noise_log_sd**2 + NUGGET
        return np.asarray(
            self._scaled(jacobian) @ jacobian.swapaxes(-1, -2)
            + self._scaled_effects(self._effects)
            + noise[..., None] * np.eye(noise.shape[-1])
        )

    @cached_property
    def _root(self) -> FloatArray:
        """Return the (..., n, n) inverse of the lower Cholesky factor of the runs' covariance."""
        own = self.doubt[..., None] * np.eye(self.doubt.shape[-1])
        return _inverse_root(self._covariance + own)

    @cached_property
    def pull(self) -> FloatArray:
        """Return covariance^-1 y, shape (..., n)."""
        return np.asarray(
            _multiply(self._root.swapaxes(-1, -2), _multiply(self._root, self.values))
        )

    def log_density(self, known: BoolArray) -> FloatArray:
        """Return the log densities of the values selected by `known`, shape (...,).

        `known` has the shape (..., n). The observations' doubt is ignored.
        """
        # All others become independent standard normals observed at 0.
        covariance = np.where(
            known[..., None] & known[..., None, :], self._covariance, np.eye(known.shape[-1])
        )
        root = _inverse_root(covariance)
        squares = _multiply(root, np.where(known, self.values, 0.0)) ** 2
        logs = known * np.log(2.0 * np.pi) - 2.0 * np.log(np.einsum("...ii->...i", root))
        return np.asarray(-0.5 * (squares + logs).sum(axis=-1))

    @cached_property
    def parameters(self) -> FloatArray:
        """Return the posterior means of x, shape (..., p)."""
        return _multiply(self._scaled(self.rows.jacobian).swapaxes(-1, -2), self.pull)

    @cached_property
    def usual_effect(self) -> FloatArray:
        """Return the mean effect of the models that ran, shape (...,).

        It is used for predictions that name no model.
        """
        return np.asarray(self.scales[..., 2] * (self.pull @ self._effects[0]).mean(axis=-1))

    def predict(
        self, rows: Rows, *, effects: FloatArray | None = None
    ) -> tuple[FloatArray, FloatArray]:
        """Return the mean effect of model and layout, and the variance of one run; (..., m) each.

        The variance includes that of the parameters. `effects` are the covariances between rows and
        runs, if already computed.
        """
        shared = self._scaled_effects(rows.effects(self.rows) if effects is None else effects)
        covariance = self._scaled(rows.jacobian) @ self.rows.jacobian.swapaxes(-1, -2) + shared
        explained = covariance @ self._root.swapaxes(-1, -2)
        prior = np.einsum("...c,c...m->...m", self.scales, rows.variances())
        return _multiply(shared, self.pull), prior - (explained**2).sum(axis=-1)

    def covariance(self, rows: Rows) -> FloatArray:
        """Return the covariances of configurations without run noise, shape (..., m, m)."""
        scaled, jacobian = self._scaled(rows.jacobian), rows.jacobian.swapaxes(-1, -2)
        runs = self.rows.jacobian.swapaxes(-1, -2)
        explained = (
            scaled @ runs + self._scaled_effects(rows.effects(self.rows))
        ) @ self._root.swapaxes(-1, -2)
        prior = scaled @ jacobian + self._scaled_effects(rows.effects(rows))
        return np.asarray(prior - explained @ explained.swapaxes(-1, -2))

    def left_out(self, groups: IntArray | None = None) -> tuple[FloatArray, FloatArray]:
        """Return each run's mean and variance given the runs of other groups, (..., n) each.

        Without groups, each run is predicted from all other runs.
        """
        if groups is None:
            variance = 1.0 / (self._root**2).sum(axis=-2)
            return self.values - variance * self.pull, variance - self.doubt
        inverse = self._root.swapaxes(-1, -2) @ self._root
        mean, variance = np.empty_like(self.values), np.empty_like(self.values)
        for group in np.unique(groups):
            rows = np.flatnonzero(groups == group)
            covariance = np.asarray(np.linalg.inv(inverse[..., rows[:, None], rows]), np.float64)
            mean[..., rows] = self.values[..., rows] - _multiply(covariance, self.pull[..., rows])
            own = np.einsum("...ii->...i", covariance)
            variance[..., rows] = own - self.doubt[..., rows]
        return mean, variance

    def fitted(self) -> Process:
        """Return the process with its most likely factors on variances.

        The search starts from the current factors and maximizes the marginal likelihood times the
        factors' prior.
        """
        from scipy.optimize import minimize

        common, others = self.rows.jacobian[:, :1], self.rows.jacobian[:, 1:]
        noise = np.diag(self.rows.noise_log_sd**2)
        parts = np.stack([common @ common.T, others @ others.T, *self._effects, noise])

        def loss(logs: FloatArray) -> tuple[float, FloatArray]:
            one = replace(self, logs=logs, effects=self._effects)
            curve = np.outer(one.pull, one.pull) - one._root.T @ one._root
            unlikely, slope = self.improbability(logs)
            value = 0.5 * float(self.values @ one.pull) - float(np.log(np.diag(one._root)).sum())
            return value + unlikely, slope - 0.5 * one.scales * (
                parts.reshape(len(logs), -1) @ curve.ravel()
            )

        bounds, options = [(-WIDEST, WIDEST)] * len(self.logs), {"maxiter": 25, "ftol": 1e-5}
        optimum = minimize(
            loss, self.logs, jac=True, bounds=bounds, method="L-BFGS-B", options=options
        )
        fitted = replace(self, logs=optimum.x)
        fitted.__dict__["_effects"] = self._effects  # scales do not affect them
        return fitted


def inflation(squares: FloatArray, *, weight: FloatArray) -> float:
    """Return the factor (at least 1) by which the stated deviations were too small.

    `squares` are squared standardised leave-one-out errors, shape (n,). The stated deviation counts
    as a few errors of its size (`Variances.stated_errors`).
    """
    worth = assumed().variances.stated_errors
    return math.sqrt(max(1.0, (worth + float(weight @ squares)) / (worth + float(weight.sum()))))


def _multiply(matrix: FloatArray, vector: FloatArray) -> FloatArray:
    """Return the products of matrices (..., n, m) and vectors (..., m), shape (..., n)."""
    return np.asarray((matrix @ vector[..., None])[..., 0])


def _inverse_root(covariance: FloatArray) -> FloatArray:
    """Return the inverses of the covariances' lower Cholesky factors, shape (..., n, n).

    This is four times as fast as general inverses.
    """
    from scipy.linalg.lapack import dtrtri

    flat = np.linalg.cholesky(covariance).reshape(-1, *covariance.shape[-2:])
    return np.array([dtrtri(one, lower=1)[0] for one in flat]).reshape(covariance.shape)


def matern_correlation(points: FloatArray, others: FloatArray) -> FloatArray:
    """Return the Matern correlation with smoothness 5/2, shape (n, m).

    It is (1 + u + u^2/3) e^-u with u = sqrt(5) distance / length.
    """
    squares = (
        np.sum(points**2, axis=1)[:, None] + np.sum(others**2, axis=1) - 2.0 * points @ others.T
    )
    u = np.sqrt(5.0 * np.maximum(squares, 0.0)) / assumed().variances.similar_distance
    return np.asarray((1.0 + u + u**2 / 3.0) * np.exp(-u))
