"""Trying again: where a key asked too often and is told when to come back, where an answer got lost, where a server is away."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable

import httpx

from hp_tool.errors import StoreError
from service.routes import COMPUTING, SAFE_METHODS

LONGEST_WAIT_S = 10.0
"""A rate's bucket fills within seconds. A quota comes back at midnight; that is the caller's to decide."""
ATTEMPTS = 5
LOST_ATTEMPTS = 3
FIRST_WAIT_S = 0.2
"""After an answer that got lost; doubled each time."""
AWAY = frozenset({502, 503, 504})
"""A server that restarts, or whose database does."""
PATIENCE_S = 300.0
"""How long a search is followed while nobody answers: longer than an update of the service, or of its database, takes."""
LONGEST_ABSENT_WAIT_S = 5.0


def wait_s(request: httpx.Request, outcome: httpx.Response | httpx.TransportError, *, attempt: int) -> float | None:
    """Seconds until the request is sent again; None: this outcome is the answer. `attempt` counts from 1.

    A 429 was counted and not carried out, so any request may be sent again. What got lost may have been carried out: it is sent
    again where that does no harm, because it changes nothing or carries an Idempotency-Key.
    """
    if isinstance(outcome, httpx.Response) and outcome.status_code == httpx.codes.TOO_MANY_REQUESTS:
        told = _seconds(outcome.headers.get("Retry-After", ""))
        return told if told is not None and told <= LONGEST_WAIT_S and attempt < ATTEMPTS else None
    lost = isinstance(outcome, httpx.TransportError) or outcome.status_code in AWAY
    if lost and _repeatable(request) and attempt < LOST_ATTEMPTS:
        return FIRST_WAIT_S * 2.0 ** (attempt - 1)
    return None


class ReconnectPolicy:
    """A server that is away, as seen by who follows something on it: when to ask again, and when to give up."""

    def __init__(self, *, patience_s: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._patience_s, self._clock = patience_s, clock
        self._since: float | None = None

    def over(self) -> None:
        """It answered."""
        self._since = None

    def wait_s(self, error: StoreError) -> float:
        """Seconds until it is asked again: as long as it has been away, within bounds. Raises `error` once patience ends."""
        now = self._clock()
        self._since = now if self._since is None else self._since
        away_s = now - self._since
        if away_s >= self._patience_s:
            raise error
        return min(max(away_s, FIRST_WAIT_S), LONGEST_ABSENT_WAIT_S, self._patience_s)


class RetryTransport(httpx.BaseTransport):
    """Waits between attempts."""

    def __init__(self, inner: httpx.BaseTransport, *, sleep: Callable[[float], object] = time.sleep) -> None:
        self._inner = inner
        self._sleep = sleep

    def handle_request(self, request: httpx.Request) -> httpx.Response:
        attempt = 0
        while True:
            attempt += 1
            outcome: httpx.Response | httpx.TransportError
            try:
                outcome = self._inner.handle_request(request)
            except httpx.TransportError as error:
                outcome = error
            seconds = wait_s(request, outcome, attempt=attempt)
            if isinstance(outcome, httpx.Response):
                if seconds is None:
                    return outcome
                outcome.close()
            elif seconds is None:
                raise outcome
            self._sleep(seconds)

    def close(self) -> None:
        self._inner.close()


class AsyncRetryTransport(httpx.AsyncBaseTransport):
    """The same for an event loop."""

    def __init__(self, inner: httpx.AsyncBaseTransport, *, sleep: Callable[[float], Awaitable[object]] = asyncio.sleep) -> None:
        self._inner = inner
        self._sleep = sleep

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        attempt = 0
        while True:
            attempt += 1
            outcome: httpx.Response | httpx.TransportError
            try:
                outcome = await self._inner.handle_async_request(request)
            except httpx.TransportError as error:
                outcome = error
            seconds = wait_s(request, outcome, attempt=attempt)
            if isinstance(outcome, httpx.Response):
                if seconds is None:
                    return outcome
                await outcome.aclose()
            elif seconds is None:
                raise outcome
            await self._sleep(seconds)

    async def aclose(self) -> None:
        await self._inner.aclose()


def _repeatable(request: httpx.Request) -> bool:
    return request.method in SAFE_METHODS or request.url.path in COMPUTING or "Idempotency-Key" in request.headers


def _seconds(text: str) -> float | None:
    try:
        return max(float(text), 0.0)
    except ValueError:
        return None
