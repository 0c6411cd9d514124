"""A transport that waits where the server says so: a key that asked too often is told in how many seconds to come back."""

from __future__ import annotations

import time
from collections.abc import Callable

import httpx

LONGEST_WAIT_S = 10.0
"""A rate's bucket fills within seconds. A quota comes back at midnight; that is the caller's to decide."""
ATTEMPTS = 5


class Patient(httpx.BaseTransport):
    """Sends again what was answered 429 with a short Retry-After: such a request was counted and not carried out."""

    def __init__(self, inner: httpx.BaseTransport, *, sleep: Callable[[float], None] = time.sleep) -> None:
        self._inner = inner
        self._sleep = sleep

    def handle_request(self, request: httpx.Request) -> httpx.Response:
        for _ in range(ATTEMPTS - 1):
            response = self._inner.handle_request(request)
            wait_s = _retry_after_s(response)
            if wait_s is None or wait_s > LONGEST_WAIT_S:
                return response
            response.close()
            self._sleep(wait_s)
        return self._inner.handle_request(request)

    def close(self) -> None:
        self._inner.close()


def _retry_after_s(response: httpx.Response) -> float | None:
    """Seconds to wait; None for any answer that is not about too many requests."""
    text = response.headers.get("Retry-After", "")
    return float(text) if response.status_code == httpx.codes.TOO_MANY_REQUESTS and text.isdecimal() else None
