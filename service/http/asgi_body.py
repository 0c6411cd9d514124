"""Reading a request's body in a middleware, and passing it on to the application below."""

import asyncio
from collections.abc import Iterator

from starlette.types import Message, Receive

from hp_tool.errors import HpToolError

SILENCE_S = 30.0
"""How long the rest of a body may let wait."""
WHOLE_S = 120.0
"""How long all of it may take; of an upload, on top of the time that the slowest rate allows."""
SLOWEST_BYTES_PER_SECOND = 65_536


def too_large(limit: int) -> HpToolError:
    """The error for a body above the limit."""
    return HpToolError(f"the body is larger than {limit} bytes", code="payload_too_large")


def counted(receive: Receive, limit: int) -> Receive:
    """`receive` that raises where a body of unannounced length passes the limit."""
    seen = 0

    async def received() -> Message:
        nonlocal seen
        message = await receive()
        seen += len(message.get("body", b""))
        if seen > limit:
            raise too_large(limit)
        return message

    return received


def patient(receive: Receive) -> Receive:
    """Return a `receive` that raises HpToolError `request_timeout` if the rest of a body stays
    away, or comes too slowly.

    For a body that is answered after its end: its sender waits for nothing.
    """
    loop = asyncio.get_running_loop()
    began_s, seen, complete = loop.time(), 0, False

    async def received() -> Message:
        nonlocal seen, complete
        if complete:
            return await receive()  # a hang-up may take any time
        end_s = began_s + WHOLE_S + seen / SLOWEST_BYTES_PER_SECOND
        try:
            async with asyncio.timeout(SILENCE_S), asyncio.timeout_at(end_s):
                message = await receive()
        except TimeoutError:
            reason = (
                f"nothing of the body came for {SILENCE_S:g} s, or less than "
                f"{SLOWEST_BYTES_PER_SECOND:,} bytes a second "
                f"after the first {WHOLE_S:g} s"
            )
            raise HpToolError(reason, code="request_timeout") from None
        seen += len(message.get("body", b""))
        complete = message["type"] != "http.request" or not message.get("more_body")
        return message

    return received


async def whole(receive: Receive) -> bytes | None:
    """The body; None where the client hung up. Raises HpToolError `request_timeout` where nothing
    more of it comes, or too slowly.
    """
    pieces, end_s = [], asyncio.get_running_loop().time() + WHOLE_S
    while True:
        try:
            async with asyncio.timeout(SILENCE_S), asyncio.timeout_at(end_s):
                message = await receive()
        except TimeoutError:
            reason = (
                f"nothing of the body came for {SILENCE_S:g} s, or not all of it in {WHOLE_S:g} s"
            )
            raise HpToolError(reason, code="request_timeout") from None
        if message["type"] == "http.disconnect":
            return None
        pieces.append(message.get("body", b""))
        if not message.get("more_body"):
            return b"".join(pieces)


def replayed(body: bytes, receive: Receive) -> Receive:
    """A `receive` that delivers a body which was read already."""
    messages: Iterator[Message] = iter([{"type": "http.request", "body": body, "more_body": False}])

    async def received() -> Message:
        return next(messages, None) or await receive()

    return received
