"""Training queries: estimate one configuration, recommend the best one, and trade step time for
memory or devices.
"""

from hp_tool.domain.serving import config_query
from hp_tool.questions.training.evaluate import estimate
from hp_tool.questions.training.ranking.recommend import pareto_front, recommend
from hp_tool.questions.training.sensitivity import sensitivity

__all__ = ["config_query", "estimate", "pareto_front", "recommend", "sensitivity"]
