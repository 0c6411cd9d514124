"""Request bodies parsed, and typed answers written, without FastAPI's own parsing, which coerces and knows no nearest key."""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import partial
from typing import Any, TypeVar

from fastapi import Depends, Request, Response
from starlette.concurrency import run_in_threadpool

from hp_tool.queries import schema

T = TypeVar("T")
SHORT_BYTES = 4096
"""JSON up to this size is read on the event loop, in less time than a thread takes to begin."""


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
    """An answer as its response; it is typed already, so FastAPI need not validate it a second time."""
    return Response(schema.to_json(answer), media_type="application/json")


def _is_json(body: bytes) -> bool:
    try:
        json.loads(body)
    except (ValueError, RecursionError):
        return False
    return True
