"""Parse request bodies strictly, without FastAPI's type conversions, and write typed answers."""

import json
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from functools import partial
from typing import Annotated, Any, TypeVar

from fastapi import Depends, Request, Response
from fastapi.responses import StreamingResponse
from starlette.concurrency import run_in_threadpool
from starlette.requests import ClientDisconnect
from starlette.types import Receive, Scope, Send

from hp_tool.domain.query import Query, TrainerCommand
from hp_tool.domain.records import JsonObject
from hp_tool.errors import HpToolError, UnsupportedError
from hp_tool.questions import schema
from hp_tool.questions.answers import Line
from hp_tool.questions.registered import Find, has_registered_names, insert_registered
from service.api.dependencies import FindDep
from service.api.views import NDJSON
from service.settings import Settings

T = TypeVar("T")
SHORT_BYTES = 4096
"""Maximum size of JSON that is parsed on the event loop, where it is faster than in a thread."""
LINES_PER_TURN = 64
"""Number of lines answered per call in a thread: enough to amortize the call, but few enough to
stream answers and to stop soon after a disconnect.
"""


async def read_body(request: Request, read: Callable[[bytes], T]) -> T:
    """Parse the body with `read`, in a thread unless the body is short JSON."""
    body = await request.body()
    if len(body) <= SHORT_BYTES and _is_json(body):
        return read(body)
    return await run_in_threadpool(read, body)


def json_body(kind: type[T]) -> Any:
    """Return the dependency for a route whose body is of type `kind`."""

    async def read(request: Request) -> T:
        body: T = await read_body(request, partial(schema.parse, kind))
        return body

    return Depends(read)


def json_response(answer: object) -> Response:
    """Return a typed answer as a response, without FastAPI's second validation."""
    return Response(schema.to_json(answer), media_type="application/json")


def _is_json(body: bytes) -> bool:
    try:
        json.loads(body)
    except (ValueError, RecursionError):
        return False
    return True


def read_query(data: bytes, *, find: Find) -> Query:
    """Parse the query in a body or a batch line, and resolve registered names.

    Raises:
        InputError: The data is not a valid query.
        UnsupportedError: The query contains a trainer command, which a worker would run.
    """
    return resolve_names(schema.parse_query(data), find=find)


def resolve_names(query: Query, *, find: Find) -> Query:
    """Resolve the registered names in a query.

    A query cannot open files on the server: only the command line and the Python API accept paths
    as names (`OwnFile`).

    Raises:
        UnsupportedError: The query contains a trainer command.
    """
    query = insert_registered(query, find=find)
    refuse_trainer(query)
    return query


def refuse_trainer(query: Query) -> None:
    """Raise UnsupportedError for a query with a trainer command, which only local runs may have."""
    if isinstance(query.trainer, TrainerCommand):
        raise UnsupportedError(
            "Workers do not run commands from a query. Name a trainer that the administrator "
            "registered, or run `hp-tool tune` locally.",
            field="trainer.command",
        )


async def _query_of(request: Request) -> Query:
    return await read_body(request, schema.parse_query)


AskedBody = Annotated[Query, Depends(_query_of)]
"""The query in the body, before registered names are resolved."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SentQuery:
    """A query and the mapping it was parsed from."""

    query: Query
    mapping: JsonObject


def _parse_sent(body: bytes) -> SentQuery:
    return SentQuery(query=schema.parse_query(body), mapping=schema.parse_mapping(body))


async def _sent_body(request: Request) -> SentQuery:
    return await read_body(request, _parse_sent)


SentBody = Annotated[SentQuery, Depends(_sent_body)]
"""The query in the body and the mapping that it was parsed from, before names are resolved."""


async def _body(request: Request, query: AskedBody, find: FindDep) -> Query:
    if has_registered_names(query):
        # The answer must not be cached, because registered names depend on the owner.
        request.state.by_owner = True
        return await run_in_threadpool(resolve_names, query, find=find)
    refuse_trainer(query)
    return query


QueryBody = Annotated[Query, Depends(_body)]
"""The query in the body, with registered names resolved."""


class LineSplitter:
    """Splits a stream into non-empty lines. Lines over the limit are skipped, not stored."""

    def __init__(self, *, limit: int) -> None:
        """Accept lines of up to `limit` bytes."""
        self._limit = limit
        self._buffer = bytearray()
        self._overlong = False

    def feed(self, chunk: bytes) -> list[Line]:
        """Return the lines that `chunk` completes."""
        *ends, remainder = chunk.split(b"\n")
        complete = [line for end in ends for line in self._end_line(end)]
        self._append(remainder)
        return complete

    def _append(self, piece: bytes) -> None:
        self._overlong = self._overlong or len(self._buffer) + len(piece) > self._limit
        if self._overlong:
            self._buffer.clear()
        else:
            self._buffer += piece

    def _end_line(self, piece: bytes) -> list[Line]:
        self._append(piece)
        overlong, line = self._overlong, bytes(self._buffer).strip()
        self._overlong = False
        self._buffer.clear()
        if overlong:
            return [
                HpToolError(
                    f"The line is longer than {self._limit} bytes.", code="payload_too_large"
                )
            ]
        return [line] if line else []


class DuplexResponse(StreamingResponse):
    """Response that is written while the request is still being read.

    StreamingResponse detects disconnects by reading the request, so it would consume parts of the
    body. Here, the code that reads the body detects them.
    """

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await self.stream_response(send)


def stream_answers(
    request: Request, answers_of: Callable[[list[Line]], list[str]]
) -> StreamingResponse:
    """Stream one answer per line of the body, in order. Lines over the limit return an error.

    Args:
        request: The request.
        answers_of: Function that answers lines; it runs in a thread.
    """
    settings: Settings = request.app.state.settings

    def turn(lines: list[Line]) -> bytes:
        return b"".join(answer.encode() + b"\n" for answer in answers_of(lines))

    async def answers() -> AsyncIterator[bytes]:
        splitter = LineSplitter(limit=settings.max_body_bytes)
        try:
            async for chunk in request.stream():
                lines = splitter.feed(chunk)
                for start in range(0, len(lines), LINES_PER_TURN):
                    yield await run_in_threadpool(turn, lines[start : start + LINES_PER_TURN])
            last = splitter.feed(b"\n")  # The last line may lack a newline.
        except ClientDisconnect:
            return
        except HpToolError as error:
            # The body is too large, but the status line is already sent, so the last line reports
            # the error.
            last = [error]
        if last:
            yield await run_in_threadpool(turn, last)

    return DuplexResponse(answers(), media_type=NDJSON)
