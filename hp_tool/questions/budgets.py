"""Answer sizing queries: choose a model and a training run for a budget of days, parameters, tokens
or FLOPs, and predict the duration.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from hp_tool import catalog
from hp_tool.cost.flops import token_flops
from hp_tool.cost.parameters import active_parameters, total_parameters
from hp_tool.cost.roofline import peak_flops
from hp_tool.domain.hardware import ClusterSpec
from hp_tool.domain.model import ModelSpec
from hp_tool.domain.query import Constraints, Query
from hp_tool.domain.result import Estimate, Ranking, Reason, Recommendation
from hp_tool.domain.sizing import Choice, Sizing, SizingAnswer, SizingQuery
from hp_tool.domain.units import SECONDS_PER_DAY
from hp_tool.domain.workload import TrainingWorkload
from hp_tool.errors import HpToolError, InputError, UnsupportedError
from hp_tool.questions import schema, training
from hp_tool.questions.sizing import laws, shapes
from hp_tool.questions.sizing.laws import LAWS, ScalingLaw
from hp_tool.questions.training.calibrated import Calibrations
from hp_tool.questions.training.problem import resolve_model

RELATIVE_TOLERANCE = 0.02
"""Relative deviation from the budgeted days at which the search for a model size stops. The number
of tokens is then adjusted to use all days.
"""
MAX_PLANS = 24
"""Maximum number of model sizes tried per budget."""
_STEP_DOWN_FACTOR = 4.0
"""Factor by which compute is reduced if a model does not fit."""


def parse_sizing(data: Mapping[str, Any] | str | bytes) -> SizingQuery:
    """Return a validated sizing query from a mapping, or from JSON or YAML text.

    Raises:
        InputError: The query is invalid.
    """
    query: SizingQuery = schema.parse(SizingQuery, data)
    schema.check_axes(query.parallel, field="parallel")
    if query.experts is not None and query.experts.num_experts_per_tok > query.experts.num_experts:
        raise InputError(
            f"{query.experts.num_experts_per_tok} experts per token exceed the "
            f"{query.experts.num_experts} experts",
            field="experts.num_experts_per_tok",
        )
    _check_budget(query)
    return query


def _model(query: SizingQuery) -> ModelSpec | None:
    """Return the model that the query names, or None.

    Raises:
        InputError: The model is malformed.
        NotFoundError: The name is unknown.
        UnsupportedError: The model is not a decoder.
    """
    if query.model is None:
        return None
    model = resolve_model(query.model)
    if model.architecture != "decoder":
        raise UnsupportedError(
            f"{model.name} is not a decoder, and the scaling laws apply to decoders only; use "
            "`hp-tool recommend` for its days",
            field="model",
        )
    return model


def _check_budget(query: SizingQuery) -> None:
    """Check that the query sets a budget and does not overdetermine the training run.

    Raises:
        InputError: The budget is missing, or fields contradict or exclude each other.
    """
    size = "model" if query.model is not None else "parameters"
    sizes = [name for name in (size, "tokens", "flops") if getattr(query, name) is not None]
    if query.model is not None and query.parameters is not None:
        raise InputError("model and parameters both set the size; remove one", field="parameters")
    if len(sizes) == 3:
        raise InputError(
            f"{size}, tokens and flops are all set, but two determine the third; remove one",
            field="flops",
        )
    if not sizes and query.days is None:
        raise InputError(
            "No budget. Set days and a cluster, or one of parameters, model, tokens, flops.",
            field="days",
        )
    if query.days is not None and query.cluster is None:
        raise InputError(
            "Missing `cluster`, which days require.", field="cluster", code="missing_field"
        )
    if len(sizes) == 2 and query.tokens_per_parameter is not None:
        raise InputError(
            f"{sizes[0]} and {sizes[1]} already determine tokens_per_parameter; remove one",
            field="tokens_per_parameter",
        )
    if query.model is not None:
        for name in ("vocab_size", "aspect_ratio", "num_key_value_heads", "experts"):
            if getattr(query, name) is not None:
                raise InputError(
                    f"{name} applies only if the model is searched; remove it or model", field=name
                )


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """A model with its training run, and the best configuration if the query names a cluster."""

    model: ModelSpec
    target_parameters: float
    """Target for the active parameters from which the shape of `model` was chosen."""
    workload: TrainingWorkload
    query: Query | None = None
    """Query for the cost model; None without a cluster."""
    recommendation: Recommendation | None = None
    """The best configuration; None without a cluster or if no configuration is acceptable."""
    reasons: tuple[Reason, ...] = ()

    @property
    def tokens(self) -> float:
        assert self.workload.total_tokens is not None
        return self.workload.total_tokens

    @property
    def estimate(self) -> Estimate | None:
        """The recommendation's estimate, calibrated if there are measurements from the cluster."""
        row = self.recommendation
        return None if row is None else row.preferred_estimate

    @property
    def effective_days(self) -> float | None:
        """Calendar days, including time lost to failures."""
        return None if self.estimate is None else self.estimate.effective_days


@dataclass(frozen=True, slots=True, kw_only=True)
class Planner:
    """Plans training runs of different sizes for one sizing query."""

    query: SizingQuery
    law: ScalingLaw
    """Scaling law that divides compute between parameters and tokens."""
    model: ModelSpec | None
    cluster: ClusterSpec | None
    calibrations: Calibrations | None

    @property
    def parameters(self) -> float | None:
        """Active parameters if the query sets them or the model, else None."""
        query, model = self.query, self.model
        return (
            query.parameters
            if model is None
            else active_parameters(model, sequence_length=query.sequence_length)
        )

    @property
    def flops(self) -> float | None:
        """Compute of the training run in FLOPs, 6 N D; None if the query sets only days."""
        parameters, tokens = self.parameters, self.query.tokens
        if self.query.flops is not None:
            return self.query.flops
        if parameters is not None:
            return (
                self.law.flops_of_parameters(parameters)
                if tokens is None
                else 6.0 * parameters * tokens
            )
        return None if tokens is None else self.law.flops_of_tokens(tokens)

    def plan_for_flops(self, flops: float) -> Plan:
        """Return the training run with 6 N D = `flops`, without predicting its duration.

        If the query leaves parameters or tokens open, the scaling law determines them.
        """
        query, tokens, parameters = self.query, self.query.tokens, self.parameters
        if parameters is None:
            parameters = self.law.parameters(flops) if tokens is None else flops / (6.0 * tokens)
        model = self.model or shapes.choose_shape(query, parameters=parameters)
        tokens = flops / (6.0 * parameters) if tokens is None else tokens
        batch = query.global_batch_size or laws.batch_sequences(
            flops=laws.hyperparameter_flops(
                model=model, sequence_length=query.sequence_length, tokens=tokens
            ),
            sequence_length=query.sequence_length,
            num_gpus=1 if self.cluster is None else self.cluster.num_gpus,
        )
        workload = TrainingWorkload(
            sequence_length=query.sequence_length,
            global_batch_size=batch,
            precision=query.precision,
            framework=query.framework,
            total_tokens=tokens,
            reliability=query.reliability,
        )
        return Plan(model=model, target_parameters=parameters, workload=workload)

    def timed(self, plan: Plan, *, deadline_days: float | None = None) -> Plan:
        """Return the plan with its fastest configuration on the whole cluster.

        With a deadline in calendar days, use the fewest devices that meet it.
        """
        if self.query.cluster is None:
            return plan
        query = Query(
            id=self.query.id,
            kind="training",
            model=self.query.model or plan.model,
            cluster=self.query.cluster,
            training=plan.workload,
            parallel=self.query.parallel,
            objective=None if deadline_days is None else "min_gpus",
            constraints=Constraints(max_days=deadline_days),
        )
        ranking = training.recommend(query=query, top=1, calibrations=self.calibrations)
        best = next(iter(ranking.recommendations), None)
        return replace(
            plan,
            query=query,
            recommendation=best,
            reasons=_infeasibility_reasons(ranking) if best is None else (),
        )


def _infeasibility_reasons(ranking: Ranking[Recommendation]) -> tuple[Reason, ...]:
    """Return the reasons why no configuration is acceptable: those of the nearest miss, or the
    number of combinations rejected by each rule.
    """
    if ranking.nearest_misses:
        return ranking.nearest_misses[0].estimate.reasons
    return tuple(
        Reason(
            code=code,
            message=f"rejects {count:,} layouts",
            needed=None,
            available=None,
        )
        for code, count in ranking.rejections.items()
    )


def _largest_plan(planner: Planner) -> Plan:
    """Return the largest plan, by the scaling law, that fits into the query's calendar days.

    Each iteration multiplies the compute of the last plan by the ratio of the budgeted days to the
    plan's days. The first plan assumes the devices' peak rate, which gives an upper bound. Model
    shapes are coarse and memory may limit the size. Therefore the number of tokens of the nearest
    plan is finally adjusted to use all days.
    """
    days = planner.query.days
    assert days is not None and planner.cluster is not None  # Checked when the query was parsed.
    peak = peak_flops(planner.cluster.gpu, precision=planner.query.precision)
    flops = peak * planner.cluster.num_gpus * days * SECONDS_PER_DAY
    low, high = 0.0, math.inf
    best, nearest = None, math.inf
    for _ in range(MAX_PLANS):
        plan = planner.timed(planner.plan_for_flops(flops))
        following = flops / _STEP_DOWN_FACTOR
        if (needed := plan.effective_days) is None:
            high = flops
        else:
            share = days / needed
            low, high = (flops, high) if share >= 1.0 else (low, flops)
            following = flops * share
            if abs(math.log(share)) < nearest:
                best, nearest = plan, abs(math.log(share))
        if nearest <= RELATIVE_TOLERANCE or high <= low * (1.0 + RELATIVE_TOLERANCE):
            break
        flops = following if low < following < high else math.sqrt(low * high)
    if best is None:
        return plan
    assert best.effective_days is not None
    tokens = best.tokens * days / best.effective_days
    return planner.timed(replace(best, workload=replace(best.workload, total_tokens=tokens)))


def answer_sizing(query: SizingQuery, *, calibrations: Calibrations | None = None) -> SizingAnswer:
    """Return the model and the training run for a budget.

    If no configuration fits in memory and meets the deadline, the answer has `feasible: false` and
    the reasons.

    Raises:
        HpToolError: The query cannot be answered.
    """
    ratio = query.tokens_per_parameter
    planner = Planner(
        query=query,
        law=LAWS[query.law] if ratio is None else laws.over_trained_law(tokens_per_parameter=ratio),
        model=_model(query),
        cluster=None if query.cluster is None else catalog.cluster(query.cluster),
        calibrations=calibrations,
    )
    try:
        flops = planner.flops
        plan = (
            _largest_plan(planner)
            if flops is None
            else planner.timed(planner.plan_for_flops(flops), deadline_days=query.days)
        )
    except HpToolError as error:
        # In a sizing query, keys of `training` are at the top level.
        error.field = error.field and error.field.removeprefix("training.")
        raise
    return SizingAnswer(id=query.id, sizing=_sizing_of_plan(plan, query=query, law=planner.law))


def _sizing_of_plan(plan: Plan, *, query: SizingQuery, law: ScalingLaw) -> Sizing:
    model, tokens, length = plan.model, plan.tokens, query.sequence_length
    active = active_parameters(model, sequence_length=length)
    estimate = plan.estimate
    return Sizing(
        feasible=not plan.reasons,
        reasons=plan.reasons,
        model=model,
        parameters=total_parameters(model, sequence_length=length),
        active_parameters=active,
        tokens=tokens,
        tokens_per_parameter=tokens / active,
        flops=token_flops(model, plan.workload).model * tokens,
        law=_law_optimum(law, flops=6.0 * active * tokens),
        loss=_loss_choice(active, tokens),
        compute_overhead=laws.compute_overhead(parameters=active, tokens=tokens),
        shape=shapes.shape_choices(model, query, parameters=plan.target_parameters)
        if query.model is None
        else (),
        hyperparameters=laws.starting_hyperparameters(
            model=model,
            parameters=active,
            tokens=tokens,
            sequence_length=length,
            global_batch_size=plan.workload.global_batch_size,
        ),
        num_gpus=None if estimate is None else int(str(estimate.provenance["num_gpus"])),
        days=None if estimate is None else estimate.days,
        effective_days=plan.effective_days,
        gpu_hours=None if estimate is None else estimate.gpu_hours,
        cost=None if estimate is None else estimate.cost,
        goodput=None if estimate is None else estimate.goodput,
        recommendation=plan.recommendation,
        query=None if plan.query is None else schema.query_mapping(plan.query),
    )


def _law_optimum(law: ScalingLaw, *, flops: float) -> Choice:
    """Return the compute-optimal number of parameters, even if the query sets another number."""
    best = law.parameters(flops)
    return Choice(
        name=law.name,
        value=best,
        unit="parameters",
        rule=f"N = {law.anchor_parameters:.4g} (C / {law.anchor_flops:.4g})^{law.exponent:.4g} at "
        f"C = 6 N D = {flops:.3g}",
        source=law.source,
        extrapolated=law.extrapolated(best),
        alternatives={
            other.name: other.parameters(flops) for other in LAWS.values() if other.name != law.name
        },
    )


def _loss_choice(parameters: float, tokens: float) -> Choice:
    law = LAWS["chinchilla-corrected"]
    return Choice(
        name="loss",
        value=laws.predicted_loss(parameters=parameters, tokens=tokens),
        unit="nats a token",
        rule="E + A / N^alpha + B / D^beta on MassiveText and its tokenizer; use it to "
        "compare sizes, not corpora",
        source="arXiv 2404.10102",
        extrapolated=law.extrapolated(parameters),
    )
