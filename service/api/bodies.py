"""Bodies as what they say: read where that holds up nobody else."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import TypeVar

from fastapi import Request
from starlette.concurrency import run_in_threadpool

T = TypeVar("T")
SHORT_BYTES = 4096
"""Of JSON that is read on the spot, in less time than a thread takes to begin."""


async def read_body(request: Request, read: Callable[[bytes], T]) -> T:
    """What `read` makes of the body; in a thread, unless it is short JSON."""
    body = await request.body()
    if len(body) <= SHORT_BYTES and _is_json(body):
        return read(body)
    return await run_in_threadpool(read, body)


def _is_json(body: bytes) -> bool:
    try:
        json.loads(body)
    except (ValueError, RecursionError):
        return False
    return True
