"""What the multipliers do not explain: a Gaussian process over configurations, and a second, slow regime.

ln(measured / corrected prediction) = g(x) + noise where a configuration runs as it should, g a Gaussian process over
the features. On real clusters some configurations do not: a group that crosses nodes stalls for every micro-batch and
the step takes two to fifty times as long. Those runs say nothing about g; they say where the slow regime is and what a
micro-batch costs in it. Every run belongs to either regime with a probability.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from hp_tool.calibration.evidence import MICRO_BATCHES, FloatArray, scaled
from hp_tool.calibration.fitting import NUGGET, Parameters, Prior, Process, Residuals, squared_distances

SLOW_LOG_MEAN = 1.0
"""Mean of ln(slow / regular), exponentially distributed: slightly slow runs are common, fifty times slower ones exist."""
SLOW_WEIGHT = 1.0
"""Runs of the same configuration that the share of slow runs is worth where a configuration is judged, ..."""
SHARE_WEIGHT = 10.0
"""... and runs that its prior is worth where the share itself is."""
ALIKE = 0.5
"""Distance, in units of the features' scales, over which runs share a regime: nearer than that over which g varies."""
ROUNDS = 3
"""Turns of fitting the process and asking which runs are slow."""
_HYPERPRIOR_LOG_SD = np.array([0.3, 0.4, 0.3])
"""Of amplitude, length and noise; the prior has their medians."""


@dataclass(frozen=True, kw_only=True)
class ResidualFit(Residuals):
    """n runs that teach, each with its probability of being slow."""

    slow: FloatArray
    """(n,) probability that the run was in the slow regime."""
    log_stall: FloatArray
    """(n,) ln of the seconds that each micro-batch lost, if it was."""
    share: float = 0.1
    """Of all runs in the slow regime."""
    score: float = 0.0
    """Log density of the runs, each given the others, and of the hyperparameters: what explanations are compared by."""

    @cached_property
    def _process(self) -> Process:
        return _condition(self.points, self.residual, self.slow, (self.amplitude, self.length, self.noise))

    def predict(self, features: Mapping[str, FloatArray]) -> tuple[FloatArray, FloatArray, FloatArray, FloatArray]:
        """Of n configurations, each (n,): mean of ln(step / corrected prediction) in the regular regime and its variance, one
        run's noise included; probability of the slow regime, and seconds that a micro-batch loses in it.

        The slow regime: each run counts by how near it is to the configuration asked for; far from all, the share of all does.
        """
        points = scaled(features, self.names)
        mean, variance = self._process.predict(points)
        alike = np.exp(-0.5 * squared_distances(points, self.points) / ALIKE**2)
        slow = alike * self.slow
        probability = (SLOW_WEIGHT * self.share + slow.sum(axis=1)) / (SLOW_WEIGHT + alike.sum(axis=1))
        # Far from every slow run, all of them count the same.
        slow = slow + (1e-3 * self.slow + NUGGET)
        return mean, self.scale**2 * variance, probability, np.exp(slow @ self.log_stall / slow.sum(axis=1))


def fit_residual(
    *,
    features: Mapping[str, FloatArray],
    measured_s: FloatArray,
    predicted_s: FloatArray,
    slow: FloatArray,
    prior: Prior,
) -> ResidualFit:
    """Hyperparameters by maximum marginal likelihood under log-normal priors; regimes by expectation maximisation from the
    given probabilities of being slow, each run judged by what the others say (leave-one-out).

    scale^2 = max(1, (nu + sum w z^2) / (nu + sum w)): z is a run's standardised distance from what the others say of it, w its
    probability of being regular, nu the prior's degrees of freedom, that a scale of 1 is worth. Marginal likelihood chose the
    hyperparameters to suit the very runs it saw; how far off each was when left out says what that choice is worth. It
    never narrows: a search runs configurations close together, and that those agree says nothing of others.
    """
    names = tuple(sorted(features))
    points = scaled(features, names)
    residual = np.log(measured_s / predicted_s)
    share = slow_share(slow, prior=prior)
    medians = parameters = (prior.alike_log_sd, prior.alike_length, prior.residual_log_sd)
    for turn in range(ROUNDS):
        process = _condition(points, residual, slow, parameters)
        # Hyperparameters hardly move once the slow runs are known: the costly search for them is left out at the end.
        if turn < ROUNDS - 1:
            process = process.fitted(prior=medians, prior_log_sd=_HYPERPRIOR_LOG_SD)
            parameters = process.parameters
        mean, variance = process.leave_one_out()
        slow, log_density = judge(residual - mean, variance, share=share)
        share = slow_share(slow, prior=prior)
    regular = 1.0 - slow
    squares = prior.degrees_of_freedom + float(regular @ ((residual - mean) ** 2 / variance))
    z = np.log(np.divide(parameters, medians)) / _HYPERPRIOR_LOG_SD
    regular_s = predicted_s * np.exp(np.minimum(mean, residual - 0.1))  # a stall is positive, whoever was slow
    micro_batches = np.exp2(features.get(MICRO_BATCHES, np.zeros(len(residual))))
    amplitude, length, noise = parameters
    return ResidualFit(
        names=names,
        points=points,
        residual=residual,
        slow=slow,
        log_stall=np.log((measured_s - regular_s) / micro_batches),
        amplitude=amplitude,
        length=length,
        noise=noise,
        share=share,
        scale=max(1.0, float(np.sqrt(squares / (prior.degrees_of_freedom + regular.sum())))),
        score=float(log_density.sum() - 0.5 * z @ z),
    )


def slow_share(slow: FloatArray, *, prior: Prior) -> float:
    """Share of all runs that are slow, the prior's before there are any."""
    return float((SHARE_WEIGHT * prior.slow_share + slow.sum()) / (SHARE_WEIGHT + len(slow)))


def judge(excess: FloatArray, variance: FloatArray, *, share: float) -> tuple[FloatArray, FloatArray]:
    """(probability of the slow regime, log density of both), each (n,), given how far ln(step) lies above what is expected
    and the variance of that expectation.
    """
    regular = (1.0 - share) * np.exp(-0.5 * excess**2 / variance) / np.sqrt(2 * np.pi * variance)
    slow = share * (excess > 0) * np.exp(-np.maximum(excess, 0.0) / SLOW_LOG_MEAN) / SLOW_LOG_MEAN
    total = regular + slow + 1e-300
    return np.asarray(slow / total, dtype=np.float64), np.asarray(np.log(total), dtype=np.float64)


def _condition(points: FloatArray, residual: FloatArray, slow: FloatArray, parameters: Parameters) -> Process:
    """The process given the runs. One counts the less the more probably it is slow: noise over the odds against it."""
    doubt = parameters[-1] ** 2 * slow / (1.0 - slow + 1e-6)
    return Process(points=points, values=residual, doubt=doubt, parameters=parameters)
