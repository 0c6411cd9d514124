"""From a sizing query to the object that answers it: the same for a command and a request body."""

from __future__ import annotations

from hp_tool.budgets.plan import Plan, Planner, solve
from hp_tool.budgets.query import query_flops, query_law, query_model
from hp_tool.catalog import cluster as catalogue_cluster
from hp_tool.cost.flops import token_flops
from hp_tool.cost.parameters import total_parameters
from hp_tool.domain.sizing import Choice, Sizing, SizingAnswer, SizingQuery
from hp_tool.errors import HpToolError
from hp_tool.queries import schema
from hp_tool.sizing import LAWS, ScalingLaw, active_parameters, compute_overhead, loss, shape_choices, starting_hyperparameters
from hp_tool.training.calibrated import Calibrations


def size_answer(query: SizingQuery, *, calibrations: Calibrations | None = None) -> SizingAnswer:
    """The training that a budget buys. Raises HpToolError.

    One that fits nowhere, or meets no deadline, is `feasible: false` with its reasons.
    """
    model, law = query_model(query), query_law(query)
    planner = Planner(
        query=query,
        law=law,
        model=model,
        cluster=None if query.cluster is None else catalogue_cluster(query.cluster),
        calibrations=calibrations,
    )
    try:
        plan = solve(planner, flops=query_flops(query, model=model, law=law))
    except HpToolError as error:
        # What a query says below `training` stands at the top of a budget.
        error.field = error.field and error.field.removeprefix("training.")
        raise
    return SizingAnswer(id=query.id, sizing=_sizing(plan, query=query, law=law))


def _sizing(plan: Plan, *, query: SizingQuery, law: ScalingLaw) -> Sizing:
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
        law=_law_choice(law, flops=6.0 * active * tokens),
        loss=_loss_choice(active, tokens),
        compute_overhead=compute_overhead(parameters=active, tokens=tokens),
        shape=()
        if query.model is not None
        else shape_choices(model, style=query.style, asked=plan.target_parameters, ratio=query.aspect_ratio),
        hyperparameters=starting_hyperparameters(
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


def _law_choice(law: ScalingLaw, *, flops: float) -> Choice:
    """What the law finds best at this compute, whether it was followed or not."""
    best = law.parameters(flops)
    return Choice(
        name=law.name,
        value=best,
        unit="parameters",
        rule=f"N = {law.anchor_parameters:.4g} (C / {law.anchor_flops:.4g})^{law.exponent:.4g} at C = 6 N D = {flops:.3g}",
        source=law.source,
        extrapolated=law.extrapolated(best),
        alternatives={other.name: other.parameters(flops) for other in LAWS.values() if other.name != law.name},
    )


def _loss_choice(parameters: float, tokens: float) -> Choice:
    law = LAWS["chinchilla-corrected"]
    return Choice(
        name="loss",
        value=loss(parameters=parameters, tokens=tokens),
        unit="nats a token",
        rule="E + A / N^alpha + B / D^beta on MassiveText and its tokenizer; compare sizes with it, not corpora",
        source="arXiv 2404.10102",
        extrapolated=law.extrapolated(parameters),
    )
