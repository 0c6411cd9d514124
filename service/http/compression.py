"""Compressed answers for clients that accept gzip."""

from starlette.middleware.gzip import GZipMiddleware
from starlette.types import ASGIApp, Receive, Scope, Send

MIN_BYTES = 1024
LEVEL = 1
"""Level 6 makes answers a fifth smaller and takes two to three times as long."""


class Compression:
    """Compresses answers to GET requests: pages, scripts, lists. Event streams pass untouched.

    Answers to POST requests stay as they are: compressing a cached recommendation would take longer
    than finding it, and the page that shows a new key must not let its length tell of the secret.
    """

    def __init__(self, app: ASGIApp) -> None:
        self.app = app
        self.compressed = GZipMiddleware(app, minimum_size=MIN_BYTES, compresslevel=LEVEL)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        reads = scope["type"] == "http" and scope["method"] == "GET"
        await (self.compressed if reads else self.app)(scope, receive, send)
