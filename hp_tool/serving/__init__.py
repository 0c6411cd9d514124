"""Serving queries: estimate one configuration, recommend the best ones for latency targets."""

from hp_tool.serving.answer import ServingRecommendations, estimate, recommend
from hp_tool.serving.problem import ServingProblem, resolve_serving

__all__ = ["ServingProblem", "ServingRecommendations", "estimate", "recommend", "resolve_serving"]
