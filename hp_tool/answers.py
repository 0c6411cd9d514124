"""From a query to the object that answers it: the same for a command, a batch line, a request body, a page and Python."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

from hp_tool import serving, training
from hp_tool.domain.query import Query
from hp_tool.domain.result import Estimate, Ranking, Recommendation, SpaceSummary
from hp_tool.domain.serving import InferenceEstimate, PoolRecommendation, ServingRecommendation
from hp_tool.errors import UnsupportedError
from hp_tool.queries import schema
from hp_tool.training.calibrated import Calibrations
from hp_tool.training.evaluate import ResolvedConfiguration, resolve_configuration
from hp_tool.training.recommend import Objective

Task = Literal["estimate", "recommend"]
Front = Objective | Literal["throughput"]
"""What a Pareto front may set against step time, or for serving against the tokens per second of a user."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EstimateAnswer:
    """What one configuration needs. One that does not fit is `ok` too: `feasible: false` with its reasons."""

    id: str | None
    """The query's."""
    status: Literal["ok"] = "ok"
    estimate: Estimate | InferenceEstimate
    query: dict[str, Any] | None = None
    """The query without its defaults: with it the answer can be exported. None in batches."""
    calibrated_estimate: Estimate | None = None
    """The estimate corrected by measurements on this cluster; None if there are none."""

    def _repr_html_(self) -> str:
        """What a notebook shows."""
        from hp_tool.render.html import estimate_html

        return estimate_html(self.estimate, self.calibrated_estimate)


@dataclass(frozen=True, slots=True, kw_only=True)
class RecommendAnswer:
    """The best configurations by the cost model, best first."""

    id: str | None
    """The query's."""
    status: Literal["ok"] = "ok"
    recommendations: tuple[Recommendation, ...] | tuple[ServingRecommendation, ...]
    space: SpaceSummary
    rejections: dict[str, int]
    """How many candidates each reason ruled out."""
    nearest_misses: tuple[Recommendation, ...] = ()
    """If nothing is acceptable: what lacks least of memory, days or money, each estimate with its reasons."""
    pareto: tuple[Recommendation, ...] | None = None
    """Configurations that no other beats in two objectives at once; None unless asked for."""
    throughput_front: tuple[ServingRecommendation, ...] | None = None
    """Inference, asked for as pareto "throughput": what no other beats in tokens per second for a user and for a GPU."""
    disaggregated: tuple[PoolRecommendation, ...] | None = None
    """Separate pools for prefill and decoding; None unless inference.disaggregated asks for them."""
    query: dict[str, Any] | None = None
    """As in EstimateAnswer."""

    def _repr_html_(self) -> str:
        """What a notebook shows."""
        from hp_tool.render.html import recommendations_html

        return recommendations_html(self.recommendations, space=self.space, misses=self.nearest_misses)


def estimate_answer(
    query: Query,
    *,
    configuration: ResolvedConfiguration | None = None,
    with_fixes: bool = True,
    with_query: bool = True,
    calibrations: Calibrations | None = None,
) -> EstimateAnswer:
    """The answer to a query of one configuration. Raises HpToolError.

    `configuration`: the training query's, if it was resolved or costed earlier. `calibrations`: what is known of clusters;
    None leaves the cost model alone.
    """
    estimate: Estimate | InferenceEstimate
    calibrated = None
    if query.kind == "inference":
        estimate = serving.estimate(query=query, with_fixes=with_fixes)
    else:
        configuration = configuration or resolve_configuration(query)
        estimate = configuration.estimate(with_fixes=with_fixes)
        calibrated = configuration.calibrated_estimate(calibrations)
    mapping = schema.query_mapping(query) if with_query else None
    return EstimateAnswer(id=query.id, estimate=estimate, calibrated_estimate=calibrated, query=mapping)


def recommend_answer(
    query: Query, *, top: int, with_query: bool = True, calibrations: Calibrations | None = None, pareto: Front | None = None
) -> RecommendAnswer:
    """The answer to a query of many configurations. Raises HpToolError.

    `pareto`: also the Pareto front of step time against memory or gpus; for serving that of tokens per second for a user and
    for a GPU ("throughput").
    """
    ranking: Ranking[Recommendation] | Ranking[ServingRecommendation]
    misses: tuple[Recommendation, ...] = ()
    front, throughput_front, pools = None, None, None
    if query.kind == "inference":
        if pareto not in (None, "throughput"):
            raise UnsupportedError(f"a front of {pareto} belongs to training queries; ask for throughput", field="pareto")
        if query.inference is not None and query.inference.disaggregated is not None:
            pools = serving.disaggregated(query=query, top=top)
        ranking = Ranking() if serving.only_pools(query) else serving.recommend(query=query, top=top)
        throughput_front = None if pareto is None else serving.pareto_front(query=query)
    else:
        if pareto == "throughput":
            raise UnsupportedError("a front of throughput belongs to inference queries; ask for memory or gpus", field="pareto")
        ranking = training.recommend(query=query, top=top, calibrations=calibrations)
        misses = ranking.nearest_misses
        if pareto is not None:
            front = training.pareto_front(query=query, against=pareto, calibrations=calibrations)
    return RecommendAnswer(
        id=query.id,
        recommendations=ranking.recommendations,
        space=ranking.space,
        rejections=ranking.rejections,
        nearest_misses=misses,
        pareto=front,
        throughput_front=throughput_front,
        disaggregated=pools,
        query=schema.query_mapping(query) if with_query else None,
    )
