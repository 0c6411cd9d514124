"""Training queries: estimate one configuration, recommend the best ones, and trade step time for
memory or devices.
"""

from hp_tool.domain.serving import config_query
from hp_tool.training.evaluate import estimate
from hp_tool.training.ranking.recommend import pareto_front, recommend
from hp_tool.training.sensitivity import sensitivity

__all__ = ["config_query", "estimate", "pareto_front", "recommend", "sensitivity"]
