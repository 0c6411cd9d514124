"""Gzip compression of responses."""

from starlette.middleware.gzip import GZipMiddleware
from starlette.types import ASGIApp, Receive, Scope, Send

MIN_BYTES = 1024
LEVEL = 1
"""Gzip level. Level 6 makes responses 20% smaller but takes two to three times as long."""


class Compression:
    """Compresses responses to GET requests, except event streams.

    Responses to POST are not compressed. For a cached recommendation, compression would take longer
    than the lookup, and the size of the page with a new key must not depend on the secret.
    """

    def __init__(self, app: ASGIApp) -> None:
        self.app = app
        self.compressed = GZipMiddleware(app, minimum_size=MIN_BYTES, compresslevel=LEVEL)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        reads = scope["type"] == "http" and scope["method"] == "GET"
        await (self.compressed if reads else self.app)(scope, receive, send)
