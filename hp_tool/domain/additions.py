"""Optional additions to a ranking in an answer."""

from dataclasses import dataclass

from hp_tool.domain.prices import NotRanked
from hp_tool.domain.result import Recommendation
from hp_tool.domain.sensitivity import Sensitivity
from hp_tool.domain.serving import PoolRecommendation, ServingRecommendation


@dataclass(frozen=True, slots=True, kw_only=True)
class AnswerAdditions:
    """Optional parts of an answer besides the ranking, as in `RecommendAnswer`; None if not
    requested.
    """

    pareto: tuple[Recommendation, ...] | None = None
    throughput_front: tuple[ServingRecommendation, ...] | None = None
    sensitivity: Sensitivity | None = None
    disaggregated: tuple[PoolRecommendation, ...] | None = None
    not_ranked: tuple[NotRanked, ...] = ()
