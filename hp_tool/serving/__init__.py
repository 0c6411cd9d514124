"""Serving queries: estimate one configuration, recommend the best ones for latency targets, show the whole trade-off."""

from hp_tool.serving.answer import ServingRecommendations, estimate, recommend
from hp_tool.serving.pareto import pareto_front
from hp_tool.serving.problem import ServingProblem, resolve_serving

__all__ = ["ServingProblem", "ServingRecommendations", "estimate", "pareto_front", "recommend", "resolve_serving"]
