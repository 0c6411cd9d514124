"""Lines in, lines out: a body of any length answered line by line while it is still being sent, in bounded memory."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable

from fastapi import Request
from fastapi.responses import StreamingResponse
from starlette.concurrency import run_in_threadpool
from starlette.requests import ClientDisconnect
from starlette.types import Receive, Scope, Send

from hp_tool.batch import Line
from hp_tool.errors import HpToolError
from service.api.ndjson import MEDIA_TYPE, LineSplitter
from service.settings import Settings

LINES_A_TURN = 64
"""Lines answered in one hop to a thread: enough to make the hop cheap, few enough to stream and to end soon after a hang-up."""


class Duplex(StreamingResponse):
    """A response that is written while the request is still being read.

    The parent class watches for a hang-up by reading the request itself, and so swallows pieces of the body; here the reader
    of the body sees the hang-up.
    """

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await self.stream_response(send)


def stream_answers(request: Request, answers_of: Callable[[list[Line]], list[str]]) -> StreamingResponse:
    """One answer for each line of the body, in order; an overlong line comes as its error. `answers_of` runs in a thread."""
    settings: Settings = request.app.state.settings

    def turn(lines: list[Line]) -> bytes:
        return b"".join(answer.encode() + b"\n" for answer in answers_of(lines))

    async def answers() -> AsyncIterator[bytes]:
        splitter = LineSplitter(limit=settings.max_body_bytes)
        try:
            async for chunk in request.stream():
                lines = splitter.feed(chunk)
                for start in range(0, len(lines), LINES_A_TURN):
                    yield await run_in_threadpool(turn, lines[start : start + LINES_A_TURN])
            last = splitter.finish()
        except ClientDisconnect:  # whoever hangs up in the middle wants no further answer
            return
        except HpToolError as error:
            # The body as a whole is too large. Its status line is long sent, so the last line says it.
            last = [error]
        if last:
            yield await run_in_threadpool(turn, last)

    return Duplex(answers(), media_type=MEDIA_TYPE)
