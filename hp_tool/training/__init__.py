"""Training queries: estimate one configuration, recommend the best ones, and trade step time for memory or devices."""

from hp_tool.training.evaluate import config_query, estimate
from hp_tool.training.pareto import pareto_front
from hp_tool.training.recommend import recommend

__all__ = ["config_query", "estimate", "pareto_front", "recommend"]
