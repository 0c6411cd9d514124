"""Step time: a few physical multipliers on groups of parts, two overheads, and how far off the rest still is."""

from collections.abc import Mapping
from dataclasses import dataclass, replace

import numpy as np

from hp_tool.calibration.evidence import MICRO_BATCHES, Evidence, FloatArray
from hp_tool.calibration.fitting import Prior, posterior
from hp_tool.calibration.residual import ResidualFit, fit_residual, judge

GROUPS = ("compute", "communication", "memory_bound")
_GROUP_OF_PART = {
    "tensor_parallel": "communication",
    "context_parallel": "communication",
    "expert_parallel": "communication",
    "pipeline_p2p": "communication",
    "data_parallel": "communication",
    "optimizer": "memory_bound",
    "offload": "memory_bound",
}
# Parts not named above (compute, recompute, pipeline_bubble, ...) are time the matmuls and their neighbours take: the
# bubble is other ranks' forward and backward time, so it scales with it.
_NUM_PARAMETERS = 1 + len(GROUPS) + 2
ROUNDS = 2
"""Turns of fitting multipliers and residuals, each given the other."""
HALVINGS = 40
"""Of an interval of a dozen e-folds: to a relative 1e-10."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SlowRegime:
    """n configurations that may stall; see `residual`."""

    probability: FloatArray
    """(n,)"""
    step_s: FloatArray
    """(n,) median seconds where it stalls."""
    log_sd: float = 0.7
    """Scatter of a stalled step about that."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepPrediction:
    """n step times: log-normal (Student-t in the logarithm) in the regular regime; a second, slower one of its own
    probability where runs have shown one.
    """

    regular_s: FloatArray
    """(n,) median where nothing stalls."""
    log_sd: FloatArray
    """(n,) standard deviation of ln(step_s) there: unknown multipliers and what no multiplier explains."""
    degrees_of_freedom: float
    slow: SlowRegime | None = None

    @property
    def median_s(self) -> FloatArray:
        """(n,) of both regimes together."""
        return self.regular_s if self.slow is None else self.quantile(0.5)

    @property
    def slow_probability(self) -> FloatArray:
        """(n,)"""
        return np.zeros_like(self.regular_s) if self.slow is None else self.slow.probability

    def interval(self, *, confidence: float = 0.9) -> tuple[FloatArray, FloatArray]:
        """(low, high), each (n,): should hold the measured step time with this probability."""
        return self.quantile(0.5 - confidence / 2), self.quantile(0.5 + confidence / 2)

    def quantile(self, probability: float) -> FloatArray:
        """(n,) seconds that the step takes at most with this probability."""
        from scipy.special import ndtr, stdtr, stdtrit

        regular = np.asarray(self.regular_s * np.exp(stdtrit(self.degrees_of_freedom, probability) * self.log_sd))
        if self.slow is None:
            return regular
        # Two regimes have no closed form: halve the interval between the least and the most it can be.
        log_regular, log_slow, share = np.log(self.regular_s), np.log(self.slow.step_s), self.slow.probability
        low = np.minimum(np.log(regular), log_slow) - 10.0 * self.slow.log_sd
        high = np.maximum(np.log(regular), log_slow) + 10.0 * self.slow.log_sd
        for _ in range(HALVINGS):
            middle = 0.5 * (low + high)
            usual = stdtr(self.degrees_of_freedom, (middle - log_regular) / self.log_sd)
            below = (1.0 - share) * usual + share * ndtr((middle - log_slow) / self.slow.log_sd) < probability
            low, high = np.where(below, middle, low), np.where(below, high, middle)
        return np.asarray(np.exp(high), dtype=np.float64)


@dataclass(frozen=True, slots=True, kw_only=True)
class StepTimeFit:
    """ln step_s = ln(sum_g theta_g T_g + o_step + o_layer n_layer) + noise, with T_g the predicted seconds of group g.

    theta_g = exp(a + d_g): `a` is shared, so a group that no run has exercised still follows the device as a whole.
    The parameters x = (a, d_1..d_g, o_step, o_layer) are kept in units of their prior standard deviations.
    """

    prior: Prior
    x: FloatArray
    """(p,) standardised parameters; zeros are the prior."""
    covariance: FloatArray
    """(p, p) posterior covariance of x (Laplace); the identity is the prior."""
    residual_log_sd: float
    degrees_of_freedom: float
    residual: ResidualFit | None = None
    """None: no run with features yet."""

    @property
    def factors(self) -> dict[str, float]:
        """theta by group: measured seconds per predicted second."""
        log_factors = self.prior.common_log_sd * self.x[0] + self.prior.group_log_sd * self.x[1 : 1 + len(GROUPS)]
        return dict(zip(GROUPS, np.exp(log_factors).tolist(), strict=True))

    @property
    def step_overhead_s(self) -> float:
        """Seconds every step costs whatever is in it."""
        return float(self.prior.step_overhead_s * self.x[-2])

    @property
    def layer_overhead_s(self) -> float:
        """Seconds every pass of a micro-batch through a layer costs whatever its size."""
        return float(self.prior.layer_overhead_s * self.x[-1])

    def calibrated_parts(
        self, *, parts_s: Mapping[str, FloatArray], layer_passes: FloatArray, step: StepPrediction | None = None
    ) -> dict[str, FloatArray]:
        """Each part times its group's factor, and the overheads as a part `overhead`; they sum to the median step time.
        What the residuals of a prediction `step` for the same rows shift, they shift in proportion; stalls are overhead.
        """
        factors = self.factors
        parts = {name: seconds * factors[_GROUP_OF_PART.get(name, "compute")] for name, seconds in parts_s.items()}
        overhead = self.step_overhead_s + self.layer_overhead_s * np.asarray(layer_passes, dtype=np.float64)
        parts["overhead"] = parts.get("overhead", 0.0) + overhead
        if step is None or step.slow is None:
            return parts
        shift = step.regular_s / sum(parts.values())
        parts = {name: seconds * shift for name, seconds in parts.items()}
        return {**parts, "overhead": parts["overhead"] + (step.median_s - step.regular_s)}

    def predict(
        self,
        *,
        parts_s: Mapping[str, FloatArray],
        layer_passes: FloatArray,
        features: Mapping[str, FloatArray] | None = None,
    ) -> StepPrediction:
        """Predict n configurations from their uncalibrated parts, and their features where they have some. With no evidence
        the median is the parts' sum.
        """
        design = _design(parts_s=parts_s, layer_passes=layer_passes)
        median_s, gradient = _model(self.prior, design, self.x)
        # einsum: one quadratic form per row, without an (n, n) intermediate.
        parameter_variance = np.einsum("np,pq,nq->n", gradient, self.covariance, gradient, optimize=True)
        regular_s, variance, slow = median_s, np.full(len(median_s), self.residual_log_sd**2), None
        if self.residual is not None and features:
            shift, variance, probability, stall_s = self.residual.predict(features)
            regular_s = median_s * np.exp(shift)
            micro_batches = np.exp2(features.get(MICRO_BATCHES, np.zeros(len(median_s))))
            slow = SlowRegime(probability=probability, step_s=regular_s + stall_s * micro_batches)
        return StepPrediction(
            regular_s=regular_s,
            log_sd=np.sqrt(variance + parameter_variance),
            degrees_of_freedom=self.degrees_of_freedom,
            slow=slow,
        )


def fit_step_time(*, evidence: Evidence, prior: Prior) -> StepTimeFit:
    """The posterior mode of the multipliers and overheads given the runs that have a step time; the residual's width is the
    prior's, updated by the measured residuals.
    """
    runs = evidence.take(np.flatnonzero(np.isfinite(evidence.measured_step_s) & (evidence.measured_step_s > 0)))
    design, log_measured = _design(parts_s=runs.parts_s, layer_passes=runs.layer_passes), np.log(runs.measured_step_s)
    # Sums over rows are done in sorted order, so that the answer does not depend on the order in which runs ended.
    order = np.lexsort((*design.T, *runs.features.values(), log_measured))
    design, log_measured, features = design[order], log_measured[order], runs.take(order).features
    rows = len(runs)
    fit = _fit_multipliers(design, log_measured, prior=prior, trust=np.ones(rows), row_log_sd=prior.residual_log_sd)
    if not features or not rows:
        return fit
    # Is the whole machine slower than predicted, or do some runs stall? Expectation maximisation finds the answer next to
    # where it starts, so it starts from both; the better explanation of all runs counts.
    predicted_s, gradient = _model(prior, design, np.zeros(_NUM_PARAMETERS))
    doubt = prior.residual_log_sd**2 + prior.alike_log_sd**2 + np.sum(gradient**2, axis=1)
    stalled, _ = judge(log_measured - np.log(predicted_s), doubt, share=prior.slow_share)
    starts = [np.zeros(rows)] + ([stalled] if np.any(stalled > 0.5) else [])
    fits = [_fit_regimes(design, log_measured, features, prior=prior, slow=start) for start in starts]
    return max(fits, key=lambda fit: fit.residual.score - 0.5 * float(fit.x @ fit.x) if fit.residual else 0.0)


def _fit_regimes(
    design: FloatArray, log_measured: FloatArray, features: Mapping[str, FloatArray], *, prior: Prior, slow: FloatArray
) -> StepTimeFit:
    """Multipliers and residuals in turn. What is slow for reasons of its own, and how far the rest scatters, is known only
    once both are."""
    spread = float(np.hypot(prior.alike_log_sd, prior.residual_log_sd))
    for _ in range(ROUNDS):
        fit = _fit_multipliers(design, log_measured, prior=prior, trust=1.0 - slow, row_log_sd=spread)
        residual = fit_residual(
            features=features,
            measured_s=np.exp(log_measured),
            predicted_s=_model(prior, design, fit.x)[0],
            slow=slow,
            prior=prior,
        )
        slow, spread = residual.slow, float(np.hypot(residual.amplitude, residual.noise))
    return replace(fit, residual=residual)


def _fit_multipliers(
    design: FloatArray, log_measured: FloatArray, *, prior: Prior, trust: FloatArray, row_log_sd: float
) -> StepTimeFit:
    """`trust`: (rows,) how much each row counts, from 0 to 1. `row_log_sd`: scatter of a row about the multipliers."""
    pull = np.sqrt(trust) / row_log_sd

    def residuals(x: FloatArray) -> FloatArray:
        median_s, _ = _model(prior, design, x)
        return (np.log(median_s) - log_measured) * pull

    def jacobian(x: FloatArray) -> FloatArray:
        return _model(prior, design, x)[1] * pull[:, None]

    lower = np.array([-np.inf] * (1 + len(GROUPS)) + [0.0, 0.0])
    fit = posterior(residuals=residuals, jacobian=jacobian, lower=lower, trust=trust, prior_degrees=prior.degrees_of_freedom)
    return StepTimeFit(
        prior=prior,
        x=fit.x,
        covariance=fit.covariance,
        residual_log_sd=row_log_sd * fit.scatter,
        degrees_of_freedom=fit.degrees_of_freedom,
    )


def _design(*, parts_s: Mapping[str, FloatArray], layer_passes: FloatArray) -> FloatArray:
    """(n, groups + 2): predicted seconds by group, then the counts that the two overheads multiply."""
    layer_passes = np.asarray(layer_passes, dtype=np.float64)
    design = np.zeros((layer_passes.size, len(GROUPS) + 2))
    for name in sorted(parts_s):
        design[:, GROUPS.index(_GROUP_OF_PART.get(name, "compute"))] += parts_s[name]
    design[:, -2] = 1.0
    design[:, -1] = layer_passes
    return design


def _model(prior: Prior, design: FloatArray, x: FloatArray) -> tuple[FloatArray, FloatArray]:
    """(n,) median seconds and (n, p) derivative of their logarithm by the standardised parameters."""
    groups = len(GROUPS)
    factors = np.exp(prior.common_log_sd * x[0] + prior.group_log_sd * x[1 : 1 + groups])
    overhead_scales = np.array([prior.step_overhead_s, prior.layer_overhead_s])
    group_s = design[:, :groups] * factors
    overhead_s = design[:, groups:] * overhead_scales
    median_s = np.maximum(group_s.sum(axis=1) + overhead_s @ x[1 + groups :], np.finfo(np.float64).tiny)
    gradient = np.empty((design.shape[0], x.size))
    gradient[:, 0] = prior.common_log_sd * group_s.sum(axis=1)
    gradient[:, 1 : 1 + groups] = prior.group_log_sd * group_s
    gradient[:, 1 + groups :] = overhead_s
    return median_s, gradient / median_s[:, None]
