"""Gate for all requests: host, origin, key, rate and size; security headers of responses."""

import contextlib
import time
from collections.abc import Callable, Set
from urllib.parse import parse_qsl, urlsplit

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Send
from starlette.types import Scope as AsgiScope

from hp_tool.domain.access import Scope
from hp_tool.errors import HpToolError, InputError, LimitError, NotFoundError
from service.api.problems import problem
from service.http import asgi_body
from service.http.routes import (
    ADMINISTRATION,
    COMPUTING,
    OPEN_PATHS,
    SAFE_METHODS,
    STREAMED,
    UPLOADS,
)
from service.keys import ForbiddenKeyError, Keyring, Principal
from service.settings import Settings

RESPONSE_HEADERS = {
    "Content-Security-Policy": (
        "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; connect-src "
        "'self'; "
        "form-action 'self'; base-uri 'none'; frame-ancestors 'none'"
    ),
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
    "Referrer-Policy": "same-origin",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cache-Control": "no-store",
}
RAW_HEADERS = tuple(
    (name.lower().encode(), value.encode()) for name, value in RESPONSE_HEADERS.items()
)
"""SECURITY_HEADERS as bytes, with names in lower case as the framework requires."""
MAX_BUCKETS = 10_000
AUDITED_REFUSALS_PER_SECOND = 1 / 60
"""Audited rejections per second for one revoked or expired key, which limits the audit log's
growth.
"""
BURST_S = 5.0
"""Number of seconds' worth of requests that a rate limit allows at once, such as a page with its
images.
"""


class Gate:
    """Rejects requests with a problem+json response before they reach a route.

    Starlette's middleware would respond in plain text and delay streams.
    """

    def __init__(self, app: ASGIApp, settings: Settings, keyring: Keyring) -> None:
        self.app = app
        self.settings = settings
        self.keyring = keyring
        self.rates, self.owners, self.wrong_keys, self.refused = (RateLimits() for _ in range(4))
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
                principal = await self._principal(scope, request)
                scope.setdefault("state", {})["principal"] = principal
                if principal.key is not None:
                    rate = principal.key.requests_per_second or self.settings.requests_per_second
                    self.rates.take(f"key {principal.key.id}", per_second=rate)
                    together = max(rate, self.settings.requests_per_second_per_owner)
                    self.owners.take(f"owner {principal.owner}", per_second=together)
                check_scope(principal, method=scope["method"], path=scope["path"])
            limit = (
                self.settings.max_batch_bytes
                if scope["path"] in STREAMED
                else self.settings.max_body_bytes
            )
            check_announced_size(request, limit)
            receive = asgi_body.limit_size(receive, limit)
            if scope["path"] in UPLOADS and scope["method"] == "POST":
                receive = asgi_body.limit_time(receive)
            # Read here, so that inner layers never see a body that exceeds the limit halfway.
            if scope["path"] not in STREAMED:
                body = await asgi_body.read_body(receive)
                if body is None:  # The client disconnected.
                    return
                receive = asgi_body.replay_body(body, receive)
        except HpToolError as error:
            await problem(error)(scope, receive, send_with_headers)
            return
        # The server omits the body of responses to HEAD.
        if scope["method"] == "HEAD" and not scope["path"].endswith("/events"):
            scope = {**scope, "method": "GET"}
        await self.app(scope, receive, send_with_headers)

    async def _principal(self, scope: AsgiScope, request: Headers) -> Principal:
        """Return the caller of a request.

        After too many wrong keys from an address, the address is rejected without a check, which
        prevents guessing. Keys that were recognized earlier still work from there.
        """
        address = (scope.get("client") or ("",))[0]
        try:
            if not self.keyring.recognises(request):
                self.wrong_keys.take(
                    address, per_second=self.settings.wrong_keys_per_second, tokens=0.0
                )
        except LimitError as error:
            message = f"Too many wrong keys from {address}. Try again later."
            raise LimitError(
                message, code="too_many_wrong_keys", retry_after_s=error.retry_after_s
            ) from None
        try:
            return await self.keyring.principal(request)
        except ForbiddenKeyError as error:
            with contextlib.suppress(LimitError):
                self.refused.take(error.key.id, per_second=AUDITED_REFUSALS_PER_SECOND)
                scope.setdefault("state", {})["refused_key"] = error.key
            raise
        except HpToolError as error:
            if error.code == "unauthorized" and "authorization" in request:
                with contextlib.suppress(LimitError):
                    self.wrong_keys.take(address, per_second=self.settings.wrong_keys_per_second)
            raise


class RateLimits:
    """Token buckets by key, owner or address in this process. Use them on one event loop only."""

    def __init__(self, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._buckets: dict[str, tuple[float, float]] = {}

    def take(self, bucket: str, *, per_second: float, tokens: float = 1.0) -> None:
        """Take tokens from a bucket.

        tokens = min(capacity, tokens + elapsed x per_second), capacity = max(1, BURST_S x
        per_second)

        Raises:
            LimitError: No token is left; includes the wait until the next one.
        """
        capacity = max(1.0, BURST_S * per_second)
        now = self._clock()
        if bucket not in self._buckets and len(self._buckets) >= MAX_BUCKETS:
            self._buckets.clear()
        tokens_left, updated_at = self._buckets.get(bucket, (capacity, now))
        tokens_left = min(capacity, tokens_left + (now - updated_at) * per_second)
        if tokens_left < 1.0:
            self._buckets[bucket] = tokens_left, now
            raise LimitError(
                f"Rate limit: {bucket} may send {per_second:g} requests per second. Send many "
                "queries as one POST /v1/batch.",
                retry_after_s=(1.0 - tokens_left) / per_second,
            )
        self._buckets[bucket] = tokens_left - tokens, now


def check_host(headers: Headers, accepted: Set[str]) -> None:
    """Raise HpToolError unless the Host header names this service (DNS rebinding)."""
    name = (urlsplit("//" + headers.get("host", "")).hostname or "").lower()
    if "*" not in accepted and name not in accepted:
        raise HpToolError(
            f"This service does not accept host {name!r} (HP_ALLOWED_HOSTS).", code="unknown_host"
        )


def check_text(scope: AsgiScope) -> None:
    """Raise an error if the path or a parameter contains NUL, which PostgreSQL cannot store."""
    if "\0" in scope["path"]:
        raise NotFoundError("The path contains a NUL character. Remove it.")
    if b"%00" in scope["query_string"]:
        parameters = parse_qsl(scope["query_string"].decode("latin-1"), keep_blank_values=True)
        names = (name.replace("\0", "") for name, value in parameters if "\0" in name + value)
        raise InputError(
            "A parameter contains a NUL character. Remove it.",
            field=next(names, "") or "query",
            code="bad_request",
        )


def check_origin(method: str, headers: Headers) -> None:
    """Raise HpToolError for changing requests from other sites' pages (CSRF).

    Browsers send Sec-Fetch-Site, or Origin if they are older. Programs send neither.
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
        raise HpToolError("Cross-site requests that modify data are rejected.", code="cross_origin")


def check_scope(principal: Principal, *, method: str, path: str) -> None:
    """Raise HpToolError if the key's scope does not allow the route.

    Administration requires `admin`, reading and computing require `read`, all else `submit`.
    """
    reads = method in SAFE_METHODS or path in COMPUTING
    needed = (
        Scope.ADMIN if path.startswith(ADMINISTRATION) else Scope.READ if reads else Scope.SUBMIT
    )
    if principal.scope < needed:
        raise HpToolError(
            f"Key {principal.key_id} has scope {principal.scope.name.lower()}; this request needs "
            f"{needed.name.lower()}.",
            code="forbidden",
        )


def check_announced_size(headers: Headers, limit: int) -> None:
    """Raise an error if Content-Length is not a number or exceeds the limit."""
    announced = headers.get("content-length", "0")
    if not announced.isdecimal():
        raise InputError(
            "Content-Length is not a number.", field="Content-Length", code="bad_request"
        )
    if int(announced) > limit:
        raise asgi_body.too_large(limit)
