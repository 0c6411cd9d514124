"""The gate in front of every request: Host, origin, key, rate and size; and the headers on every response."""

import time
from collections.abc import Callable, Set
from urllib.parse import urlsplit

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Send
from starlette.types import Scope as AsgiScope

from hp_tool.domain.access import Scope
from hp_tool.errors import HpToolError, InputError, LimitError, NotFoundError
from service import asgi_body
from service.api.problems import problem
from service.keys import Keyring, Principal
from service.routes import ADMINISTRATION, COMPUTING, OPEN_PATHS, SAFE_METHODS, STREAMED
from service.settings import Settings

RESPONSE_HEADERS = {
    "Content-Security-Policy": (
        # data: for Plotly alone, which asks the browser with a one-pixel image whether it knows WebP.
        "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:; connect-src 'self'; "
        "form-action 'self'; base-uri 'none'; frame-ancestors 'none'"
    ),
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
    "Referrer-Policy": "same-origin",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cache-Control": "no-store",
}
RAW_HEADERS = tuple((name.lower().encode(), value.encode()) for name, value in RESPONSE_HEADERS.items())
"""As ASGI carries them. Lower case, as every header of the framework is."""
BURST_S = 5.0
"""A rate limit allows this many seconds' worth of requests at once: a page with its pictures, a script that starts."""


class Gate:
    """Refuses with a problem+json what must not reach a route. Starlette's layers answer in plain text, and buffer streams."""

    def __init__(self, app: ASGIApp, settings: Settings, keyring: Keyring) -> None:
        self.app = app
        self.settings = settings
        self.keyring = keyring
        self.rates = RateLimits()
        self.hosts = {host.strip("[]").lower() for host in settings.hosts}

    async def __call__(self, scope: AsgiScope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return

        async def send_with_headers(message: Message) -> None:
            if message["type"] == "http.response.start":
                headers = message["headers"] = list(message.get("headers", ()))
                names = {name for name, _ in headers}
                headers += [header for header in RAW_HEADERS if header[0] not in names]
            await send(message)

        request = Headers(scope=scope)
        try:
            check_host(request, self.hosts)
            check_text(scope)
            check_origin(scope["method"], request)
            if scope["path"] not in OPEN_PATHS:
                principal = await self.keyring.principal(request)
                scope.setdefault("state", {})["principal"] = principal
                if principal.key is not None:
                    rate = principal.key.requests_per_second or self.settings.requests_per_second
                    self.rates.take(principal.key.id, per_second=rate)
                check_scope(principal, method=scope["method"], path=scope["path"])
            limit = self.settings.max_batch_bytes if scope["path"] in STREAMED else self.settings.max_body_bytes
            check_announced_size(request, limit)
            receive = asgi_body.counted(receive, limit)
            if scope["path"] not in STREAMED:  # read here, so that no layer below meets a body that is too large half-way
                body = await asgi_body.whole(receive)
                if body is None:  # the sender hung up
                    return
                receive = asgi_body.replayed(body, receive)
        except HpToolError as error:
            await problem(error)(scope, receive, send_with_headers)
            return
        if scope["method"] == "HEAD" and not scope["path"].endswith("/events"):  # the server leaves the body out
            scope = {**scope, "method": "GET"}
        await self.app(scope, receive, send_with_headers)


class RateLimits:
    """A token bucket per key, in this process; used on one event loop only, so nothing is locked."""

    def __init__(self, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._buckets: dict[str, tuple[float, float]] = {}

    def take(self, key_id: str, *, per_second: float) -> None:
        """Count one request; raises LimitError, with the wait until the next one, where there are no tokens.

        tokens = min(capacity, tokens + elapsed x per_second), capacity = max(1, BURST_S x per_second)
        """
        capacity = max(1.0, BURST_S * per_second)
        now = self._clock()
        tokens, seen = self._buckets.get(key_id, (capacity, now))
        tokens = min(capacity, tokens + (now - seen) * per_second)
        if tokens < 1.0:
            self._buckets[key_id] = tokens, now
            raise LimitError(
                f"key {key_id} may send {per_second:g} requests a second; send many queries as one POST /v1/batch",
                retry_after_s=(1.0 - tokens) / per_second,
            )
        self._buckets[key_id] = tokens - 1.0, now


def check_host(headers: Headers, accepted: Set[str]) -> None:
    """Check that the Host header names this service, which stops DNS rebinding against one on loopback."""
    name = (urlsplit("//" + headers.get("host", "")).hostname or "").lower()
    if "*" not in accepted and name not in accepted:
        raise HpToolError(f"this service does not answer for host {name!r}", code="unknown_host")


def check_text(scope: AsgiScope) -> None:
    """Check that path and parameters hold no NUL, which PostgreSQL cannot store."""
    if "\0" in scope["path"]:
        raise NotFoundError("nothing has a name with a NUL character")
    if b"%00" in scope["query_string"]:
        raise InputError("a parameter holds a NUL character", code="bad_request")


def check_origin(method: str, headers: Headers) -> None:
    """Check that a changing request comes from our own page or from no page (cross-site request forgery).

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


def check_scope(principal: Principal, *, method: str, path: str) -> None:
    """Check that the key allows the request; a changing route that is not listed needs the right to submit."""
    reads = method in SAFE_METHODS or path in COMPUTING
    needed = Scope.ADMIN if path.startswith(ADMINISTRATION) else Scope.READ if reads else Scope.SUBMIT
    if principal.scope < needed:
        raise HpToolError(
            f"key {principal.key_id} has scope {principal.scope.name.lower()}; this needs {needed.name.lower()}",
            code="forbidden",
        )


def check_announced_size(headers: Headers, limit: int) -> None:
    """Check that Content-Length is a number within the limit, where it is present."""
    announced = headers.get("content-length", "0")
    if not announced.isdecimal():
        raise InputError("Content-Length is not a number", code="bad_request")
    if int(announced) > limit:
        raise asgi_body.too_large(limit)
