"""The gate in front of every request: Host, origin, key and size; and the headers on every response.

One plain ASGI middleware, because Starlette's own answer in plain text and buffer what we stream.
"""

from __future__ import annotations

import base64
import binascii
import hmac
from urllib.parse import urlsplit

from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from hp_tool.errors import HpToolError, InputError
from service.api.problems import problem
from service.settings import Settings

SAFE_METHODS = frozenset({"GET", "HEAD", "OPTIONS"})
OPEN_PATHS = frozenset({"/healthz", "/readyz"})
BATCH_PATH = "/v1/batch"

RESPONSE_HEADERS = {
    "Content-Security-Policy": (
        "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; connect-src 'self'; "
        "form-action 'self'; base-uri 'none'; frame-ancestors 'none'"
    ),
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
    "Referrer-Policy": "same-origin",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
}


class Gate:
    """Refuses what must not reach a route; everything it refuses is a problem+json like any other error."""

    def __init__(self, app: ASGIApp, settings: Settings) -> None:
        self.app = app
        self.settings = settings

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return

        async def send_with_headers(message: Message) -> None:
            if message["type"] == "http.response.start":
                headers = MutableHeaders(scope=message)
                for name, value in RESPONSE_HEADERS.items():
                    headers.setdefault(name, value)
                headers.setdefault("Cache-Control", "no-store")
            await send(message)

        request = Headers(scope=scope)
        try:
            check_host(request, self.settings)
            check_origin(scope["method"], request)
            if scope["path"] not in OPEN_PATHS:
                check_key(request, self.settings)
            limit = self.settings.max_batch_bytes if scope["path"] == BATCH_PATH else self.settings.max_body_bytes
            check_announced_size(request, limit)
        except HpToolError as error:
            response = problem(error)
            if error.code == "unauthorized":
                # Basic lets a browser ask for the key: any user name, the key as password.
                response.headers["WWW-Authenticate"] = 'Basic realm="hp-tool", charset="UTF-8"'
            await response(scope, receive, send_with_headers)
            return
        await self.app(scope, _counted(receive, limit), send_with_headers)


def check_host(headers: Headers, settings: Settings) -> None:
    """The Host header names this service. Stops DNS rebinding against a service on loopback."""
    name = (urlsplit("//" + headers.get("host", "")).hostname or "").lower()
    accepted = {host.strip("[]").lower() for host in settings.hosts}
    if "*" not in accepted and name not in accepted:
        raise HpToolError(f"this service does not answer for host {name!r}", code="unknown_host")


def check_origin(method: str, headers: Headers) -> None:
    """A changing request comes from our own page or from no page at all (cross-site request forgery).

    Browsers send Sec-Fetch-Site, and Origin where they are older; programs send neither.
    """
    if method in SAFE_METHODS:
        return
    site, origin = headers.get("sec-fetch-site"), headers.get("origin")
    if site is not None:
        allowed = site in ("same-origin", "none")
    elif origin is not None:
        allowed = urlsplit(origin).netloc == headers.get("host", "")
    else:
        allowed = True
    if not allowed:
        raise HpToolError("changing requests from pages of other sites are refused", code="cross_origin")


def check_key(headers: Headers, settings: Settings) -> None:
    """Where a key is set, the request carries it: `Authorization: Bearer KEY`, or Basic with the key as password."""
    if settings.api_key is None:
        return
    given = _key_of(headers.get("authorization", ""))
    # Constant time: how long the comparison takes tells nothing about how much of the key was right.
    if not hmac.compare_digest(given.encode(), settings.api_key.encode()):
        raise HpToolError("send the key as 'Authorization: Bearer KEY'", code="unauthorized")


def check_announced_size(headers: Headers, limit: int) -> None:
    """Content-Length stays within the limit, and is a number where given."""
    announced = headers.get("content-length", "0")
    if not announced.isdecimal():
        raise InputError("Content-Length is not a number", code="bad_request")
    if int(announced) > limit:
        raise _too_large(limit)


def _key_of(authorization: str) -> str:
    scheme, _, value = authorization.partition(" ")
    if scheme.lower() == "bearer":
        return value.strip()
    if scheme.lower() == "basic":
        try:
            return base64.b64decode(value, validate=True).decode().partition(":")[2]
        except (binascii.Error, UnicodeDecodeError):
            return ""
    return ""


def _counted(receive: Receive, limit: int) -> Receive:
    """`receive` that stops a body of unannounced length at the limit."""
    seen = 0

    async def counted() -> Message:
        nonlocal seen
        message = await receive()
        if message["type"] == "http.request":
            seen += len(message.get("body", b""))
            if seen > limit:
                raise _too_large(limit)
        return message

    return counted


def _too_large(limit: int) -> HpToolError:
    return HpToolError(f"the body is larger than {limit} bytes", code="payload_too_large")
