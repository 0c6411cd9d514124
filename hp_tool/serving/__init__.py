"""Serving queries: estimate one configuration, recommend the best ones for latency targets, show the whole trade-off."""

from hp_tool.serving.disaggregated import disaggregated, nothing_shared, of_two_kinds
from hp_tool.serving.pareto import pareto_front
from hp_tool.serving.problem import ServingProblem, resolve_serving
from hp_tool.serving.recommend import ServingRecommendations, estimate, recommend

__all__ = [
    "ServingProblem",
    "ServingRecommendations",
    "disaggregated",
    "estimate",
    "nothing_shared",
    "of_two_kinds",
    "pareto_front",
    "recommend",
    "resolve_serving",
]
