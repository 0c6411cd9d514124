"""Settings that a query leaves open, taken from the framework's current recipes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from hp_tool.domain.hardware import ClusterSpec
from hp_tool.domain.query import Query
from hp_tool.domain.result import Estimate
from hp_tool.errors import HpToolError
from hp_tool.questions.schema import parse_query, query_mapping, set_paths
from hp_tool.questions.training.evaluate import ResolvedConfiguration, resolve_configuration
from hp_tool.questions.training.problem import TrainingProblem
from hp_tool.questions.training.with_recipe import with_recipe_figure


def usual_settings(
    estimate: Estimate, *, query: Query, problem: TrainingProblem | None = None
) -> dict[str, Any]:
    """Return the settings, by path, that such runs usually have and that the query leaves open.

    Mixtures of experts use the current recipe, because settings that nobody leaves at the
    framework's defaults change their step time up to threefold. Other models use CUDA graphs if
    launches limit the step on a GPU whose recipes use them.
    """
    problem = problem or resolve_configuration(query).problem
    if problem.model.num_experts:
        stated = with_recipe_figure(estimate, query=query, problem=problem).with_recipe
        return {} if stated is None else dict(stated.set)
    launched = "with_cuda_graphs" in estimate.provenance
    return {"training.cuda_graphs": True} if launched and records_graphs(problem.cluster) else {}


def records_graphs(cluster: ClusterSpec) -> bool:
    """Return whether current recipes use CUDA graphs on this class of GPU if launches limit a step.

    Such GPUs have 8-bit matmuls and NVLink. Source: Megatron Bridge 26.08 (Llama 3 8B on B200 to
    GB300, mixtures from H100 on) and NVIDIA's LoRA in MLPerf Training 5.0 (from 64 H100 or B200
    on).
    """
    gpu = cluster.gpu
    return gpu.nvlink_bandwidth_bytes_per_second is not None and (
        "fp8" in gpu.peak_flops_per_second
    )


def resolve_with_settings(
    query: Query, settings: Mapping[str, Any]
) -> ResolvedConfiguration | None:
    """Return the query's configuration with these settings; None if they are not supported."""
    try:
        resolved = resolve_configuration(
            parse_query(set_paths(query_mapping(query), dict(settings)))
        )
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
    """Return the estimate with the usual settings; unchanged if there are none.

    The interval extends to the step time without them, and `provenance.usual` names both.
    """
    settings = usual_settings(estimate, query=query, problem=problem) if estimate.time else {}
    resolved = resolve_with_settings(query, settings) if settings else None
    if resolved is None:
        return estimate
    usual = resolved.estimate(with_fixes=with_fixes)
    assert estimate.time is not None and usual.intervals is not None
    low, high = usual.intervals.step_s
    plain_s = estimate.time.step_s
    return replace(
        usual,
        intervals=replace(usual.intervals, step_s=(min(low, plain_s), max(high, plain_s))),
        provenance=usual.provenance | {"usual": {"set": settings, "step_s_without": plain_s}},
    )


def answer_with_usual_settings(
    query: Query, *, resolved: ResolvedConfiguration | None = None
) -> tuple[Query, Estimate]:
    """Return the query with the usual settings, and its estimate."""
    resolved = resolved or resolve_configuration(query)
    plain = resolved.estimate(with_fixes=False)
    estimate = with_usual_settings(plain, query=query, problem=resolved.problem)
    assumed = estimate.provenance.get("usual")
    if estimate is plain or not isinstance(assumed, dict):
        return query, estimate
    settings = dict(assumed["set"])
    return parse_query(set_paths(query_mapping(query), settings)), estimate
