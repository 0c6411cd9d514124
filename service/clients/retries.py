"""Repeat requests after rate limits and lost responses, and while a server is unreachable."""

import asyncio
import time
from collections.abc import Awaitable, Callable

import httpx

from hp_tool.errors import StoreError
from service.http.routes import COMPUTING, SAFE_METHODS

MAX_RETRY_AFTER_S = 10.0
"""Maximum Retry-After in seconds that a client waits for. After a used-up daily quota, it is
longer, and the caller decides.
"""
MAX_ATTEMPTS = 5
MAX_LOST_ATTEMPTS = 3
FIRST_WAIT_S = 0.2
"""Seconds to wait after the first lost response. The wait doubles with each attempt."""
UNAVAILABLE_STATUSES = frozenset({502, 503, 504})
"""HTTP statuses of a server that is restarting, or whose database is."""
MAX_UNREACHABLE_S = 300.0
"""Seconds for which a client that follows a search retries an unreachable server. This is longer
than an update takes.
"""
MAX_RECONNECT_WAIT_S = 5.0
Outcome = httpx.Response | httpx.TransportError


def wait_s(request: httpx.Request, outcome: Outcome, *, attempt: int) -> float | None:
    """Return the seconds to wait before repeating a request; None if its outcome is final.

    After a 429, nothing was done, so every request is repeated. After a lost response, or a 503
    with Retry-After, a request is repeated only if it changes nothing or has an Idempotency-Key.

    Args:
        request: The request.
        outcome: Response or transport error.
        attempt: Number of this attempt, from 1.
    """
    repeatable = (
        request.method in SAFE_METHODS
        or request.url.path in COMPUTING
        or "Idempotency-Key" in request.headers
    )
    if isinstance(outcome, httpx.Response):
        is_limited = outcome.status_code == httpx.codes.TOO_MANY_REQUESTS
        busy = (
            outcome.status_code == httpx.codes.SERVICE_UNAVAILABLE
            and "Retry-After" in outcome.headers
            and repeatable
        )
        if is_limited or busy:
            retry_after_s = _seconds(outcome.headers.get("Retry-After", ""))
            return (
                retry_after_s
                if retry_after_s <= MAX_RETRY_AFTER_S and attempt < MAX_ATTEMPTS
                else None
            )
    response_lost = (
        isinstance(outcome, httpx.TransportError) or outcome.status_code in UNAVAILABLE_STATUSES
    )
    if response_lost and repeatable and attempt < MAX_LOST_ATTEMPTS:
        return FIRST_WAIT_S * 2.0 ** (attempt - 1)
    return None


class ReconnectPolicy:
    """Waits between attempts to reconnect, with a limit on their sum."""

    def __init__(self, *, patience_s: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._patience_s, self._clock = patience_s, clock
        self._unreachable_since: float | None = None

    def connected(self) -> None:
        """Reset the waits after a response."""
        self._unreachable_since = None

    def wait_s(self, error: StoreError) -> float:
        """Return the seconds until the next attempt; raise `error` if the limit is exceeded."""
        now = self._clock()
        self._unreachable_since = (
            now if self._unreachable_since is None else self._unreachable_since
        )
        away_s = now - self._unreachable_since
        if away_s >= self._patience_s:
            raise error
        return min(max(away_s, FIRST_WAIT_S), MAX_RECONNECT_WAIT_S, self._patience_s)


class RetryTransport(httpx.BaseTransport):
    """Transport that repeats requests according to `wait_s`."""

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
    """Asynchronous version of `RetryTransport`."""

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
    """Return Retry-After in seconds; infinity if it is not a number."""
    try:
        return max(float(text), 0.0)
    except ValueError:
        return float("inf")
