"""What an answer shows beside its ranking."""

from dataclasses import dataclass

from hp_tool.domain.prices import NotRanked
from hp_tool.domain.result import Recommendation
from hp_tool.domain.sensitivity import Sensitivity
from hp_tool.domain.serving import PoolRecommendation, ServingRecommendation


@dataclass(frozen=True, slots=True, kw_only=True)
class AnswerAdditions:
    """What an answer shows beside its ranking, as `RecommendAnswer` describes it; None unless asked
    for.
    """

    pareto: tuple[Recommendation, ...] | None = None
    throughput_front: tuple[ServingRecommendation, ...] | None = None
    sensitivity: Sensitivity | None = None
    disaggregated: tuple[PoolRecommendation, ...] | None = None
    not_ranked: tuple[NotRanked, ...] = ()
