"""POST /v1/estimates and /v1/recommendations: answered at once, by the cost model and what was measured on the cluster."""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated

import anyio
from anyio import to_thread
from fastapi import APIRouter, Query, Response

from hp_tool import bounds
from hp_tool.answers import EstimateAnswer, Front, RecommendAnswer, estimate_answer, recommend_answer
from service.api import examples, openapi
from service.api.answers import json_response
from service.api.dependencies import RecordedDep
from service.api.queries import QueryBody

router = APIRouter(tags=["estimates"])

# One thread of each kind computes at a time: more of them take the interpreter and its caches from each other, and all end
# later; a long ranking is not to hold up the short estimates.
ESTIMATES, RECOMMENDATIONS = anyio.CapacityLimiter(1), anyio.CapacityLimiter(1)


async def _in_turn(make: Callable[[], object], limiter: anyio.CapacityLimiter) -> Response:
    def work() -> Response:
        bounds.check()  # who waited for the turn may have gone meanwhile
        return json_response(make())

    return await to_thread.run_sync(work, limiter=limiter)


@router.post("/estimates", response_model=EstimateAnswer, openapi_extra=openapi.body("Query", example=examples.ESTIMATE))
async def estimates(query: QueryBody, calibrations: RecordedDep) -> Response:
    """Memory and step time of one configuration. What does not fit is an answer too: `feasible: false` with reasons."""
    return await _in_turn(lambda: estimate_answer(query, calibrations=calibrations), ESTIMATES)


@router.post(
    "/recommendations", response_model=RecommendAnswer, openapi_extra=openapi.body("Query", example=examples.RECOMMENDATION)
)
async def recommendations(
    query: QueryBody,
    calibrations: RecordedDep,
    top: Annotated[int, Query(ge=1, le=1000, description="Rows at most")] = 10,
    pareto: Annotated[
        Front | None,
        Query(description="Also what no other beats in step time and memory, or gpus; of serving, throughput by user and GPU"),
    ] = None,
) -> Response:
    """The best configurations of all legal ones, by the cost model, corrected by what was measured on the cluster."""
    return await _in_turn(lambda: recommend_answer(query, top=top, calibrations=calibrations, pareto=pareto), RECOMMENDATIONS)
