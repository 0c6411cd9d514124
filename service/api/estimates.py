"""POST /v1/estimates and /v1/recommendations: answered at once, by the cost model and what was measured on the cluster."""

from __future__ import annotations

from typing import Annotated, Any

from fastapi import APIRouter, Query

from hp_tool.answers import EstimateAnswer, Front, RecommendAnswer, estimate_answer, recommend_answer
from service.api import openapi
from service.api.answers import json_response
from service.api.dependencies import RecordedDep
from service.api.queries import QueryBody

router = APIRouter(tags=["estimates"])


@router.post("/estimates", response_model=EstimateAnswer, openapi_extra=openapi.body("Query"))
def estimates(query: QueryBody, corrections: RecordedDep) -> Any:
    """Memory and step time of one configuration. What does not fit is an answer too: `feasible: false` with reasons."""
    return json_response(estimate_answer(query, corrections=corrections))


@router.post("/recommendations", response_model=RecommendAnswer, openapi_extra=openapi.body("Query"))
def recommendations(
    query: QueryBody,
    corrections: RecordedDep,
    top: Annotated[int, Query(ge=1, le=1000, description="Rows at most")] = 10,
    pareto: Annotated[
        Front | None,
        Query(description="Also what no other beats in step time and memory, or gpus; of serving, throughput by user and GPU"),
    ] = None,
) -> Any:
    """The best configurations of all legal ones, by the cost model, corrected by what was measured on the cluster."""
    return json_response(recommend_answer(query, top=top, corrections=corrections, pareto=pareto))
