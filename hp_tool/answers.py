"""From a query to the object that answers it: the same for a command, a batch line and a request body."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

from hp_tool import serving
from hp_tool.domain.query import Query
from hp_tool.domain.result import Estimate, Recommendation, SpaceSummary
from hp_tool.domain.serving import InferenceEstimate, PoolRecommendation, ServingRecommendation
from hp_tool.errors import UnsupportedError
from hp_tool.queries import schema
from hp_tool.training import recommend as app
from hp_tool.training.calibrated import Corrections
from hp_tool.training.evaluate import calibrated, predicted, single

Task = Literal["estimate", "recommend"]
Front = app.Front | Literal["throughput"]
"""What a Pareto front may be asked against."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EstimateAnswer:
    """What one configuration needs. One that does not fit is `ok` too: `feasible: false` with its reasons."""

    id: str | None
    """The query's."""
    status: Literal["ok"] = "ok"
    estimate: Estimate | InferenceEstimate
    query: dict[str, Any] | None = None
    """What was asked, without what stood at its default: with it the answer can be exported. None in batches."""
    calibrated_estimate: Estimate | None = None
    """The same after what was measured on this cluster; None where nothing was."""

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
    """Where nothing is acceptable: what lacks least of memory, days or money, each estimate with its reasons."""
    pareto: tuple[Recommendation, ...] | None = None
    """Configurations that no other beats in two objectives at once; None unless asked for."""
    throughput_front: tuple[ServingRecommendation, ...] | None = None
    """Inference, asked for as pareto "throughput": what no other beats in tokens per second for a user and for a GPU."""
    disaggregated: tuple[PoolRecommendation, ...] | None = None
    """Pools of their own for prefill and decoding; None unless inference.disaggregated asks for them."""
    query: dict[str, Any] | None = None
    """As in EstimateAnswer."""

    def _repr_html_(self) -> str:
        """What a notebook shows."""
        from hp_tool.render.html import recommendations_html

        return recommendations_html(self.recommendations, space=self.space, misses=self.nearest_misses)


def uncalibrated(problem: object) -> None:
    """`Corrections` of someone who knows nothing, or wants to hear the cost model alone."""


def estimate_answer(
    query: Query, *, with_mends: bool = True, with_query: bool = True, corrections: Corrections = uncalibrated
) -> EstimateAnswer:
    """The answer to a query of one configuration. Raises HpToolError."""
    asked = schema.query_mapping(query) if with_query else None
    if query.kind == "inference":
        return EstimateAnswer(id=query.id, estimate=serving.estimate(query=query, with_mends=with_mends), query=asked)
    one = single(query)
    found = predicted(asked=one)
    if with_mends:
        found = app.with_mends_of(asked=one, found=found)
    learnt = calibrated(asked=one, corrections=corrections)
    return EstimateAnswer(id=query.id, estimate=found, calibrated_estimate=learnt, query=asked)


def recommend_answer(
    query: Query,
    *,
    top: int,
    with_query: bool = True,
    corrections: Corrections = uncalibrated,
    pareto: Front | None = None,
) -> RecommendAnswer:
    """The answer to a query of many; with `pareto`, also the front of step time against that, and of serving that of tokens per
    second for a user and for a GPU ("throughput"). Raises HpToolError.
    """
    if query.kind == "inference":
        return _serving_answer(query, top=top, with_query=with_query, pareto=pareto)
    if pareto == "throughput":
        raise UnsupportedError("a front of throughput belongs to inference queries; ask for memory or gpus", field="pareto")
    found = app.recommend(query=query, top=top, corrections=corrections)
    front = None if pareto is None else app.pareto(query=query, against=pareto, corrections=corrections)
    return RecommendAnswer(
        id=query.id,
        recommendations=found.recommendations,
        space=found.space,
        rejections=found.rejections,
        nearest_misses=found.nearest_misses,
        pareto=front,
        query=schema.query_mapping(query) if with_query else None,
    )


def _serving_answer(query: Query, *, top: int, with_query: bool, pareto: Front | None) -> RecommendAnswer:
    if pareto not in (None, "throughput"):
        raise UnsupportedError(f"a front of {pareto} belongs to training queries; ask for throughput", field="pareto")
    assert query.inference is not None  # checked with the query
    pools = None if query.inference.disaggregated is None else serving.disaggregated(query=query, top=top)
    found = serving.nothing_shared() if serving.of_two_kinds(query) else serving.recommend(query=query, top=top)
    return RecommendAnswer(
        id=query.id,
        recommendations=found.recommendations,
        space=found.space,
        rejections=found.rejections,
        throughput_front=None if pareto is None else serving.pareto_front(query=query),
        disaggregated=pools,
        query=schema.query_mapping(query) if with_query else None,
    )
