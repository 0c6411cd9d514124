"""Answers to a serving query; implements `hp_tool.questions.problem.Problem`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from hp_tool.domain.additions import AnswerAdditions
from hp_tool.domain.query import Query
from hp_tool.domain.result import Front, Ranking
from hp_tool.domain.serving import InferenceEstimate, ServingRecommendation
from hp_tool.errors import UnsupportedError
from hp_tool.questions.serving.disaggregated import rank_pools, requires_pools
from hp_tool.questions.serving.evaluate import estimate
from hp_tool.questions.serving.intervals import ratio_log_sd
from hp_tool.questions.serving.problem import resolve_serving, seeks_concurrency
from hp_tool.questions.serving.recommend import pareto_front, recommend

if TYPE_CHECKING:
    from hp_tool.domain.setups import ServingSetup
    from hp_tool.questions.configuration import Configuration
    from hp_tool.questions.training.calibrated import Calibrations


@dataclass(frozen=True, slots=True, kw_only=True)
class Serving:
    """A serving query that can be answered. Stored calibrations do not apply to it."""

    query: Query

    @property
    def configuration(self) -> None:
        return None

    def estimate(
        self, *, with_fixes: bool = True, calibrations: Calibrations | None = None
    ) -> tuple[InferenceEstimate, None]:
        return estimate(query=self.query, with_fixes=with_fixes), None

    def rank(
        self, *, top: int, calibrations: Calibrations | None = None
    ) -> Ranking[ServingRecommendation]:
        return recommend(query=self.query, top=top)

    def answer(
        self,
        *,
        top: int,
        pareto: Front | None = None,
        sensitivity: bool = False,
        calibrations: Calibrations | None = None,
    ) -> tuple[Ranking[ServingRecommendation], AnswerAdditions]:
        """Return the ranking and its additions: pools if the query requests them, and the
        throughput front if `pareto` requests it or the concurrency is open.
        """
        query = self.query
        if sensitivity:
            raise UnsupportedError(
                "sensitivity is for training queries only; remove it", field="sensitivity"
            )
        if pareto not in (None, "throughput"):
            raise UnsupportedError(
                f"the {pareto} front is for training queries only; use throughput",
                field="pareto",
            )
        pools, front = None, None
        if query.inference is not None and query.inference.disaggregated is not None:
            pools = rank_pools(query=query, top=top)
        ranking: Ranking[ServingRecommendation] = (
            Ranking() if requires_pools(query) else self.rank(top=top)
        )
        if pareto is not None or (ranking.recommendations and seeks_concurrency(query)):
            front = pareto_front(query=query)
        return ranking, AnswerAdditions(throughput_front=front, disaggregated=pools)

    def ratio_log_sd(
        self, one: InferenceEstimate, other: InferenceEstimate, *, alike: bool
    ) -> float:
        return ratio_log_sd(resolve_serving(self.query))

    def setup(self, configuration: Configuration) -> ServingSetup:
        from hp_tool.questions.serving.setup import serving_setup

        return serving_setup(configuration)
