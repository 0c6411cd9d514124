"""Read request bodies in middleware, with limits, and pass them on to the application."""

import asyncio
from collections.abc import Iterator

from starlette.types import Message, Receive

from hp_tool.errors import HpToolError

MAX_PAUSE_S = 30.0
"""Maximum pause while a body is received, in seconds."""
MAX_BODY_S = 120.0
"""Maximum time to receive a body, in seconds. Uploads have longer, in proportion to their size."""
MIN_BYTES_PER_SECOND = 65_536


def too_large(limit: int) -> HpToolError:
    """Return the error for a body over the limit."""
    return HpToolError(f"The body is larger than {limit} bytes.", code="payload_too_large")


def limit_size(receive: Receive, limit: int) -> Receive:
    """Wrap `receive` so that it raises an error if the body exceeds the limit."""
    received_bytes = 0

    async def received() -> Message:
        nonlocal received_bytes
        message = await receive()
        received_bytes += len(message.get("body", b""))
        if received_bytes > limit:
            raise too_large(limit)
        return message

    return received


def limit_time(receive: Receive) -> Receive:
    """Wrap `receive` so that it raises `request_timeout` if the body pauses or is too slow.

    Use it for bodies that are answered only at their end: their sender has no answer to wait for.
    """
    loop = asyncio.get_running_loop()
    began_s, received_bytes, complete = loop.time(), 0, False

    async def received() -> Message:
        nonlocal received_bytes, complete
        if complete:
            return await receive()  # A disconnect may come at any time.
        end_s = began_s + MAX_BODY_S + received_bytes / MIN_BYTES_PER_SECOND
        try:
            async with asyncio.timeout(MAX_PAUSE_S), asyncio.timeout_at(end_s):
                message = await receive()
        except TimeoutError:
            reason = (
                f"No data for {MAX_PAUSE_S:g} s, or less than {MIN_BYTES_PER_SECOND:,} bytes/s "
                f"after the first {MAX_BODY_S:g} s of the body."
            )
            raise HpToolError(reason, code="request_timeout") from None
        received_bytes += len(message.get("body", b""))
        complete = message["type"] != "http.request" or not message.get("more_body")
        return message

    return received


async def read_body(receive: Receive) -> bytes | None:
    """Return the body; None if the client disconnects.

    Raises:
        HpToolError: The body pauses or takes too long (`request_timeout`).
    """
    pieces, end_s = [], asyncio.get_running_loop().time() + MAX_BODY_S
    while True:
        try:
            async with asyncio.timeout(MAX_PAUSE_S), asyncio.timeout_at(end_s):
                message = await receive()
        except TimeoutError:
            reason = (
                f"No data for {MAX_PAUSE_S:g} s, or the body took longer than {MAX_BODY_S:g} s."
            )
            raise HpToolError(reason, code="request_timeout") from None
        if message["type"] == "http.disconnect":
            return None
        pieces.append(message.get("body", b""))
        if not message.get("more_body"):
            return b"".join(pieces)


def replay_body(body: bytes, receive: Receive) -> Receive:
    """Return a `receive` that delivers a body that was already read."""
    messages: Iterator[Message] = iter([{"type": "http.request", "body": body, "more_body": False}])

    async def received() -> Message:
        return next(messages, None) or await receive()

    return received
