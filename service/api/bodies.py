"""Request bodies, parsed strictly and not by FastAPI, which coerces and knows no nearest key; and
typed answers, written.
"""

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
from hp_tool.questions.registered import Find, names_registered, with_registered
from service.api.dependencies import FindDep
from service.api.views import NDJSON
from service.settings import Settings

T = TypeVar("T")
SHORT_BYTES = 4096
"""JSON up to this size is read on the event loop, in less time than a thread takes to begin."""
LINES_A_TURN = 64
"""Lines answered in one hop to a thread: enough to make the hop cheap, few enough to stream and to
end soon after a hang-up.
"""


async def read_body(request: Request, read: Callable[[bytes], T]) -> T:
    """The body as `read` parses it; in a thread, unless it is short JSON."""
    body = await request.body()
    if len(body) <= SHORT_BYTES and _is_json(body):
        return read(body)
    return await run_in_threadpool(read, body)


def json_body(kind: type[T]) -> Any:
    """The dependency of a route whose body is of the type `kind`."""

    async def read(request: Request) -> T:
        body: T = await read_body(request, partial(schema.parse, kind))
        return body

    return Depends(read)


def json_response(answer: object) -> Response:
    """An answer as its response; it is typed already, so FastAPI need not validate it a second
    time.
    """
    return Response(schema.to_json(answer), media_type="application/json")


def _is_json(body: bytes) -> bool:
    try:
        json.loads(body)
    except (ValueError, RecursionError):
        return False
    return True


def read_query(data: bytes, *, find: Find) -> Query:
    """The query in a body or batch line, registered names looked up.

    Raises:
        InputError: it is no query.
        UnsupportedError: it brings a command, which a worker would run.
    """
    return resolve(schema.parse_query(data), find=find)


def resolve(query: Query, *, find: Find) -> Query:
    """The query with registered names looked up. Raises UnsupportedError where it brings a command.

    It cannot open the server's files either: a name is a path only for the command line and the
    Python API (`OwnFile`).
    """
    query = with_registered(query, find=find)
    refuse_trainer(query)
    return query


def refuse_trainer(query: Query) -> None:
    """Raise UnsupportedError where the query brings a command: only one's own command line may run
    those.
    """
    if isinstance(query.trainer, TrainerCommand):
        raise UnsupportedError(
            "a worker runs no commands that come with a query; name a trainer that its "
            "administrator registered, or run "
            "`hp-tool tune` yourself",
            field="trainer.command",
        )


async def _asked(request: Request) -> Query:
    return await read_body(request, schema.parse_query)


AskedBody = Annotated[Query, Depends(_asked)]
"""The query in the body as it was sent: names are not looked up yet."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SentQuery:
    """A query and the mapping that it was sent as."""

    query: Query
    mapping: JsonObject


def _sent(body: bytes) -> SentQuery:
    return SentQuery(query=schema.parse_query(body), mapping=schema.parse_mapping(body))


async def _sent_body(request: Request) -> SentQuery:
    return await read_body(request, _sent)


SentBody = Annotated[SentQuery, Depends(_sent_body)]
"""The query in the body with the body itself: names are not looked up yet."""


async def _body(request: Request, query: AskedBody, find: FindDep) -> Query:
    if names_registered(query):
        request.state.by_owner = True  # so the answer is cached for nobody
        return await run_in_threadpool(resolve, query, find=find)
    refuse_trainer(query)
    return query


QueryBody = Annotated[Query, Depends(_body)]
"""The query in the body."""


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
            return [
                HpToolError(
                    f"the line is longer than {self._limit} bytes", code="payload_too_large"
                )
            ]
        return [line] if line else []


class Duplex(StreamingResponse):
    """A response that is written while the request is still being read.

    The parent class watches for a hang-up by reading the request itself, and so swallows pieces of
    the body; here the reader of the body sees the hang-up.
    """

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await self.stream_response(send)


def stream_answers(
    request: Request, answers_of: Callable[[list[Line]], list[str]]
) -> StreamingResponse:
    """One answer for each line of the body, in order; an overlong line comes as its error.
    `answers_of` runs in a thread.
    """
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
            last = splitter.feed(b"\n")  # what the stream did not end itself
        except ClientDisconnect:  # whoever hangs up in the middle wants no further answer
            return
        except HpToolError as error:
            # The body as a whole is too large. Its status line is long sent, so the last line says
            # it.
            last = [error]
        if last:
            yield await run_in_threadpool(turn, last)

    return Duplex(answers(), media_type=NDJSON)
