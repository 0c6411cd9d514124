"""Memory fit: a factor, additional bytes, and effects shared by similar configurations.

A run out of memory counts as needing at least its capacity.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

import numpy as np

from hp_tool.loop.assumptions import assumed
from hp_tool.loop.calibration.evidence import (
    MEMORY_LOG_SD,
    MODEL,
    SAME,
    STATED,
    BoolArray,
    Evidence,
    FloatArray,
    IntArray,
    scale_features,
)
from hp_tool.loop.calibration.fitting import COMPONENTS, Prior, Process, Rows, inflation
from hp_tool.loop.calibration.regimes import classify_runs

_MIN_BYTES = 1.0
_WIDEST = 1e6
"""Maximum ratio of an interval bound to the median. A wider bound is uninformative, and infinity
cannot be stored.
"""
ROUNDS = 3
"""Number of iterations. Each fits the factor and the effects, then estimates outliers and the needs
of runs out of memory.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryPrediction:
    """Log-normal predictions of memory needs for n configurations."""

    median_bytes: FloatArray
    """(n,) median bytes."""
    log_sd: FloatArray
    """(n,) standard deviations of the logarithm."""

    def take(self, rows: IntArray) -> MemoryPrediction:
        return MemoryPrediction(median_bytes=self.median_bytes[rows], log_sd=self.log_sd[rows])

    def interval(self, *, confidence: float = 0.9) -> tuple[FloatArray, FloatArray]:
        """Return (low, high), each (n,), which contain the measured bytes with this probability."""
        from scipy.special import ndtri

        half_width = np.minimum(ndtri(0.5 + confidence / 2) * self.log_sd, np.log(_WIDEST))
        return self.median_bytes * np.exp(-half_width), self.median_bytes * np.exp(half_width)

    def fit_probability(self, capacity_bytes: FloatArray | float) -> FloatArray:
        """Return the probability that the need is at most the capacity, shape (n,)."""
        from scipy.special import ndtr

        margin = np.log(np.maximum(capacity_bytes, _MIN_BYTES)) - np.log(self.median_bytes)
        return np.asarray(ndtr(margin / self.log_sd), dtype=np.float64)


@dataclass(frozen=True, kw_only=True)
class MemoryFit:
    """ln needed = ln(factor x predicted + overhead_bytes) + model + layout + noise."""

    prior: Prior
    factor: float = 1.0
    overhead_bytes: float = 0.0
    process: Process | None = None
    """Gaussian model; None before the first run."""
    names: tuple[str, ...] = ()
    """Names of the features in the process's `Rows.layout`."""
    inflation: float = 1.0
    """Factor (at least 1) by which leave-one-out errors exceeded the stated deviations."""
    ran_out: FloatArray = field(default_factory=lambda: np.empty((0, 1)))
    """(k, l) features of configurations that ran out of memory and never fitted."""
    ran_out_bytes: FloatArray = field(default_factory=lambda: np.empty(0))
    """(k,) bytes that were available to them."""

    def predict(
        self, *, memory_bytes: FloatArray, features: Mapping[str, FloatArray] | None = None
    ) -> MemoryPrediction:
        """Predict n configurations from their uncalibrated bytes and, if given, their features.

        Without evidence, the median equals the uncalibrated bytes.
        """
        predicted = np.asarray(memory_bytes, dtype=np.float64)
        median = np.maximum(self.factor * predicted + self.overhead_bytes, _MIN_BYTES)
        rows = _rows(
            self._gradient(predicted, median), features or {}, prior=self.prior, names=self.names
        )
        if self.process is None:
            return MemoryPrediction(
                median_bytes=median, log_sd=np.sqrt(rows.variances().sum(axis=0))
            )
        shift, variance = self.process.predict(rows)
        shift = shift if features else shift + self.process.usual_effect
        return MemoryPrediction(
            median_bytes=self._lower_bounds(median * np.exp(shift), rows.layout),
            log_sd=self.inflation * np.sqrt(variance),
        )

    def _lower_bounds(self, median: FloatArray, layouts: FloatArray) -> FloatArray:
        """Raise medians, (n,), above the capacity at which the same layout ran out of memory."""
        for layout, capacity in (
            zip(self.ran_out, self.ran_out_bytes, strict=True) if layouts.shape[1] else ()
        ):
            median = np.where(
                _same(layouts, layout), np.maximum(median, capacity * (1 + 1e-9)), median
            )
        return median

    def _gradient(self, predicted: FloatArray, median: FloatArray) -> FloatArray:
        """Return the derivative of ln(median) by the standardised parameters, shape (n, 2)."""
        prior = self.prior
        return np.stack(
            [
                prior.memory_log_sd * self.factor * predicted / median,
                prior.memory_overhead_bytes / median,
            ],
            axis=1,
        )


def fit_memory(*, evidence: Evidence, prior: Prior) -> MemoryFit:
    """Fit factor, overhead and effects to runs that have a measured peak or ran out of memory.

    A run out of memory counts as needing its capacity, or its prediction if that is higher. The
    factor is then raised until none of these runs is predicted to fit. Exempt are runs whose
    prediction is at most that of a run that fitted. These two runs contradict each other, so the
    effects must explain them.
    """
    measured = np.isfinite(evidence.measured_memory_bytes) & (evidence.measured_memory_bytes > 0)
    runs = evidence.take(np.flatnonzero(measured | evidence.out_of_memory))
    bytes_of = np.where(runs.out_of_memory, runs.capacity_bytes, runs.measured_memory_bytes)
    log_target, predicted = (
        np.log(np.maximum(bytes_of, _MIN_BYTES)),
        np.maximum(runs.memory_bytes, _MIN_BYTES),
    )
    # Sums over rows use sorted order, so that the answer does not depend on the order in which runs
    # ended.
    order = np.lexsort((*runs.features.values(), log_target, predicted, runs.out_of_memory))
    runs, predicted, log_target = runs.take(order), predicted[order], log_target[order]
    fit = MemoryFit(prior=prior, names=tuple(sorted(set(runs.features) - STATED)))
    return (
        _fitted(fit, predicted, log_target, runs.out_of_memory, runs.features) if len(runs) else fit
    )


def _fitted(
    fit: MemoryFit,
    predicted: FloatArray,
    log_target: FloatArray,
    ran_out: BoolArray,
    features: Mapping[str, FloatArray],
) -> MemoryFit:
    beyond_capacity = assumed().memory.excess_log_sd ** 2
    prior, x, logs, doubt = (
        fit.prior,
        np.zeros(2),
        np.zeros(len(COMPONENTS)),
        np.where(ran_out, beyond_capacity, 0.0),
    )
    log_needed, free = log_target, np.ones(2)
    for turn in range(ROUNDS):
        median = np.maximum(fit.factor * predicted + fit.overhead_bytes, _MIN_BYTES)
        gradient = free * fit._gradient(predicted, median)
        rows = _rows(gradient, features, prior=prior, names=fit.names)
        if turn == 0:
            log_needed = np.where(ran_out, np.maximum(log_target, np.log(median)), log_target)
            excess = log_needed - np.log(median)
            slips = classify_runs(
                excess - np.median(excess),
                rows.variances().sum(axis=0),
                usual_share=prior.slow_share,
            )
            doubt = doubt + np.where(ran_out, 0.0, slips.doubt)
        values = log_needed - np.log(median) + gradient @ x
        process = Process(rows=rows, values=values, doubt=doubt, logs=logs).fitted()
        logs, x = process.logs, process.parameters
        free[1] *= x[1] >= 0.0  # Needs at least zero.
        x = x * free
        mean, variance = process.left_out()
        expected = log_needed - (values - mean)
        log_needed = np.where(ran_out, np.maximum(log_target, expected), log_target)
        slips = classify_runs(values - mean, variance, usual_share=prior.slow_share)
        doubt = np.where(ran_out, beyond_capacity * (log_needed > log_target), slips.doubt)
        fit = replace(
            fit,
            factor=float(np.exp(prior.memory_log_sd * x[0])),
            overhead_bytes=float(prior.memory_overhead_bytes * x[1]),
        )
    failed = _never_fitted(rows.layout, ran_out)
    known = ~ran_out & (slips.regular > 0.5)
    z = ((values - mean) ** 2 / variance)[known]
    beyond = ran_out & (predicted > predicted[~ran_out].max(initial=0.0))
    least = np.exp(log_target - process.predict(rows)[0]) - fit.overhead_bytes
    floor = float((least / predicted)[beyond].max(initial=0.0)) * (1 + 1e-9)
    return replace(
        fit,
        factor=max(fit.factor, floor),
        process=process,
        inflation=inflation(z, weight=np.ones(len(z))),
        ran_out=rows.layout[failed],
        ran_out_bytes=np.exp(log_target[failed]),
    )


def _never_fitted(layouts: FloatArray, ran_out: BoolArray) -> IntArray:
    """Return the rows that ran out of memory, if no other run of their configuration fitted."""
    fitted = layouts[~ran_out]
    return np.array(
        [row for row in np.flatnonzero(ran_out) if not _same(fitted, layouts[row]).any()],
        dtype=np.intp,
    )


def _same(layouts: FloatArray, layout: FloatArray) -> BoolArray:
    return np.asarray(np.abs(layouts - layout).max(axis=1, initial=0.0) < SAME)


def _rows(
    gradient: FloatArray,
    features: Mapping[str, FloatArray],
    *,
    prior: Prior,
    names: tuple[str, ...],
) -> Rows:
    count, features = len(gradient), features if names else {}
    own = np.full(count, prior.memory_residual_log_sd**2)
    if MEMORY_LOG_SD in features:
        own = np.maximum(own, features[MEMORY_LOG_SD] ** 2)
    shared, alike = (
        (assumed().memory.model_share, assumed().variances.similar_share)
        if features
        else (0.0, 0.0)
    )
    return Rows(
        jacobian=gradient,
        model=scale_features(features, MODEL) if features else np.zeros((count, len(MODEL))),
        layout=scale_features(features, names) if features else np.zeros((count, len(names))),
        model_log_sd=np.sqrt(shared * own),
        layout_log_sd=np.sqrt((1.0 - shared) * alike * own),
        noise_log_sd=np.sqrt((1.0 - shared) * (1.0 - alike) * own),
    )
