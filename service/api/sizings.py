"""POST /v1/sizings: the training that a budget buys."""

from __future__ import annotations

from typing import Annotated, Any

from fastapi import APIRouter, Depends, Request
from starlette.concurrency import run_in_threadpool

from hp_tool.budgets import parse_sizing, size_answer
from hp_tool.domain.sizing import SizingAnswer, SizingQuery
from hp_tool.queries.registered import names_registered, with_registered
from service.api import examples, openapi
from service.api.answers import json_response
from service.api.bodies import read_body
from service.api.dependencies import CalibrationsDep, FindDep

router = APIRouter(tags=["estimates"])


async def _body(request: Request, find: FindDep) -> SizingQuery:
    query = await read_body(request, parse_sizing)
    if names_registered(query):
        query = await run_in_threadpool(with_registered, query, find=find)
    return query


@router.post("/sizings", response_model=SizingAnswer, openapi_extra=openapi.body("SizingQuery", example=examples.SIZING))
def sizings(query: Annotated[SizingQuery, Depends(_body)], calibrations: CalibrationsDep) -> Any:
    """A model's shape, its tokens and starting hyperparameters, and the days they take, failures included; or the fewest
    devices for a deadline.
    """
    return json_response(size_answer(query, calibrations=calibrations))
