"""POST /v1/batch: queries in, answers out, one JSON object a line, streamed and in order."""

from __future__ import annotations

import functools
from typing import Annotated

from fastapi import APIRouter, Query, Request
from fastapi.responses import StreamingResponse

from hp_tool.answers import Task
from hp_tool.batch import answer_lines
from service.api import examples, openapi
from service.api.dependencies import CalibrationsDep, FindDep
from service.api.ndjson import MEDIA_TYPE
from service.api.queries import read_query
from service.api.streaming import stream_answers

router = APIRouter(tags=["estimates"])


@router.post(
    "/batch",
    response_class=StreamingResponse,
    responses={200: {"description": "One answer a line, in the order of the queries", "content": {MEDIA_TYPE: {}}}},
    openapi_extra=openapi.lines(example=examples.ESTIMATE),
)
async def batch(
    request: Request,
    calibrations: CalibrationsDep,
    find: FindDep,
    task: Annotated[Task, Query(description="What to do with every line")] = "estimate",
    top: Annotated[int, Query(ge=1, le=1000, description="recommend: rows per answer")] = 10,
) -> StreamingResponse:
    """Answer every line. A bad line becomes `status: error` in its place and harms no other."""
    read = functools.partial(read_query, find=find)
    return stream_answers(request, functools.partial(answer_lines, task=task, top=top, read=read, calibrations=calibrations))
