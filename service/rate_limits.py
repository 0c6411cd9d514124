"""How often a key may ask: a token bucket each, in this process."""

from __future__ import annotations

import time
from collections.abc import Callable

from hp_tool.errors import LimitError

BURST_S = 5.0
"""A bucket holds this many seconds' worth of requests: a page with its pictures, a script that starts."""


class RateLimits:
    """Buckets by key; used on one event loop only, so nothing is locked."""

    def __init__(self, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._buckets: dict[str, tuple[float, float]] = {}

    def take(self, key_id: str, *, per_second: float) -> None:
        """Count one request. LimitError says when the next one may come.

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
