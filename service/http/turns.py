"""Turns at work that only a few requests may do at once, shared fairly among keys."""

from __future__ import annotations

import asyncio
from collections import Counter, OrderedDict, deque
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from hp_tool.errors import LimitError

BUSY = "busy"
"""Code of the error for a request that waited too long for its turn."""


class Turns:
    """A queue for each key; the keys take turns, so that many requests of one key delay another key
    by one request.

    Used on one event loop only, so nothing is locked.
    """

    def __init__(self, *, at_once: int, at_once_per_key: int, max_wait_s: float) -> None:
        self._free, self._per_key, self._max_wait_s = at_once, at_once_per_key, max_wait_s
        self._at_work: Counter[str] = Counter()
        self._waiting: OrderedDict[str, deque[asyncio.Future[None]]] = OrderedDict()

    @asynccontextmanager
    async def turn(self, key: str | None) -> AsyncIterator[None]:
        """Wait for a turn of `key` (None: the operator) and hold it. Raises LimitError `busy` after
        the longest wait.
        """
        who = key or ""
        await self._wait(who)
        try:
            yield
        finally:
            self._end(who)

    async def _wait(self, who: str) -> None:
        granted: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.setdefault(who, deque()).append(granted)
        self._grant()
        try:
            async with asyncio.timeout(self._max_wait_s):
                await granted
        except BaseException as error:
            if granted.done() and not granted.cancelled():  # granted in the same moment
                self._end(who)
            else:
                self._leave(who, granted)
            if not isinstance(error, TimeoutError):
                raise
            raise LimitError(
                f"The server is busy: this request waited {self._max_wait_s:g} s for its turn. "
                "Send it again.",
                retry_after_s=self._max_wait_s,
                code=BUSY,
            ) from None

    def _grant(self) -> None:
        """Give free turns to the keys in order."""
        while self._free:
            who = next((key for key in self._waiting if self._at_work[key] < self._per_key), None)
            if who is None:
                return
            self._start(who)

    def _start(self, who: str) -> None:
        granted = self._waiting[who].popleft()
        if not self._waiting[who]:
            del self._waiting[who]
        if not granted.done():  # else its request has just ended
            self._at_work[who] += 1
            self._free -= 1
            granted.set_result(None)

    def _end(self, who: str) -> None:
        """End a turn; the key's next one comes after those of all keys that wait."""
        self._at_work[who] -= 1
        if not self._at_work[who]:
            del self._at_work[who]
        self._free += 1
        if who in self._waiting:
            self._waiting.move_to_end(who)
        self._grant()

    def _leave(self, who: str, granted: asyncio.Future[None]) -> None:
        queue = self._waiting.get(who)
        if queue is not None and granted in queue:
            queue.remove(granted)
            if not queue:
                del self._waiting[who]
