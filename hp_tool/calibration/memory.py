"""Memory: one factor, some bytes on top, runs that ran out as censored observations, and what configurations alike needed."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np

from hp_tool.calibration.evidence import BoolArray, Evidence, FloatArray, scaled
from hp_tool.calibration.fitting import Prior, Process, Residuals, doubts, posterior

_MIN_BYTES = 1.0
_WIDEST = 1e6
"""Of an interval's bounds to its median: what is wider says nothing either, and infinity could not be stored."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryPrediction:
    """A log-normal (Student-t in the logarithm) prediction of n memory needs."""

    median_bytes: FloatArray
    """(n,)"""
    log_sd: FloatArray
    """(n,)"""
    degrees_of_freedom: float

    def interval(self, *, confidence: float = 0.9) -> tuple[FloatArray, FloatArray]:
        """(low, high), each (n,): should hold the measured bytes with this probability."""
        from scipy.special import stdtrit

        half_width = np.minimum(stdtrit(self.degrees_of_freedom, 0.5 + confidence / 2) * self.log_sd, np.log(_WIDEST))
        return self.median_bytes * np.exp(-half_width), self.median_bytes * np.exp(half_width)

    def fit_probability(self, capacity_bytes: FloatArray | float) -> FloatArray:
        """(n,) probability that the need is at most the capacity."""
        from scipy.special import stdtr

        margin = np.log(np.maximum(capacity_bytes, _MIN_BYTES)) - np.log(self.median_bytes)
        return np.asarray(stdtr(self.degrees_of_freedom, margin / self.log_sd), dtype=np.float64)


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryFit:
    """needed = factor x predicted + overhead_bytes, with a log-normal error."""

    factor: float
    overhead_bytes: float
    covariance: FloatArray
    """(2, 2) posterior covariance of (ln factor / memory_log_sd, overhead / memory_overhead_bytes)."""
    residual_log_sd: float
    degrees_of_freedom: float
    prior: Prior
    residual: MemoryResidual | None = None
    """None: no run with features yet."""

    def predict(self, *, memory_bytes: FloatArray, features: Mapping[str, FloatArray] | None = None) -> MemoryPrediction:
        """Predict n configurations from their uncalibrated bytes, and their features where they have some. With no evidence
        the median is those bytes.
        """
        scaled = self.factor * np.asarray(memory_bytes, dtype=np.float64)
        median = np.maximum(scaled + self.overhead_bytes, _MIN_BYTES)
        gradient = _gradient(self.prior, scaled, median)
        parameter_variance = np.einsum("np,pq,nq->n", gradient, self.covariance, gradient, optimize=True)
        shift, variance = np.zeros(len(median)), np.full(len(median), self.residual_log_sd**2)
        if self.residual is not None and features:
            shift, variance = self.residual.predict(features)
        return MemoryPrediction(
            median_bytes=median * np.exp(shift),
            log_sd=np.sqrt(variance + parameter_variance),
            degrees_of_freedom=self.degrees_of_freedom,
        )


def fit_memory(*, evidence: Evidence, prior: Prior) -> MemoryFit:
    """The posterior mode of factor and overhead, and what configurations alike say of the rest. A run that ran out contributes
    P(needed > capacity) to the likelihood.
    """
    measured = np.isfinite(evidence.measured_memory_bytes) & (evidence.measured_memory_bytes > 0)
    runs = evidence.take(np.flatnonzero(measured | evidence.out_of_memory))
    bytes_of = np.where(runs.out_of_memory, runs.capacity_bytes, runs.measured_memory_bytes)
    log_target, predicted = np.log(np.maximum(bytes_of, _MIN_BYTES)), np.maximum(runs.memory_bytes, _MIN_BYTES)
    # Sums over rows are done in sorted order, so that the answer does not depend on the order in which runs ended.
    order = np.lexsort((*runs.features.values(), log_target, predicted, runs.out_of_memory))
    runs, predicted, log_target = runs.take(order), predicted[order], log_target[order]
    features, ran_out = runs.features, runs.out_of_memory
    spread = float(np.hypot(AMPLITUDE, prior.memory_residual_log_sd)) if features else prior.memory_residual_log_sd
    fit = _fit_factor(predicted, log_target, ran_out, prior=prior, row_log_sd=spread)
    if not features or not len(runs):
        return fit
    residual = fit_memory_residual(
        features=features,
        log_measured=log_target,
        log_predicted=np.log(fit.predict(memory_bytes=predicted).median_bytes),
        ran_out=ran_out,
        prior=prior,
    )
    return replace(fit, residual=residual)


def _fit_factor(
    predicted: FloatArray, log_target: FloatArray, ran_out: BoolArray, *, prior: Prior, row_log_sd: float
) -> MemoryFit:
    """`log_target`: of bytes measured, or of the capacity of a run that ran out. `row_log_sd`: scatter of a row about the fit.

    Afterwards the factor is raised, where it has to be, until every run that ran out is predicted not to fit, unless a
    run predicted to need at least as much did fit: then the two disagree and the likelihood has the last word.
    """

    def medians(x: FloatArray) -> tuple[FloatArray, FloatArray]:
        scaled = np.exp(prior.memory_log_sd * x[0]) * predicted
        return scaled, np.maximum(scaled + prior.memory_overhead_bytes * x[1], _MIN_BYTES)

    def residuals(x: FloatArray) -> FloatArray:
        plain = (np.log(medians(x)[1]) - log_target) / row_log_sd
        return np.where(ran_out, _censored_residual(plain)[0], plain)

    def jacobian(x: FloatArray) -> FloatArray:
        scaled, median = medians(x)
        plain = (np.log(median) - log_target) / row_log_sd
        slope = np.where(ran_out, _censored_residual(plain)[1], 1.0)
        return slope[:, None] * _gradient(prior, scaled, median) / row_log_sd

    lower = np.array([-np.inf, 0.0])
    exact = (~ran_out).astype(np.float64)
    fit = posterior(residuals=residuals, jacobian=jacobian, lower=lower, trust=exact, prior_degrees=prior.degrees_of_freedom)
    overhead_bytes = float(prior.memory_overhead_bytes * fit.x[1])
    beyond = ran_out & (predicted > predicted[~ran_out].max(initial=0.0))
    factor_floor = ((np.exp(log_target) - overhead_bytes) / predicted)[beyond].max(initial=0.0)
    return MemoryFit(
        factor=max(float(np.exp(prior.memory_log_sd * fit.x[0])), float(factor_floor) * (1 + 1e-9)),
        overhead_bytes=overhead_bytes,
        covariance=fit.covariance,
        residual_log_sd=row_log_sd * fit.scatter,
        degrees_of_freedom=fit.degrees_of_freedom,
        prior=prior,
    )


def _gradient(prior: Prior, scaled: FloatArray, median: FloatArray) -> FloatArray:
    """(n, 2) derivative of ln(median) by the standardised parameters."""
    return np.stack([prior.memory_log_sd * scaled / median, prior.memory_overhead_bytes / median], axis=1)


def _censored_residual(margin: FloatArray) -> tuple[FloatArray, FloatArray]:
    """Signed root r of r^2 = -2 ln P(needed > capacity) and dr/dmargin, for margin = (ln median - ln capacity) / sd.

    Written so, a censored row is one more row of a least-squares problem.
    """
    from scipy.special import log_ndtr

    log_probability = np.minimum(log_ndtr(margin), -1e-300)
    root = np.sqrt(-2.0 * log_probability)
    log_density = -0.5 * margin**2 - 0.5 * np.log(2 * np.pi)
    slope = np.exp(log_density - log_probability) / np.maximum(root, 1e-150)
    return -root, slope


AMPLITUDE, LENGTH = 0.1, 1.5
"""Prior medians of g's standard deviation and of its correlation length, in units of the features' scales."""
_HYPERPRIOR_LOG_SD = np.array([0.4, 0.4, 0.4])


@dataclass(frozen=True, kw_only=True)
class MemoryResidual(Residuals):
    """What a factor and an overhead do not explain, from n runs whose peak is known, or known to exceed the device's memory.

    ln(measured / corrected prediction) = g(x) + noise, g a Gaussian process over configurations. Much of g is the allocator's:
    blocks of a size that no other tensor of the step asks for again stay reserved, so that twice the micro-batch takes 1.3 or
    1.9 times the memory, alike for configurations alike.
    """

    doubt: FloatArray
    """(n,) variance beyond the noise: of runs that ran out, whose peak is not known, and of outliers."""

    @cached_property
    def _process(self) -> Process:
        parameters = (self.amplitude, self.length, self.noise)
        return Process(points=self.points, values=self.residual, doubt=self.doubt, parameters=parameters)

    def predict(self, features: Mapping[str, FloatArray]) -> tuple[FloatArray, FloatArray]:
        """Mean of ln(needed / corrected prediction) of n configurations, and its variance, one run's noise included."""
        mean, variance = self._process.predict(scaled(features, self.names))
        return mean, self.scale**2 * variance

    def left_out(self) -> FloatArray:
        """(n,) ln(measured / what all the other runs say of each)."""
        return self.residual - self._process.leave_one_out()[0]


def fit_memory_residual(
    *,
    features: Mapping[str, FloatArray],
    log_measured: FloatArray,
    log_predicted: FloatArray,
    ran_out: BoolArray,
    prior: Prior,
) -> MemoryResidual:
    """Hyperparameters by maximum marginal likelihood under log-normal priors; `log_measured` of a run that ran out is the
    device's capacity.

    Such a run needed at least that: it counts with that, or with what is predicted where this is more, as one of which
    nobody knows by how much. Outliers, judged by what the other runs say of them, count the less the further off they are.
    scale^2 = max(1, (nu + sum z^2) / (nu + n)) over the runs measured, with z the standardised distance from what the others
    say.
    """
    names = tuple(sorted(features))
    points = scaled(features, names)
    residual = log_measured - log_predicted
    residual = np.where(ran_out, np.maximum(residual, 0.0), residual)
    unknown = np.where(ran_out, AMPLITUDE**2, 0.0)
    start = (AMPLITUDE, LENGTH, prior.memory_residual_log_sd)
    nu = prior.degrees_of_freedom

    def fitted(doubt: FloatArray) -> Process:
        process = Process(points=points, values=residual, doubt=doubt, parameters=start)
        return process.fitted(prior=start, prior_log_sd=_HYPERPRIOR_LOG_SD)

    def distance(process: Process) -> FloatArray:
        mean, variance = process.leave_one_out()
        return (residual - mean) / np.sqrt(variance)

    process = fitted(unknown)
    process = fitted(unknown + doubts(distance(process), noise=process.parameters[-1]))
    z = distance(process)[~ran_out]
    amplitude, length, noise = process.parameters
    return MemoryResidual(
        names=names,
        points=points,
        residual=residual,
        doubt=process.doubt,
        amplitude=amplitude,
        length=length,
        noise=noise,
        scale=max(1.0, float(np.sqrt((nu + z @ z) / (nu + len(z))))),
    )
