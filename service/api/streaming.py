"""Lines in, lines out: an NDJSON body of any length is answered line by line while it is still sent, in bounded memory."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable

from fastapi import Request
from fastapi.responses import StreamingResponse
from starlette.concurrency import run_in_threadpool
from starlette.requests import ClientDisconnect
from starlette.types import Receive, Scope, Send

from hp_tool.answers import Line
from hp_tool.errors import HpToolError
from service.api.views import NDJSON
from service.settings import Settings

LINES_A_TURN = 64
"""Lines answered in one hop to a thread: enough to make the hop cheap, few enough to stream and to end soon after a hang-up."""


class LineSplitter:
    """Cuts a stream into its non-empty lines. An overlong line is skipped, not collected."""

    def __init__(self, *, limit: int) -> None:
        """`limit`: bytes in the longest accepted line."""
        self._limit = limit
        self._kept = bytearray()
        self._overlong = False

    def feed(self, chunk: bytes) -> list[Line]:
        """The lines that `chunk` completes."""
        *ends, rest = chunk.split(b"\n")
        complete = [line for end in ends for line in self._end_line(end)]
        self._keep(rest)
        return complete

    def finish(self) -> list[Line]:
        """The last line, where the stream did not end in a newline."""
        return self._end_line(b"")

    def _keep(self, piece: bytes) -> None:
        self._overlong = self._overlong or len(self._kept) + len(piece) > self._limit
        if self._overlong:
            self._kept.clear()
        else:
            self._kept += piece

    def _end_line(self, piece: bytes) -> list[Line]:
        self._keep(piece)
        overlong, line = self._overlong, bytes(self._kept).strip()
        self._overlong = False
        self._kept.clear()
        if overlong:
            return [HpToolError(f"the line is longer than {self._limit} bytes", code="payload_too_large")]
        return [line] if line else []


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

    return Duplex(answers(), media_type=NDJSON)
