"""When a request is sent again: after a rate limit, after a lost answer, and while a server is
away.
"""

import asyncio
import time
from collections.abc import Awaitable, Callable

import httpx

from hp_tool.errors import StoreError
from service.http.routes import COMPUTING, SAFE_METHODS

LONGEST_WAIT_S = 10.0
"""A rate limit ends within seconds. A quota starts again at midnight; waiting for that is the
caller's to decide.
"""
ATTEMPTS = 5
LOST_ATTEMPTS = 3
FIRST_WAIT_S = 0.2
"""After a lost answer; doubled each time."""
AWAY = frozenset({502, 503, 504})
"""A server that restarts, or whose database does."""
PATIENCE_S = 300.0
"""How long a search is followed while nobody answers: longer than an update of the service, or of
its database, takes.
"""
LONGEST_RECONNECT_WAIT_S = 5.0
Outcome = httpx.Response | httpx.TransportError


def wait_s(request: httpx.Request, outcome: Outcome, *, attempt: int) -> float | None:
    """Seconds until the request is sent again; None: this outcome is final. `attempt` counts from
    1.

    A request answered 429 was not carried out, so any may be sent again. One whose answer was lost
    may have been carried out: it is sent again only if it changes nothing or carries an
    Idempotency-Key. So is one that a busy server answered 503 with Retry-After.
    """
    repeatable = (
        request.method in SAFE_METHODS
        or request.url.path in COMPUTING
        or "Idempotency-Key" in request.headers
    )
    if isinstance(outcome, httpx.Response):
        refused = outcome.status_code == httpx.codes.TOO_MANY_REQUESTS
        busy = (
            outcome.status_code == httpx.codes.SERVICE_UNAVAILABLE
            and "Retry-After" in outcome.headers
            and repeatable
        )
        if refused or busy:
            retry_after_s = _seconds(outcome.headers.get("Retry-After", ""))
            return retry_after_s if retry_after_s <= LONGEST_WAIT_S and attempt < ATTEMPTS else None
    lost = isinstance(outcome, httpx.TransportError) or outcome.status_code in AWAY
    if lost and repeatable and attempt < LOST_ATTEMPTS:
        return FIRST_WAIT_S * 2.0 ** (attempt - 1)
    return None


class ReconnectPolicy:
    """How long to wait before connecting again to a server that is away, and when to give up."""

    def __init__(self, *, patience_s: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._patience_s, self._clock = patience_s, clock
        self._away_since: float | None = None

    def connected(self) -> None:
        """The server answered: patience starts anew."""
        self._away_since = None

    def wait_s(self, error: StoreError) -> float:
        """Seconds until the next attempt: as long as the server has been away, within bounds.
        Raises `error` at last.
        """
        now = self._clock()
        self._away_since = now if self._away_since is None else self._away_since
        away_s = now - self._away_since
        if away_s >= self._patience_s:
            raise error
        return min(max(away_s, FIRST_WAIT_S), LONGEST_RECONNECT_WAIT_S, self._patience_s)


class RetryTransport(httpx.BaseTransport):
    """Sends a request again where `wait_s` says so."""

    def __init__(
        self, inner: httpx.BaseTransport, *, sleep: Callable[[float], object] = time.sleep
    ) -> None:
        self._inner, self._sleep = inner, sleep

    def handle_request(self, request: httpx.Request) -> httpx.Response:
        attempt = 1
        while True:
            try:
                outcome: Outcome = self._inner.handle_request(request)
            except httpx.TransportError as error:
                outcome = error
            seconds = wait_s(request, outcome, attempt=attempt)
            if seconds is None:
                return _response(outcome)
            if isinstance(outcome, httpx.Response):
                outcome.close()
            self._sleep(seconds)
            attempt += 1

    def close(self) -> None:
        self._inner.close()


class AsyncRetryTransport(httpx.AsyncBaseTransport):
    """`RetryTransport` for an event loop."""

    def __init__(
        self,
        inner: httpx.AsyncBaseTransport,
        *,
        sleep: Callable[[float], Awaitable[object]] = asyncio.sleep,
    ) -> None:
        self._inner, self._sleep = inner, sleep

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        attempt = 1
        while True:
            try:
                outcome: Outcome = await self._inner.handle_async_request(request)
            except httpx.TransportError as error:
                outcome = error
            seconds = wait_s(request, outcome, attempt=attempt)
            if seconds is None:
                return _response(outcome)
            if isinstance(outcome, httpx.Response):
                await outcome.aclose()
            await self._sleep(seconds)
            attempt += 1

    async def aclose(self) -> None:
        await self._inner.aclose()


def _response(outcome: Outcome) -> httpx.Response:
    if isinstance(outcome, httpx.TransportError):
        raise outcome
    return outcome


def _seconds(text: str) -> float:
    """A Retry-After in seconds; infinite where it is none."""
    try:
        return max(float(text), 0.0)
    except ValueError:
        return float("inf")
