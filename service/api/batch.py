"""POST /v1/batch: queries in, answers out, one JSON object a line, streamed and in order."""

from __future__ import annotations

import functools
from collections.abc import AsyncIterator
from typing import Annotated

from fastapi import APIRouter, Query, Request
from fastapi.responses import StreamingResponse
from starlette.concurrency import run_in_threadpool
from starlette.types import Receive, Scope, Send

from hp_tool.answers import Task, answer_line, error_line
from hp_tool.errors import HpToolError
from service.api.dependencies import CorrectionsDep, FindDep
from service.api.ndjson import MEDIA_TYPE, Line, LineSplitter
from service.api.queries import read_query
from service.settings import Settings

LINES_A_TURN = 64
"""Lines answered in one hop to a thread: enough to make the hop cheap, few enough to stream and to end soon after a hang-up."""

router = APIRouter(tags=["estimates"])


class Duplex(StreamingResponse):
    """A response that is written while the request is still being read.

    The parent class watches for a hang-up by reading the request itself, and so swallows pieces of the body; here the reader
    of the body sees the hang-up.
    """

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await self.stream_response(send)


@router.post(
    "/batch",
    response_class=StreamingResponse,
    responses={200: {"description": "One answer a line, in the order of the queries", "content": {MEDIA_TYPE: {}}}},
    openapi_extra={"requestBody": {"content": {MEDIA_TYPE: {"schema": {"type": "string"}}}}},
)
async def batch(
    request: Request,
    corrections: CorrectionsDep,
    find: FindDep,
    task: Annotated[Task, Query(description="What to do with every line")] = "estimate",
    top: Annotated[int, Query(ge=1, le=1000, description="recommend: rows per answer")] = 10,
) -> StreamingResponse:
    """Answer every line. A bad line becomes `status: error` in its place and harms no other."""
    settings: Settings = request.app.state.settings

    read = functools.partial(read_query, find=find)

    def answer(lines: list[Line]) -> bytes:
        return b"".join(one(line).encode() + b"\n" for line in lines)

    def one(line: Line) -> str:
        if isinstance(line, HpToolError):
            return error_line(b"", line)
        return answer_line(line, task=task, top=top, read=read, corrections=corrections)

    async def answers() -> AsyncIterator[bytes]:
        splitter = LineSplitter(limit=settings.max_body_bytes)
        try:
            async for chunk in request.stream():
                lines = splitter.feed(chunk)
                for start in range(0, len(lines), LINES_A_TURN):
                    yield await run_in_threadpool(answer, lines[start : start + LINES_A_TURN])
            last = splitter.finish()
        except HpToolError as error:
            # The batch as a whole is too large. Its status line is long sent, so the last line says it.
            last = [error]
        if last:
            yield await run_in_threadpool(answer, last)

    return Duplex(answers(), media_type=MEDIA_TYPE)
