"""Resolve, validate and estimate the single configuration of a serving query."""

from dataclasses import replace
from typing import Any

import numpy as np

from hp_tool.cost.serving.candidates import ServingCandidates, default_max_num_seqs
from hp_tool.cost.serving.experts import fewest_redundant
from hp_tool.cost.serving.legality import explain, legality
from hp_tool.domain.parallel import ParallelQuery
from hp_tool.domain.query import Query
from hp_tool.domain.serving import InferenceEstimate, ServingConfig
from hp_tool.errors import UnsupportedError
from hp_tool.questions.serving.estimates import estimate_row
from hp_tool.questions.serving.fixes import fixes
from hp_tool.questions.serving.highest_load import highest_loads, sustainable_load
from hp_tool.questions.serving.problem import ServingProblem, resolve_serving
from hp_tool.questions.serving.trace_ranking import estimate_simulated
from hp_tool.questions.training.evaluate import single_values


def estimate(*, query: Query, with_fixes: bool = True) -> InferenceEstimate:
    """Predict the configuration in `query.parallel`. Omitted sizes are 1, and omitted engine limits
    have the engine's defaults.

    If the configuration is illegal, does not fit or misses a target, the estimate has
    feasible=False, reasons and fixes. Fixes require several thousand estimates, so set `with_fixes`
    to False if speed matters.
    """
    query.check_num_gpus()
    # `objective` applies only to rankings.
    problem = replace(resolve_serving(query), may_queue=True)
    if query.inference is not None and query.inference.disaggregated is not None:
        raise UnsupportedError(
            "An estimate describes replicas that both prefill and decode. Use `recommend` for "
            "inference.disaggregated, which may set sizes.",
            field="inference.disaggregated",
        )
    config = resolve_config(query.parallel, problem=problem)
    candidate = ServingCandidates.from_configs([config], concurrency=[problem.concurrency or 1])
    rules: dict[str, Any] = {
        "model": problem.model,
        "num_gpus": problem.cluster.num_gpus,
        "longest_request": problem.longest_request,
    }
    code = int(legality(candidates=candidate, **rules)[0])
    if code:
        reasons = explain(code, config=config, **rules)
        estimate = InferenceEstimate(feasible=False, reasons=reasons, parallel=config)
    else:
        estimate = (
            _estimate_candidate(problem, candidate)
            if problem.trace is None
            else estimate_simulated(problem, candidate)
        )
    if estimate.feasible or not with_fixes or problem.trace is not None:
        return estimate
    bearable = None if code else sustainable_load(problem, candidate)
    return replace(
        estimate,
        highest_load=bearable,
        fixes=fixes(query=query, problem=problem, infeasible=estimate),
    )


def _estimate_candidate(problem: ServingProblem, candidate: ServingCandidates) -> InferenceEstimate:
    loads = highest_loads(problem, candidate)
    return estimate_row(
        problem.cost_candidates(candidate)
        if loads is None
        else problem.cost_candidate_at(loads[0], candidate),
        0,
    )


def resolve_config(parallel: ParallelQuery, *, problem: ServingProblem) -> ServingConfig:
    """Return the single configuration of the query, with the derived data_parallel_size.

    Raises:
        InputError: The query lists several values for a field.
    """
    values = {"max_num_batched_tokens": problem.engine.max_num_batched_tokens}
    values |= single_values(parallel, ServingConfig.__slots__)
    groups = values.get("attention_data_parallel_size", 1)
    values.setdefault("max_num_seqs", int(default_max_num_seqs(problem.engine, groups)))
    stage = values.get("tensor_parallel_size", 1) * values.get("pipeline_parallel_size", 1)
    fewest = fewest_redundant(problem.model, np.array(values.get("expert_parallel_size", 1)))
    values.setdefault("redundant_experts", int(fewest))
    values.setdefault("data_parallel_size", max(problem.cluster.num_gpus // stage, 1))
    return ServingConfig(**values)
