"""Usual settings: settings that a query omits and that its answers assume, because most training
runs of this kind use them.

For MoE models, these are the settings of the current recipe. A step with the framework's defaults,
which hardly anyone uses, can take three times as long. For other models, they are CUDA graphs, if
kernel launches limit the step and recipes for the GPU use graphs. Not every layout supports them.
An estimate assumes the usual settings that its layout supports (`with_usual_settings`), and a
ranking those that each row supports (`usual_problems`).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import fields, replace
from typing import Any

from hp_tool.cost.candidates import Candidates
from hp_tool.cost.strategy_legality import excluded_layouts
from hp_tool.domain.hardware import ClusterSpec
from hp_tool.domain.parallel import ParallelQuery, Recompute
from hp_tool.domain.query import Query
from hp_tool.domain.result import Estimate
from hp_tool.errors import HpToolError
from hp_tool.questions.schema import parse_query, query_mapping, set_paths
from hp_tool.questions.training.evaluate import ResolvedConfiguration, resolve_configuration
from hp_tool.questions.training.problem import TrainingProblem, Usual, resolve_training
from hp_tool.questions.training.with_recipe import (
    changed_settings,
    inserted_settings,
    recipe_queries,
    supported_recipe,
)

GRAPHS = {"training.cuda_graphs": True}
DISPATCHER = "moe_token_dispatcher_type"
"""Axis that a recipe also sets for rows without expert parallelism, where the axis has no value."""
ROW_VALUES: Mapping[str, Any] = {
    "recompute": Recompute(granularity="none"),
    "zero_stage": 1,
    "expert_tensor_parallel_size": 1,
}
"""Values of axes that recipes set but that vary by row in a ranking. The query has these values
while the settings of a recipe are inserted, so that the recipe does not set them.
"""


def usual_settings(
    estimate: Estimate, *, query: Query, problem: TrainingProblem | None = None
) -> dict[str, Any]:
    """Return the usual settings that the query omits, by path."""
    problem = problem or resolve_configuration(query).problem
    if problem.model.num_experts:
        supported = supported_recipe(query, problem) if estimate.time is not None else None
        return {} if supported is None else inserted_settings(query, supported[0])
    launched = "with_cuda_graphs" in estimate.provenance
    return dict(GRAPHS) if launched and records_graphs(problem.cluster) else {}


def records_graphs(cluster: ClusterSpec) -> bool:
    """Return whether current recipes use CUDA graphs on this GPU if kernel launches limit the step.

    They do on GPUs with 8-bit matmuls and NVLink. Source: Megatron Bridge 26.08 (Llama 3 8B on B200
    to GB300, MoE models from H100 on) and NVIDIA's LoRA in MLPerf Training 5.0 (from 64 H100 or
    B200 on).
    """
    gpu = cluster.gpu
    return gpu.nvlink_bandwidth_bytes_per_second is not None and (
        "fp8" in gpu.peak_flops_per_second
    )


def usual_problems(problem: TrainingProblem) -> tuple[TrainingProblem, ...]:
    """Return the problems with which a ranking costs its rows. Each row belongs to one of them.

    For MoE models, these are the problems with the current recipe, in the order in which an
    estimate tries them, followed by the problem itself for rows that support no recipe. For other
    models, and if answers assume no usual settings, it is only the problem itself.
    """
    if problem.asked is None or not problem.model.num_experts:
        return (problem,)
    return _with_recipes(problem, problem.asked)


def assumes_graphs(problem: TrainingProblem) -> bool:
    """Return whether rows of a ranking get CUDA graphs if kernel launches limit their steps."""
    return (
        problem.asked is not None
        and problem.recorded is not None
        and not problem.model.num_experts
        and records_graphs(problem.cluster)
    )


def recorded_problem(problem: TrainingProblem) -> TrainingProblem | None:
    """Return the problem with CUDA graphs, for rows whose steps are limited by kernel launches;
    None if answers assume no graphs.
    """
    query = problem.asked
    if not assumes_graphs(problem) or query is None or query.training is None:
        return None
    graphs = replace(query, training=replace(query.training, cuda_graphs=True))
    recorded = _resolve(problem, graphs)
    return recorded and replace(recorded, usual=Usual(plain=problem, set=GRAPHS))


def least_step_s(problem: TrainingProblem) -> float:
    """Return a lower bound of the step time in seconds that holds with and without usual
    settings.
    """
    if math.isinf(problem.longest_step_s):
        return problem.least_step_s
    return min(each.least_step_s for each in usual_problems(problem))


def _with_recipes(problem: TrainingProblem, query: Query) -> tuple[TrainingProblem, ...]:
    values = {
        name: value
        for name, value in ROW_VALUES.items()
        if getattr(query.parallel, name) is None or isinstance(getattr(query.parallel, name), tuple)
    }
    query = replace(query, parallel=replace(query.parallel, **values))
    problems: list[TrainingProblem] = []
    for named in recipe_queries(query, problem):
        resolved = _resolve(problem, named)
        if resolved is None or any(
            excluded_layouts(resolved) >= excluded_layouts(each) for each in problems
        ):
            continue
        if not problems and not changed_settings(before=problem, after=resolved):
            return (problem,)
        usual = Usual(plain=problem, set=inserted_settings(query, named), earlier=tuple(problems))
        problems.append(replace(resolved, usual=usual))
    if not problems or not excluded_layouts(problems[-1]):
        return tuple(problems) or (problem,)
    rest = Usual(plain=problem, set={}, earlier=tuple(problems))
    return (*problems, replace(problem, usual=rest))


def _resolve(problem: TrainingProblem, query: Query) -> TrainingProblem | None:
    """Return the problem with this query's settings; None if they are not supported."""
    try:
        resolved = resolve_training(query)
        if (count := problem.cluster.num_gpus) != resolved.cluster.num_gpus:
            resolved = resolve_training(query.with_num_gpus(count))  # recipes may depend on it
    except HpToolError:
        return None
    changed = {
        f.name: value
        for f in fields(ParallelQuery)
        if (value := getattr(problem.parallel, f.name)) != getattr(resolved.parallel, f.name)
        and (f.name in (*ROW_VALUES, DISPATCHER) or value is not None)
    }
    resolved = resolved.with_parallel(**changed) if changed else resolved
    return replace(
        resolved,
        cluster=problem.cluster,
        constraints=problem.constraints,
        chosen=problem.chosen,
        assumed={
            **resolved.assumed,
            **{path: value for path, value in problem.assumed.items() if path in problem.chosen},
        },
    )


def _with_settings(query: Query, settings: Mapping[str, Any]) -> Query:
    return parse_query(set_paths(query_mapping(query), dict(settings)))


def resolve_with_settings(
    query: Query, settings: Mapping[str, Any]
) -> ResolvedConfiguration | None:
    """Return the query's configuration with these settings; None if they are not supported."""
    try:
        resolved = resolve_configuration(_with_settings(query, settings))
    except HpToolError:
        return None
    return None if resolved.reasons else resolved


def with_usual_settings(
    estimate: Estimate,
    *,
    query: Query,
    problem: TrainingProblem | None = None,
    with_fixes: bool = False,
) -> Estimate:
    """Return the estimate with the usual settings that the query omits. Without any, it is
    unchanged.
    """
    settings = usual_settings(estimate, query=query, problem=problem) if estimate.time else {}
    resolved = resolve_with_settings(query, settings) if settings else None
    if resolved is None:
        return estimate
    usual = resolved.estimate(with_fixes=with_fixes)
    assert estimate.time is not None and estimate.memory is not None  # the layout is legal
    fits = estimate.memory.total_bytes <= estimate.memory.capacity_bytes
    return assuming(usual, settings, plain_s=estimate.time.step_s, plain_fits=fits)


def assuming(
    usual: Estimate, settings: Mapping[str, Any], *, plain_s: float, plain_fits: bool
) -> Estimate:
    """Return an estimate with usual settings as the answer to a query that omits them.

    If the configuration also fits in memory without these settings, the interval is extended to
    include `plain_s`, the step time in seconds without them. `provenance.usual` contains the
    settings and `plain_s`.
    """
    assert usual.intervals is not None  # the configuration is legal
    low, high = usual.intervals.step_s
    if plain_fits:
        low, high = min(low, plain_s), max(high, plain_s)
    return replace(
        usual,
        intervals=replace(usual.intervals, step_s=(low, high)),
        provenance=usual.provenance | {"usual": {"set": dict(settings), "step_s_without": plain_s}},
    )


def assume_usual(
    estimates: Sequence[Estimate], *, candidates: Candidates, problem: TrainingProblem
) -> list[Estimate]:
    """Return the estimates of candidates as answers that assume the usual settings of their
    problem.
    """
    usual = problem.usual
    if usual is None or not usual.set:
        return list(estimates)
    plain = usual.plain.scheduled(usual.plain.costs(candidates), candidates)
    without = (plain.row(place) for place in range(len(estimates)))
    return [
        assuming(
            estimate,
            usual.set,
            plain_s=float(row.step_s),
            plain_fits=bool(row.memory_total_bytes <= row.capacity_bytes),
        )
        for estimate, row in zip(estimates, without, strict=True)
    ]


def answer_with_usual_settings(
    query: Query, *, resolved: ResolvedConfiguration | None = None
) -> tuple[Query, Estimate]:
    """Return the query with the usual settings that it omits, and its estimate."""
    resolved = resolved or resolve_configuration(query)
    plain = resolved.estimate(with_fixes=False)
    estimate = with_usual_settings(plain, query=query, problem=resolved.problem)
    assumed = estimate.provenance.get("usual")
    if estimate is plain or not isinstance(assumed, dict):
        return query, estimate
    return _with_settings(query, assumed["set"]), estimate
