"""Step-time fit: factors on groups of parts, two overheads, effects of models and layouts,
stalls.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

import numpy as np

from hp_tool.domain.parts import factor
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
    scaled,
)
from hp_tool.loop.calibration.fitting import COMPONENTS, Prior, Process, Rows, inflation
from hp_tool.loop.calibration.parts import GROUPS, as_traced, part_logs
from hp_tool.loop.calibration.plain import PlainFactor, plain_factor
from hp_tool.loop.calibration.prediction import SlowRegime, StepPrediction
from hp_tool.loop.calibration.regimes import Judgement, Stalls, judge, stalls

_NUM_PARAMETERS = 1 + len(GROUPS) + 2
ROUNDS = 3
"""Iterations of fitting parameters, scales and regimes, each given the others."""


@dataclass(frozen=True, kw_only=True)
class StepTimeFit:
    """ln step_s = ln(sum_g theta_g T_g + o_step + o_layer n_layer) + model + layout + noise.

    T_g are the predicted seconds of group g. theta_g = exp(a + d_g), where `a` is shared, so a
    group without runs follows the whole device. The parameters x = (a, d_1..d_g, o_step, o_layer)
    are in units of their prior standard deviations.
    """

    prior: Prior
    x: FloatArray
    """(p,) standardised parameters; zeros are the prior."""
    width: float = 1.0
    """Factor on the prior standard deviations of parameters, so that they sum to the cost model's
    stated variance.
    """
    as_stated: bool = True
    """Whether the cost model's stated deviations apply, else the prior of the device's kind."""
    process: Process | None = None
    """None before the first run."""
    names: tuple[str, ...] = ()
    """Names of the features of the process' layouts."""
    shapes: FloatArray = field(default_factory=lambda: np.empty((0, len(SHAPE))))
    """(n, k) shapes of the models that ran."""
    applied: float = 1.0
    """Fraction of a correction applied to models that ran, from held-out runs."""
    applied_elsewhere: float = 1.0
    """Fraction of a correction applied to other models, from held-out models."""
    inflation: float = 1.0
    """Factor, at least 1, by which leave-one-out errors of runs exceeded their stated
    deviations.
    """
    stalls: Stalls | None = None
    """None if no run stalled and none typically does."""
    plain: PlainFactor | None = None
    """Replaces the whole fit if the runs contradict it."""
    part_logs: FloatArray = field(default_factory=lambda: np.empty(0))
    """(parts,) ln of the factor on each of STEP_KEYS from traces; empty without traces."""

    @property
    def factors(self) -> dict[str, float]:
        """Return theta by group: measured seconds per predicted second."""
        if self.plain is not None:
            return dict.fromkeys(GROUPS, float(np.exp(self.plain.log_factor)))
        return dict(zip(GROUPS, self._model.factors(self.x).tolist(), strict=True))

    @property
    def step_overhead_s(self) -> float:
        """Return the fixed seconds of every step."""
        return float(self._model.overheads(self.x)[0])

    @property
    def layer_overhead_s(self) -> float:
        """Return the fixed seconds of every pass of a micro-batch through a layer."""
        return float(self._model.overheads(self.x)[1])

    @property
    def residual_log_sd(self) -> float:
        """Return the deviation of a configuration that the factors do not explain."""
        if self.process is None:
            return self.prior.residual_log_sd
        if self.plain is not None:
            return self.plain.log_sd
        rows = self.process.rows
        return float(
            np.sqrt(np.median((self.process.scales[2:, None] * rows.variances()[2:]).sum(axis=0)))
        )

    @property
    def _model(self) -> "_Parameters":
        return _Parameters(prior=self.prior, width=self.width)

    def calibrated_parts(
        self,
        *,
        parts_s: Mapping[str, FloatArray],
        layer_passes: FloatArray,
        step: StepPrediction | None = None,
    ) -> dict[str, FloatArray]:
        """Return each part times its group's factor, and the overheads as a part `overhead`.

        The parts sum to the median step time. The remaining corrections of a prediction `step` for
        the same rows are distributed in proportion. Stalls are overhead.
        """
        factors, known_s = self.factors, as_traced(parts_s, self.part_logs)
        parts = {name: seconds * factors[factor(name)] for name, seconds in known_s.items()}
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

        Without evidence the median is the parts' sum.
        """
        design = _design(parts_s=as_traced(parts_s, self.part_logs), layer_passes=layer_passes)
        before_s, gradient = self._model.seconds(design, np.zeros(_NUM_PARAMETERS))
        known = features or {}
        doubt = self._rows(gradient, known).variances().sum(axis=0)
        stated = known.get(STEP_LOG_SD, np.sqrt(doubt))
        if self.process is None:
            usual = _first_stalls(known, prior=self.prior)
            return StepPrediction(regular_s=before_s, log_sd=stated, usual_slow_share=usual)
        if self.plain is not None:
            regular_s = before_s * np.exp(self.plain.log_factor)
            return StepPrediction(regular_s=regular_s, log_sd=np.maximum(stated, self.plain.log_sd))
        median_s, gradient = self._model.seconds(design, self.x)
        rows = self._rows(gradient, known)
        shift, variance = self.process.predict(rows)
        shift = shift if known else shift + self.process.usual_effect
        ran = self._ran(known, len(median_s))
        share = np.where(ran, self.applied, self.applied_elsewhere)
        whole = np.log(median_s / before_s) + shift
        correction = share * whole
        # The part of a correction that is not applied may be right after all.
        log_sd = np.hypot(self.inflation * np.sqrt(variance), (1.0 - share) * whole)
        # The stated variances of models were measured on machines without a shift; with a shift
        # they grow in proportion.
        elsewhere = np.hypot(
            stated, self.prior.model_log_sd / self.prior.common_log_sd * correction
        )
        log_sd = np.where(ran, log_sd, np.maximum(log_sd, elsewhere))
        regular_s = before_s * np.exp(correction)
        slow = None
        if self.stalls is not None and known:
            probability, stall_s = self.stalls.predict(rows.layout)
            slow = SlowRegime(
                probability=probability, step_s=regular_s + stall_s * _micro_batches(known)
            )
        return StepPrediction(regular_s=regular_s, log_sd=log_sd, slow=slow)

    def _rows(self, gradient: FloatArray, features: Mapping[str, FloatArray]) -> Rows:
        stated = _stated(features, len(gradient), prior=self.prior) if self.as_stated else None
        return _rows(gradient, features, prior=self.prior, names=self.names, stated=stated)

    def _ran(self, features: Mapping[str, FloatArray], rows: int) -> BoolArray:
        """Return (n,) whether a run used the configuration's model."""
        if not features or not self.names:
            return np.ones(rows, dtype=bool)
        apart = np.abs(scaled(features, SHAPE)[:, None] - self.shapes)
        return np.asarray((apart.max(axis=2) < SAME).any(axis=1))


def fit_step_time(*, evidence: Evidence, prior: Prior) -> StepTimeFit:
    """Fit the posterior of the parameters and effects to the runs that have a step time."""
    runs = evidence.take(
        np.flatnonzero(np.isfinite(evidence.measured_step_s) & (evidence.measured_step_s > 0))
    )
    traced = StepTimeFit(
        prior=prior, x=np.zeros(_NUM_PARAMETERS), part_logs=part_logs(evidence, prior=prior)
    )
    design = _design(
        parts_s=as_traced(runs.parts_s, traced.part_logs), layer_passes=runs.layer_passes
    )
    log_measured = np.log(runs.measured_step_s)
    # Sums over rows use sorted order, so that the answer does not depend on the order in which runs
    # ended.
    order = np.lexsort((*design.T, *runs.features.values(), log_measured))
    design, log_measured, runs = design[order], log_measured[order], runs.take(order)
    if not len(runs):
        return traced
    features, names = runs.features, tuple(sorted(set(runs.features) - STATED))
    plain = replace(
        traced,
        width=_width(design, features, prior=prior),
        names=names,
        shapes=np.unique(scaled(features, SHAPE), axis=0)
        if features
        else np.empty((0, len(SHAPE))),
    )
    seconds, gradient = plain._model.seconds(design, plain.x)
    excess, often = log_measured - np.log(seconds), _stall_share(features, prior=prior)
    surprise = np.abs(excess) / np.sqrt(plain._rows(gradient, features).variances().sum(axis=0))
    machines, figures = [plain], assumed().step_time
    if plain.width < 1.0 and surprise.max() > figures.surprise_sds:
        machines.append(replace(plain, width=1.0, as_stated=False))
    # Is the whole machine slower than predicted, or do some runs stall? Each iteration converges
    # near its start, so the fit starts from the median of the runs and from the prediction, and the
    # best explanation is used.
    fits = []
    for machine in machines:
        rows = machine._rows(machine._model.seconds(design, machine.x)[1], features)
        own, whole = rows.variances()[2:].sum(axis=0), rows.variances().sum(axis=0)
        for start in (
            judge(excess - np.median(excess), own, usual_share=often),
            judge(excess, whole, usual_share=often),
        ):
            fit, score = _fit_from(start, machine, design, log_measured, features, often=often)
            odd = figures.surprising_machine_share
            fits.append((score + np.log(1.0 - odd if machine.as_stated else odd), fit))
    return max(fits, key=lambda each: each[0])[1]


def _fit_from(
    judged: Judgement,
    plain: StepTimeFit,
    design: FloatArray,
    log_measured: FloatArray,
    features: Mapping[str, FloatArray],
    *,
    often: float,
) -> tuple[StepTimeFit, float]:
    """Iterate parameters, scales and regimes; return the log density of the runs.

    `often` is the fraction of runs that typically stall.
    """
    model, x = plain._model, plain.x
    logs = np.zeros(len(COMPONENTS))
    before_s = model.seconds(design, x)[0]
    free = np.ones(_NUM_PARAMETERS)
    for _ in range(ROUNDS):
        predicted_s, gradient = model.seconds(design, x)
        gradient = gradient * free
        rows = plain._rows(gradient, features)
        values = log_measured - np.log(predicted_s) + gradient @ x
        doubt = judged.doubt
        process = Process(rows=rows, values=values, doubt=doubt, logs=logs).fitted()
        logs, x = process.logs, process.parameters
        free[-2:] *= x[-2:] >= 0.0  # overheads are not negative
        x = x * free
        mean, variance = process.left_out()
        judged = judge(values - mean, variance, usual_share=often)
    z, rare = (values - mean) ** 2 / variance, often <= assumed().stalls.unseen_share
    correction, regular = mean - values + log_measured - np.log(before_s), judged.regular
    excess = log_measured - np.log(before_s)
    of_models = _model_numbers(features, len(excess))
    elsewhere = excess - (values - process.left_out(of_models)[0])
    fit = replace(
        plain,
        x=x,
        process=process,
        applied=_trusted(correction, excess, regular, variance),
        applied_elsewhere=_trusted(elsewhere, excess, regular, variance)
        if of_models.max()
        else 1.0,
        inflation=inflation(z, weight=regular),
        stalls=stalls(
            judged,
            rows.layout,
            expected_s=np.exp(log_measured - (values - mean)),
            measured_s=np.exp(log_measured),
            micro_batches=_micro_batches(features) if features else np.ones(len(excess)),
            usual_share=often,
        ),
        plain=plain_factor(excess=excess, left_out_correction=correction, slow=judged.slow)
        if rare
        else None,
    )
    return fit, judged.score - process.improbability(logs)[0]


def _trusted(
    correction: FloatArray, excess: FloatArray, regular: FloatArray, variance: FloatArray
) -> float:
    """Return the fraction s of corrections that fits held-out runs.

    Least squares of excess = s correction, with one run of each kind at s = 1.
    """
    weight = regular / variance
    return float(
        np.clip(
            (1.0 + (weight * correction) @ excess) / (1.0 + (weight * correction) @ correction),
            0.0,
            1.0,
        )
    )


def _model_numbers(features: Mapping[str, FloatArray], rows: int) -> IntArray:
    """Return (n,) a number for each model."""
    if not features:
        return np.zeros(rows, dtype=np.intp)
    return np.unique(scaled(features, SHAPE), axis=0, return_inverse=True)[1].reshape(-1)


def _micro_batches(features: Mapping[str, FloatArray]) -> FloatArray:
    rows = len(next(iter(features.values())))
    return np.asarray(np.exp2(features.get(MICRO_BATCHES, np.zeros(rows))))


def _stated(
    features: Mapping[str, FloatArray], rows: int, *, prior: Prior
) -> tuple[FloatArray, FloatArray, FloatArray] | None:
    """Return (n,) stated variances common to all configurations, of one model, and of one
    layout.
    """
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
    """Return the fraction of runs that stall.

    It explains the stated variance beyond `regular_log_sd_limit`.
    """
    if STEP_LOG_SD not in features:
        return prior.slow_share
    beyond = (
        float(np.mean(features[STEP_LOG_SD] ** 2)) - assumed().step_time.regular_log_sd_limit ** 2
    )
    return max(
        beyond / (2.0 * assumed().stalls.mean_log_excess ** 2), assumed().stalls.unseen_share
    )


def _first_stalls(features: Mapping[str, FloatArray], *, prior: Prior) -> FloatArray | float:
    """Return (n,) stall shares by kind of configuration, to choose a first run.

    Fits do not use it: presumed stalls made predictions for larger clusters several times too slow
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


def _width(design: FloatArray, features: Mapping[str, FloatArray], *, prior: Prior) -> float:
    """Return the factor by which the parameters' prior is narrower than the device kind's.

    With it, the variance of a typical run through all parameters equals the variance common to
    configurations.
    """
    stated = _stated(features, len(design), prior=prior)
    if stated is None:
        return 1.0
    gradient = _Parameters(prior=prior, width=1.0).seconds(design, np.zeros(_NUM_PARAMETERS))[1]
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
        model=scaled(features, MODEL) if features else np.zeros((count, len(MODEL))),
        layout=scaled(features, names) if features else np.zeros((count, len(names))),
        model_log_sd=np.sqrt(common) * bool(features),
        layout_log_sd=np.sqrt(alike * own),
        noise_log_sd=np.sqrt((1.0 - alike) * own),
    )


def _design(*, parts_s: Mapping[str, FloatArray], layer_passes: FloatArray) -> FloatArray:
    """Return (n, groups + 2): predicted seconds by group, and the multipliers of the two
    overheads.
    """
    layer_passes = np.asarray(layer_passes, dtype=np.float64)
    design = np.zeros((layer_passes.size, len(GROUPS) + 2))
    for name in sorted(parts_s):
        design[:, GROUPS.index(factor(name))] += parts_s[name]
    design[:, -2] = 1.0
    design[:, -1] = layer_passes
    return design


@dataclass(frozen=True, slots=True, kw_only=True)
class _Parameters:
    prior: Prior
    width: float

    def factors(self, x: FloatArray) -> FloatArray:
        """Return (groups,) theta."""
        log_factors = (
            self.prior.common_log_sd * x[0] + self.prior.group_log_sd * x[1 : 1 + len(GROUPS)]
        )
        return np.asarray(np.exp(self.width * log_factors))

    def overheads(self, x: FloatArray) -> FloatArray:
        """Return (2,) seconds of a step, and of a pass through a layer."""
        return (
            self.width
            * np.array([self.prior.step_overhead_s, self.prior.layer_overhead_s])
            * x[1 + len(GROUPS) :]
        )

    def seconds(self, design: FloatArray, x: FloatArray) -> tuple[FloatArray, FloatArray]:
        """Return (n,) median seconds and the (n, p) derivative of their logarithm by the
        parameters.
        """
        prior, groups = self.prior, len(GROUPS)
        group_s = design[:, :groups] * self.factors(x)
        scales = np.array([prior.step_overhead_s, prior.layer_overhead_s])
        median_s = np.maximum(
            group_s.sum(axis=1) + design[:, groups:] @ self.overheads(x), np.finfo(np.float64).tiny
        )
        gradient = np.empty((design.shape[0], x.size))
        gradient[:, 0] = prior.common_log_sd * group_s.sum(axis=1)
        gradient[:, 1 : 1 + groups] = prior.group_log_sd * group_s
        gradient[:, 1 + groups :] = design[:, groups:] * scales
        return median_s, self.width * gradient / median_s[:, None]
