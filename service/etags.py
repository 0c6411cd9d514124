"""ETags: a client that sends the tag of its copy is answered 304 while the copy is current."""

from __future__ import annotations

import hashlib

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send

PREFIX = "/v1/"
UNTAGGED = ("/v1/keys", "/v1/audit")
"""Answers that no client may keep."""


class ETags:
    """Tags JSON answers to GET requests of the API by their bytes. Streams pass untouched."""

    def __init__(self, app: ASGIApp) -> None:
        self.app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        path: str = scope.get("path", "")
        tagged = scope["type"] == "http" and scope["method"] == "GET" and path.startswith(PREFIX)
        if not tagged or path.startswith(UNTAGGED):
            await self.app(scope, receive, send)
            return
        start: Message | None = None

        async def conditional(message: Message) -> None:
            nonlocal start
            if message["type"] == "http.response.start" and _is_json(message):
                start = message
                return
            if start is not None:
                message, start = _tagged(start, message, Headers(scope=scope).get("if-none-match", "")), None
                await send(message.pop("start"))
            await send(message)

        await self.app(scope, receive, conditional)


def _is_json(start: Message) -> bool:
    return start["status"] == 200 and dict(start["headers"]).get(b"content-type") == b"application/json"


def _tagged(start: Message, body: Message, known: str) -> Message:
    """The answer's body with its start, tagged; emptied to a 304 where `known` (If-None-Match) holds its tag."""
    if body.get("more_body"):
        return {**body, "start": start}
    tag = f'"{hashlib.blake2b(body.get("body", b""), digest_size=12).hexdigest()}"'
    headers = [*start["headers"], (b"etag", tag.encode()), (b"cache-control", b"private, no-cache")]
    if known.strip() != "*" and tag not in (each.strip().removeprefix("W/") for each in known.split(",")):
        return {**body, "start": {**start, "headers": headers}}
    headers = [(name, value) for name, value in headers if name not in (b"content-length", b"content-type")]
    return {"type": "http.response.body", "body": b"", "start": {**start, "status": 304, "headers": headers}}
