"""Serving queries: estimate one configuration, recommend the best one within latency targets, and
show trade-offs.
"""

from hp_tool.questions.serving.disaggregated import rank_pools, requires_pools
from hp_tool.questions.serving.evaluate import estimate
from hp_tool.questions.serving.problem import seeks_concurrency
from hp_tool.questions.serving.recommend import pareto_front, recommend

__all__ = [
    "estimate",
    "pareto_front",
    "rank_pools",
    "recommend",
    "requires_pools",
    "seeks_concurrency",
]
