"""Step-time fit: factors on groups of parts, two overheads, model and layout effects, stalls."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from functools import cached_property

import numpy as np

from hp_tool.cost.uncertainty import CONFIDENCE, NORMAL_QUANTILE
from hp_tool.domain.parts import STEP, STEP_KEYS
from hp_tool.loop.assumptions import assumed
from hp_tool.loop.calibration.evidence import (
    DEVICE_LOG_SD,
    MICRO_BATCHES,
    MODEL,
    PAIR_LOG_SD,
    SAME,
    SHAPE,
    STALL_RISK,
    STATED,
    STEP_LOG_SD,
    BoolArray,
    Evidence,
    FloatArray,
    IntArray,
    scale_features,
)
from hp_tool.loop.calibration.fitting import COMPONENTS, Prior, Process, Rows
from hp_tool.loop.calibration.parts import GROUPS, apply_trace_factors, part_logs
from hp_tool.loop.calibration.plain import PlainFactor, plain_factor
from hp_tool.loop.calibration.prediction import JointSteps, SlowRegime, StepPrediction
from hp_tool.loop.calibration.regimes import Stalls, classify_runs, stalls

_NUM_COLUMNS = len(STEP_KEYS) + 2
_NUM_PARAMETERS = 1 + len(GROUPS) + _NUM_COLUMNS
ROUNDS = 3
"""Number of iterations that alternate between fitting parameters and classifying regimes."""
MULTIPLES = (0.125, 0.25, 0.5, 1.0, 2.0)
"""Factors by which explanations multiply the deviations of layouts and runs."""
NEGLIGIBLE_LOG_ODDS = 8.0
"""An explanation is dropped if its log density after one round is this far below the best."""
LEAST_WEIGHT = 0.01
"""Minimum probability of a retained explanation, relative to the most likely one."""
JOINT_EXPLANATIONS = 12
"""Maximum number of explanations in a joint distribution."""
BATCH_VALUES = 100_000
"""Maximum number of covariances computed at once. More do not fit in the CPU cache."""
HALVINGS = 24
"""Bisection steps for an interval. The relative error is 1e-7."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Explanations:
    """K explanations of n runs. Each has assumed variances and the parameters fitted with them."""

    weight: FloatArray
    """(K,) probabilities, which sum to 1."""
    scale: FloatArray
    """(K, p) factors on the parameters' stated standard deviations."""
    logs: FloatArray
    """(K, 5) ln of further factors on the variances of `fitting.COMPONENTS`."""
    x: FloatArray
    """(K, p) posterior means of the standardised parameters. A negative overhead means no overhead.
    """
    doubt: FloatArray
    """(K, n) additional variance of a run, which lowers its weight the likelier it is not regular.
    """

    def take(self, rows: IntArray) -> "Explanations":
        """Return the explanations at `rows`. Their weights are normalized to sum to 1."""
        some = {each.name: getattr(self, each.name)[rows] for each in fields(self)}
        return Explanations(**{**some, "weight": some["weight"] / some["weight"].sum()})


@dataclass(frozen=True, kw_only=True)
class StepTimeFit:
    """ln step_s = ln(sum_p theta_p T_p + o_step + o_layer n_layer) + model + layout + noise.

    T_p is the predicted time of part p in group g. theta_p = exp(a + d_g + e_p), where `a` is
    shared by all parts, so a part without runs follows its group and the whole device. The
    parameters x = (a, d, e, o_step, o_layer) are in units of their prior standard deviations.

    The standard deviations of parameters, layouts and runs are uncertain. Each explanation of the
    runs assumes some of them, from a grid. Its weight is its prior probability times the density of
    the runs, and predictions are the mixture of all explanations. If errors have a structure that
    no factor explains, intervals therefore become wider.
    """

    prior: Prior
    width: float = 1.0
    """Factor on the parameters' prior standard deviations, so that their sum is the variance stated
    by the cost model.
    """
    design: FloatArray = field(default_factory=lambda: np.empty((0, _NUM_COLUMNS)))
    """(n, parts + 2) model inputs of the runs; see `_design`."""
    log_measured: FloatArray = field(default_factory=lambda: np.empty(0))
    """(n,) ln of the measured seconds."""
    rows: Rows | None = None
    """The runs, linearised at x = 0; None before the first run."""
    explanations: Explanations | None = None
    """Explanations of the runs; None before the first run."""
    names: tuple[str, ...] = ()
    """Names of the layout features."""
    shapes: FloatArray = field(default_factory=lambda: np.empty((0, len(SHAPE))))
    """(n, k) shapes of the measured models."""
    applied: float = 1.0
    """Fraction of a correction applied to measured models. It is estimated on left-out runs."""
    applied_elsewhere: float = 1.0
    """Fraction of a correction applied to other models. It is estimated on left-out models."""
    stalls: Stalls | None = None
    """Stall model; None if no run stalled and none typically does."""
    plain: PlainFactor | None = None
    """A single factor that replaces the entire fit if the runs contradict it."""
    part_logs: FloatArray = field(default_factory=lambda: np.empty(0))
    """(parts,) ln of the factor on each of STEP_KEYS from traces; empty without traces."""

    @cached_property
    def x(self) -> FloatArray:
        """(p,) mean parameters in units of their stated deviations; zeros are the prior mean."""
        if self.explanations is None:
            return np.zeros(_NUM_PARAMETERS)
        each = self.explanations
        return np.asarray(each.weight @ (each.scale * _clip_overheads(each.x)))

    @property
    def factors(self) -> dict[str, float]:
        """Measured / predicted time by group, weighted by the parts of the runs."""
        if self.explanations is None:
            return dict.fromkeys(GROUPS, 1.0)
        thetas = np.array(list(self.part_factors.values()))
        of_group = _OF_GROUP * self.design[:, :-2].sum(axis=0)
        usual = _OF_GROUP * (of_group.sum(axis=1, keepdims=True) == 0.0)
        weight = of_group + usual
        means = (weight @ thetas) / weight.sum(axis=1)
        return dict(zip(GROUPS, means.tolist(), strict=True))

    @property
    def part_factors(self) -> dict[str, float]:
        """theta_p by part: measured seconds per predicted second."""
        if self.plain is not None:
            return dict.fromkeys(STEP_KEYS, float(np.exp(self.plain.log_factor)))
        return dict(zip(STEP_KEYS, self._model().factors(self.x).tolist(), strict=True))

    @property
    def step_overhead_s(self) -> float:
        """Return the fixed time of every step in seconds."""
        return float(self._model().overheads(self.x)[0])

    @property
    def layer_overhead_s(self) -> float:
        """Return the fixed time of every pass of a micro-batch through a layer, in seconds."""
        return float(self._model().overheads(self.x)[1])

    @property
    def residual_log_sd(self) -> float:
        """Standard deviation of a configuration's ln(step time) that the factors do not explain."""
        if self.explanations is None or self.rows is None:
            return self.prior.residual_log_sd
        if self.plain is not None:
            return self.plain.log_sd
        scales = np.exp(self.explanations.weight @ self.explanations.logs[:, 2:])
        return float(np.sqrt(np.median(scales @ self.rows.variances()[2:])))

    def _model(self, scale: FloatArray | float = 1.0) -> "_Parameters":
        return _Parameters(prior=self.prior, scale=self.width * scale * np.ones(_NUM_PARAMETERS))

    def calibrated_parts(
        self,
        *,
        parts_s: Mapping[str, FloatArray],
        layer_passes: FloatArray,
        step: StepPrediction | None = None,
    ) -> dict[str, FloatArray]:
        """Return each part multiplied by its factor, and the overheads as the part `overhead`.

        The factors are those of the mean parameters. If `step` is given (the prediction for the
        same rows), the parts are scaled so that their sum is its median. Stalls count as overhead.
        """
        factors, known_s = self.part_factors, apply_trace_factors(parts_s, self.part_logs)
        parts = {name: seconds * factors[_part(name)] for name, seconds in known_s.items()}
        overhead = self.step_overhead_s + self.layer_overhead_s * np.asarray(
            layer_passes, dtype=np.float64
        )
        parts["overhead"] = parts.get("overhead", 0.0) + overhead
        if step is None:
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
        """Predict n configurations from their uncalibrated parts and, if given, their features.

        Without evidence, the median is the sum of the parts.
        """
        design = _design(
            parts_s=apply_trace_factors(parts_s, self.part_logs), layer_passes=layer_passes
        )
        before_s, gradient = self._model().seconds(design, np.zeros(_NUM_PARAMETERS))
        known = features or {}
        asked = self._rows(gradient, known)
        stated = known.get(STEP_LOG_SD, np.sqrt(asked.variances().sum(axis=0)))
        if self.explanations is None:
            usual = _first_run_stall_share(known, prior=self.prior)
            return StepPrediction(regular_s=before_s, log_sd=stated, usual_slow_share=usual)
        if self.plain is not None:
            regular_s = before_s * np.exp(self.plain.log_factor)
            return StepPrediction(regular_s=regular_s, log_sd=np.maximum(stated, self.plain.log_sd))
        whole, log_sd = mixture_interval(
            *self._explained(design, asked, before_s, known=bool(known))
        )
        ran = self._is_measured_model(known, len(whole))
        share = np.where(ran, self.applied, self.applied_elsewhere)
        correction = share * whole
        # The fraction of a correction that is not applied may still be right.
        log_sd = np.hypot(log_sd, (1.0 - share) * whole)
        # The stated variances of models were measured on machines without a common shift. With a
        # shift, they grow proportionally.
        elsewhere = np.hypot(
            stated, self.prior.model_log_sd / self.prior.common_log_sd * correction
        )
        log_sd = np.where(ran, log_sd, np.maximum(log_sd, elsewhere))
        regular_s = before_s * np.exp(correction)
        slow = None
        if self.stalls is not None and known:
            probability, stall_s = self.stalls.predict(asked.layout)
            slow = SlowRegime(
                probability=probability, step_s=regular_s + stall_s * _micro_batches(known)
            )
        return StepPrediction(regular_s=regular_s, log_sd=log_sd, slow=slow)

    def _explained(
        self, design: FloatArray, asked: Rows, before_s: FloatArray, *, known: bool
    ) -> tuple[FloatArray, FloatArray, FloatArray]:
        """Return mean and standard deviation of ln(step_s / before_s) by explanation, (K, m) each.

        Also return the probabilities of the explanations, shape (K,). Without features (`known`),
        no configuration resembles a run, and the model effect is the usual one.
        """
        assert self.explanations is not None and self.rows is not None
        each, process = self.explanations, self._process
        median_s, gradient = self._model(each.scale).seconds(design, _clip_overheads(each.x))
        shift, variance = process.predict(
            replace(asked, jacobian=gradient), effects=asked.effects(self.rows)
        )
        shift = shift if known else process.usual_effect[:, None]
        return np.log(median_s / before_s) + shift, np.sqrt(variance), each.weight

    def joint(
        self,
        *,
        parts_s: Mapping[str, FloatArray],
        layer_passes: FloatArray,
        features: Mapping[str, FloatArray],
    ) -> JointSteps:
        """Return the joint distribution of m configurations' ln(step_s) under likely explanations.

        The means of all explanations are shifted by the same amount, so that their average is that
        of `predict`.
        """
        known = self.predict(parts_s=parts_s, layer_passes=layer_passes, features=features)
        center = np.log(known.regular_s)
        if self.explanations is None or self.plain is not None:
            return JointSteps(
                weight=np.ones(1),
                mean=center[None],
                covariance=np.diag(known.log_sd**2)[None],
                noise=np.zeros((1, len(center))),
            )
        likeliest = np.argsort(-self.explanations.weight, kind="stable")[:JOINT_EXPLANATIONS]
        each = self.explanations.take(likeliest)
        fit = replace(self, explanations=each)
        design = _design(
            parts_s=apply_trace_factors(parts_s, self.part_logs), layer_passes=layer_passes
        )
        before_s, gradient = self._model().seconds(design, np.zeros(_NUM_PARAMETERS))
        asked = self._rows(gradient, features)
        means, _, weight = fit._explained(design, asked, before_s, known=bool(features))
        _, gradient = self._model(each.scale).seconds(design, _clip_overheads(each.x))
        return JointSteps(
            weight=weight,
            mean=center + means - weight @ means,
            covariance=fit._process.covariance(replace(asked, jacobian=gradient)),
            noise=fit._process.scales[:, -1:] * asked.noise_log_sd**2,
        )

    @cached_property
    def _process(self) -> Process:
        assert self.explanations is not None
        return self._linearised(self.explanations)

    def _linearised(self, each: "Explanations | _Attempts") -> Process:
        """Return the Gaussian model of the runs, linearised at x.

        A negative overhead counts as none.
        """
        assert self.rows is not None
        x = _clip_overheads(each.x)
        predicted_s, gradient = self._model(each.scale).seconds(self.design, x)
        gradient[..., -2:] *= each.x[:, None, -2:] >= 0.0
        return Process(
            rows=replace(self.rows, jacobian=gradient),
            values=self.log_measured - np.log(predicted_s) + (gradient @ x[..., None])[..., 0],
            doubt=each.doubt,
            logs=each.logs,
            effects=self._effects,
        )

    @cached_property
    def _effects(self) -> FloatArray:
        """Covariances of the model and the layout effects between the runs, shape (2, n, n)."""
        assert self.rows is not None
        return self.rows.effects(self.rows)

    def _rows(self, gradient: FloatArray, features: Mapping[str, FloatArray]) -> Rows:
        stated = _stated_variances(features, len(gradient), prior=self.prior)
        return _rows(gradient, features, prior=self.prior, names=self.names, stated=stated)

    def _is_measured_model(self, features: Mapping[str, FloatArray], rows: int) -> BoolArray:
        """Return a mask of the configurations whose model was used in any run, shape (n,)."""
        if not features or not self.names:
            return np.ones(rows, dtype=bool)
        apart = np.abs(scale_features(features, SHAPE)[:, None] - self.shapes)
        return np.asarray((apart.max(axis=2) < SAME).any(axis=1))


def mixture_interval(
    centers: FloatArray, spreads: FloatArray, weight: FloatArray
) -> tuple[FloatArray, FloatArray]:
    """Approximate m mixtures of K normals by one normal each.

    Return the mixtures' means, and the standard deviations that give the same central interval of
    `CONFIDENCE` around them, each of shape (m,).
    """
    from scipy.special import ndtr

    center = weight @ centers
    if len(weight) == 1:
        return center, spreads[0]
    apart = centers - center
    low, high = np.zeros(len(center)), (np.abs(apart) + 2.0 * spreads).max(axis=0)
    for _ in range(HALVINGS):
        half = 0.5 * (low + high)
        inside = weight @ (ndtr((half - apart) / spreads) - ndtr((-half - apart) / spreads))
        low, high = (
            np.where(inside < CONFIDENCE, half, low),
            np.where(inside < CONFIDENCE, high, half),
        )
    return center, high / NORMAL_QUANTILE


def _clip_overheads(x: FloatArray) -> FloatArray:
    """Return parameters, shape (..., p), with negative overheads set to 0."""
    return np.concatenate([x[..., :-2], np.maximum(x[..., -2:], 0.0)], axis=-1)


def fit_step_time(*, evidence: Evidence, prior: Prior) -> StepTimeFit:
    """Fit the posterior of parameters and effects to the runs with a step time."""
    runs = evidence.take(
        np.flatnonzero(np.isfinite(evidence.measured_step_s) & (evidence.measured_step_s > 0))
    )
    traced = StepTimeFit(prior=prior, part_logs=part_logs(evidence))
    design = _design(
        parts_s=apply_trace_factors(runs.parts_s, traced.part_logs), layer_passes=runs.layer_passes
    )
    log_measured = np.log(runs.measured_step_s)
    # Sums over rows use sorted order, so that the result does not depend on the order in which runs
    # ended.
    order = np.lexsort((*design.T, *runs.features.values(), log_measured))
    design, log_measured, runs = design[order], log_measured[order], runs.take(order)
    if not len(runs):
        return traced
    features, names = runs.features, tuple(sorted(set(runs.features) - STATED))
    fit = replace(
        traced,
        width=_prior_width(design, features, prior=prior),
        design=design,
        log_measured=log_measured,
        names=names,
        shapes=np.unique(scale_features(features, SHAPE), axis=0)
        if features
        else np.empty((0, len(SHAPE))),
    )
    gradient = fit._model().seconds(design, np.zeros(_NUM_PARAMETERS))[1]
    return _fit_explanations(replace(fit, rows=fit._rows(gradient, features)), features)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Attempts:
    """A attempts to fit explanations.

    Each explanation has several, with different starting points.
    """

    number: IntArray
    """(A,) number of the explanation."""
    scale: FloatArray
    logs: FloatArray
    prior_log: FloatArray
    """(A,) ln of the explanation's prior probability, up to a constant."""
    x: FloatArray
    doubt: FloatArray
    slow: FloatArray
    """(A, n) probability that the run stalled."""
    regular: FloatArray
    """(A, n) probability that the run neither stalled nor is an outlier."""
    score: FloatArray
    """(A,) log density of the explanation and the runs."""

    def take(self, rows: IntArray) -> "_Attempts":
        return _Attempts(**{each.name: getattr(self, each.name)[rows] for each in fields(self)})

    @staticmethod
    def concatenate(pieces: "Sequence[_Attempts]") -> "_Attempts":
        return _Attempts(
            **{
                each.name: np.concatenate([getattr(piece, each.name) for piece in pieces])
                for each in fields(_Attempts)
            }
        )


def _explanation_grid(fit: StepTimeFit) -> tuple[FloatArray, FloatArray, FloatArray]:
    """Return the grid of K explanations and their prior probabilities.

    These are the factors on the parameters' deviations, (K, p); ln of the factors on the variances
    of COMPONENTS, (K, 5); and ln of the prior probabilities up to a constant, (K,).

    The stated deviations are right with the probability `Prior.stated_share`. Otherwise, the
    deviations in one of the sets in DOUBTED (all equally likely) are those of the kind of device,
    which apply if nothing is stated. A part that is off is thus one explanation, under which the
    other parts remain as certain as stated (Mitchell and Beauchamp 1988, Bayesian variable
    selection). The factor s on the variance of layouts and runs is worth w runs. Its log density is
    -w / 2 (|ln s| + e^-|ln s| - 1), which is symmetric in ln s and, for s > 1, that of a scaled
    inverse chi-square distribution.
    """
    assert fit.rows is not None
    prior, stated = fit.prior, np.median(fit.rows.variances()[3:].sum(axis=0))
    wide, own = np.maximum([1.0 / fit.width, prior.residual_log_sd**2 / stated], 1.0)
    nothing = np.zeros((1, _NUM_PARAMETERS), dtype=bool)
    doubted = np.concatenate([nothing, DOUBTED]) if fit.width < 1.0 else nothing
    likely = np.full(len(doubted), (1.0 - prior.stated_share) / len(DOUBTED))
    likely[0] = prior.stated_share
    factors = 2.0 * np.log(MULTIPLES)
    off = np.abs(factors)
    unlikely = 0.5 * prior.residual_runs * (off + np.exp(-off) - 1.0)
    every, multiple = np.divmod(np.arange(len(doubted) * len(factors)), len(factors))
    residual = factors[multiple] + np.log(own) * doubted[every].any(axis=1)
    return (
        np.where(doubted[every], wide, 1.0),
        residual[:, None] * np.isin(COMPONENTS, ("layout", "noise")),
        np.log(likely[every]) - unlikely[multiple],
    )


def _fit_explanations(fit: StepTimeFit, features: Mapping[str, FloatArray]) -> StepTimeFit:
    assert fit.rows is not None
    often = _stall_share(features, prior=fit.prior)
    before_s = fit._model().seconds(fit.design, np.zeros(_NUM_PARAMETERS))[0]
    scale, logs, prior_log = _explanation_grid(fit)
    nothing = np.zeros((len(scale), len(before_s)))
    first = _Attempts(
        number=np.arange(len(scale)),
        scale=scale,
        logs=logs,
        prior_log=prior_log,
        x=np.zeros_like(scale),
        doubt=nothing,
        slow=nothing,
        regular=nothing,
        score=prior_log,
    )
    process = fit._linearised(first)
    spread = np.moveaxis(process.scales, -1, 0)[..., None] * process.rows.variances()
    excess = fit.log_measured - np.log(before_s)
    # Is the whole machine slower than predicted, or do some runs stall? Each iteration converges
    # near its start, so each explanation starts from the prediction, from the median of the runs
    # and from regular runs, and its best end is used.
    starts = [
        classify_runs(excess, spread.sum(axis=0), usual_share=often),
        classify_runs(excess - np.median(excess), spread[2:].sum(axis=0), usual_share=often),
        classify_runs(np.zeros_like(excess), spread.sum(axis=0), usual_share=often),
    ]
    each = first.take(np.tile(first.number, len(starts)))
    doubt = np.concatenate([start.doubt for start in starts])
    each = _update_attempts(fit, replace(each, doubt=doubt), often=often)
    each = each.take(np.flatnonzero(each.score > each.score.max() - NEGLIGIBLE_LOG_ODDS))
    for _ in range(ROUNDS - 1):
        each = _update_attempts(fit, each, often=often)
    order = np.argsort(each.score, kind="stable")
    best = {int(each.number[place]): place for place in order}
    return _average_explanations(
        fit, each.take(np.array(list(best.values()))), features, often=often
    )


def _update_attempts(fit: StepTimeFit, each: _Attempts, *, often: float) -> _Attempts:
    """Update the parameters of the attempts, then their regimes."""
    pieces = math.ceil(len(each.number) * len(fit.design) ** 2 / BATCH_VALUES)
    if pieces > 1 and len(each.number) > 1:
        split = np.array_split(np.arange(len(each.number)), min(pieces, len(each.number)))
        return _Attempts.concatenate(
            [_update_attempts(fit, each.take(one), often=often) for one in split]
        )
    process = fit._linearised(each)
    x = process.parameters.copy()
    x[:, -2:] = np.where(each.x[:, -2:] < 0.0, each.x[:, -2:], x[:, -2:])
    mean, variance = process.left_out()
    judged = classify_runs(process.values - mean, variance, usual_share=often)
    score = each.prior_log + judged.score + process.log_density(judged.regular > 0.5)
    return replace(
        each,
        x=x,
        doubt=judged.doubt,
        slow=judged.slow,
        regular=judged.regular,
        score=score,
    )


def _average_explanations(
    fit: StepTimeFit, each: _Attempts, features: Mapping[str, FloatArray], *, often: float
) -> StepTimeFit:
    """Return the fit with its likely explanations, checked on left-out runs."""
    assert fit.rows is not None
    weight = np.exp(each.score - each.score.max())
    kept = np.flatnonzero(weight >= LEAST_WEIGHT)
    each, weight = each.take(kept), weight[kept] / weight[kept].sum()
    stated_log_sd = float(np.sqrt(np.median(fit.rows.variances().sum(axis=0))))
    layout = fit.rows.layout
    fit = replace(
        fit,
        explanations=Explanations(
            weight=weight, scale=each.scale, logs=each.logs, x=each.x, doubt=each.doubt
        ),
    )
    before_s = fit._model().seconds(fit.design, np.zeros(_NUM_PARAMETERS))[0]
    excess = fit.log_measured - np.log(before_s)
    of_models = _number_models(features, len(excess))

    def left_out(groups: IntArray | None) -> tuple[FloatArray, FloatArray]:
        mean, variance = fit._process.left_out(groups)
        return excess - weight @ (fit._process.values - mean), weight @ variance

    correction, variance = left_out(None)
    slow, regular = weight @ each.slow, weight @ each.regular
    return replace(
        fit,
        applied=_supported_fraction(correction, excess, regular, variance),
        applied_elsewhere=_supported_fraction(left_out(of_models)[0], excess, regular, variance)
        if of_models.max()
        else 1.0,
        stalls=stalls(
            slow,
            layout,
            expected_s=before_s * np.exp(correction),
            measured_s=np.exp(fit.log_measured),
            micro_batches=_micro_batches(features) if features else np.ones(len(excess)),
            usual_share=often,
        ),
        plain=plain_factor(
            excess=excess, left_out_correction=correction, stated_log_sd=stated_log_sd
        )
        if often <= assumed().stalls.unseen_share
        else None,
    )


def _supported_fraction(
    correction: FloatArray, excess: FloatArray, regular: FloatArray, variance: FloatArray
) -> float:
    """Return the fraction s of the corrections that left-out runs support.

    s is a least-squares fit of excess = s correction, with one prior run of each kind at s = 1.
    """
    weight = regular / variance
    return float(
        np.clip(
            (1.0 + (weight * correction) @ excess) / (1.0 + (weight * correction) @ correction),
            0.0,
            1.0,
        )
    )


def _number_models(features: Mapping[str, FloatArray], rows: int) -> IntArray:
    """Return a number that identifies the model of each row, shape (n,)."""
    if not features:
        return np.zeros(rows, dtype=np.intp)
    return np.unique(scale_features(features, SHAPE), axis=0, return_inverse=True)[1].reshape(-1)


def _micro_batches(features: Mapping[str, FloatArray]) -> FloatArray:
    rows = len(next(iter(features.values())))
    return np.asarray(np.exp2(features.get(MICRO_BATCHES, np.zeros(rows))))


def _stated_variances(
    features: Mapping[str, FloatArray], rows: int, *, prior: Prior
) -> tuple[FloatArray, FloatArray, FloatArray] | None:
    """Return the stated variances of all configurations, a model, and a layout, each (n,)."""
    if not np.any(features.get(PAIR_LOG_SD, 0.0)):
        return None
    figures = assumed().step_time
    whole = np.minimum(features[STEP_LOG_SD], figures.regular_log_sd_limit) ** 2
    pair = np.minimum(features[PAIR_LOG_SD] ** 2 / 2.0, prior.residual_log_sd**2)
    own = np.minimum(
        np.maximum(pair, figures.own_share_least * whole), figures.own_share_most * whole
    )
    device = np.minimum(features[DEVICE_LOG_SD] ** 2, whole - own)
    common = device + figures.carried_share * np.minimum(
        whole - own - device, figures.carried_log_sd_limit**2
    )
    return common, whole - own - common, own


def _stall_share(features: Mapping[str, FloatArray], *, prior: Prior) -> float:
    """Return the typical fraction of runs that stall.

    It explains the part of the stated variance beyond `regular_log_sd_limit`.
    """
    if STEP_LOG_SD not in features:
        return prior.slow_share
    beyond = (
        float(np.mean(features[STEP_LOG_SD] ** 2)) - assumed().step_time.regular_log_sd_limit ** 2
    )
    return max(
        beyond / (2.0 * assumed().stalls.mean_log_excess ** 2), assumed().stalls.unseen_share
    )


def _first_run_stall_share(
    features: Mapping[str, FloatArray], *, prior: Prior
) -> FloatArray | float:
    """Return the stall fraction by kind of configuration, shape (n,), to choose the first run.

    Fits do not use it: assumed stalls made predictions for larger clusters several times too slow
    (`python -m benchmarks.learning`).
    """
    if STEP_LOG_SD not in features:
        return prior.slow_share
    figures, rare = assumed().step_time, assumed().stalls.unseen_share
    beyond = features[STEP_LOG_SD] ** 2 - figures.regular_log_sd_limit**2
    share = beyond / (2.0 * assumed().stalls.mean_log_excess ** 2)
    risk = np.exp(features.get(STALL_RISK, np.zeros(len(share))))
    return np.asarray(
        np.where(share > rare, np.clip(share * risk, rare, figures.stall_share_limit), rare)
    )


def _prior_width(design: FloatArray, features: Mapping[str, FloatArray], *, prior: Prior) -> float:
    """Return the ratio of the parameters' prior deviations to those of the kind of device.

    With it, the variance of a typical run due to all parameters equals the stated variance that
    configurations share.
    """
    stated = _stated_variances(features, len(design), prior=prior)
    if stated is None:
        return 1.0
    gradient = _Parameters(prior=prior, scale=np.ones(_NUM_PARAMETERS)).seconds(
        design, np.zeros(_NUM_PARAMETERS)
    )[1]
    return float(np.sqrt(min(1.0, np.median(stated[0] / (gradient**2).sum(axis=1)))))


def _rows(
    gradient: FloatArray,
    features: Mapping[str, FloatArray],
    *,
    prior: Prior,
    names: tuple[str, ...],
    stated: tuple[FloatArray, FloatArray, FloatArray] | None,
) -> Rows:
    count, features = len(gradient), features if names else {}
    if stated is None:
        common, own = (
            np.full(count, prior.model_log_sd**2),
            np.full(count, prior.residual_log_sd**2),
        )
    else:
        rest = stated[0] + stated[1] - (gradient**2).sum(axis=1)
        common = np.maximum(rest, assumed().step_time.model_share_least * stated[1])
        own = stated[2]
    alike = assumed().variances.similar_share if features else 0.0
    return Rows(
        jacobian=gradient,
        model=scale_features(features, MODEL) if features else np.zeros((count, len(MODEL))),
        layout=scale_features(features, names) if features else np.zeros((count, len(names))),
        model_log_sd=np.sqrt(common) * bool(features),
        layout_log_sd=np.sqrt(alike * own),
        noise_log_sd=np.maximum(np.sqrt((1.0 - alike) * own), prior.run_log_sd),
    )


def _part(name: str) -> str:
    """Return the part whose factor applies to `name`.

    Serving objectives use the factor of compute.
    """
    return name if name in STEP_KEYS else "compute"


def _design(*, parts_s: Mapping[str, FloatArray], layer_passes: FloatArray) -> FloatArray:
    """Return the predicted seconds by part and both overheads' multipliers, (n, parts + 2)."""
    layer_passes = np.asarray(layer_passes, dtype=np.float64)
    design = np.zeros((layer_passes.size, _NUM_COLUMNS))
    for name in sorted(parts_s):
        design[:, STEP_KEYS.index(_part(name))] += parts_s[name]
    design[:, -2] = 1.0
    design[:, -1] = layer_passes
    return design


_OF_GROUP = np.array([[part.factor == group for part in STEP] for group in GROUPS], dtype=float)
"""(groups, parts) 1 if the part is in the group, else 0."""


def _doubted() -> BoolArray:
    groups, one = len(GROUPS), np.eye(_NUM_PARAMETERS, dtype=bool)
    of_groups = one[1 : 1 + groups] | np.pad(_OF_GROUP > 0.0, ((0, 0), (1 + groups, 2)))
    every = np.concatenate([one, of_groups, np.ones((1, _NUM_PARAMETERS), dtype=bool)])
    every[:, 0] = True
    return every


DOUBTED = _doubted()
"""(sets, p) sets of parameters whose stated deviations may be too narrow: the common factor alone;
the common factor with one group, part or overhead; with a group and all of its parts; or all.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Parameters:
    prior: Prior
    scale: FloatArray
    """(..., p) factors on the parameters' prior standard deviations."""

    def factors(self, x: FloatArray) -> FloatArray:
        """Return theta, shape (..., parts)."""
        prior, groups, x = self.prior, len(GROUPS), self.scale * x
        log_factors = (
            prior.common_log_sd * x[..., :1]
            + prior.group_log_sd * x[..., 1 : 1 + groups] @ _OF_GROUP
            + prior.part_log_sd * x[..., 1 + groups : -2]
        )
        return np.asarray(np.exp(log_factors))

    def overheads(self, x: FloatArray) -> FloatArray:
        """Return the seconds per step and per layer pass, shape (..., 2)."""
        scales = np.array([self.prior.step_overhead_s, self.prior.layer_overhead_s])
        return np.asarray(self.scale[..., -2:] * scales * x[..., -2:])

    def seconds(self, design: FloatArray, x: FloatArray) -> tuple[FloatArray, FloatArray]:
        """Return the median seconds (..., n), and the derivative of their ln by x, (..., n, p)."""
        prior = self.prior
        part_s = design[:, :-2] * self.factors(x)[..., None, :]
        scales = np.array([prior.step_overhead_s, prior.layer_overhead_s])
        whole_s = part_s.sum(axis=-1)
        median_s = np.maximum(
            whole_s + self.overheads(x) @ design[:, -2:].T, np.finfo(np.float64).tiny
        )
        gradient = np.concatenate(
            [
                prior.common_log_sd * whole_s[..., None],
                prior.group_log_sd * part_s @ _OF_GROUP.T,
                prior.part_log_sd * part_s,
                np.broadcast_to(design[:, -2:] * scales, (*whole_s.shape, 2)),
            ],
            axis=-1,
        )
        return median_s, self.scale[..., None, :] * gradient / median_s[..., None]
