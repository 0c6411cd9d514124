"""Limit the concurrency of expensive work, and share it fairly among keys."""

from __future__ import annotations

import asyncio
from collections import Counter, OrderedDict, deque
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from hp_tool.errors import LimitError

BUSY = "busy"
"""Error code for a request that waited too long for its turn."""


class Turns:
    """A queue per key, served in turns: many requests of one key delay another key by one request.

    Use it on one event loop only, so that no lock is needed.
    """

    def __init__(self, *, at_once: int, at_once_per_key: int, max_wait_s: float) -> None:
        self._free, self._per_key, self._max_wait_s = at_once, at_once_per_key, max_wait_s
        self._at_work: Counter[str] = Counter()
        self._waiting: OrderedDict[str, deque[asyncio.Future[None]]] = OrderedDict()

    @asynccontextmanager
    async def turn(self, key: str | None) -> AsyncIterator[None]:
        """Wait for a turn of `key` (None: the operator), and hold it until the context ends.

        Raises:
            LimitError: The wait exceeded the limit (`busy`).
        """
        owner = key or ""
        await self._wait(owner)
        try:
            yield
        finally:
            self._end(owner)

    async def _wait(self, turn_key: str) -> None:
        granted: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.setdefault(turn_key, deque()).append(granted)
        self._grant()
        try:
            async with asyncio.timeout(self._max_wait_s):
                await granted
        except BaseException as error:
            if granted.done() and not granted.cancelled():
                # The turn was granted just when the timeout expired.
                self._end(turn_key)
            else:
                self._leave(turn_key, granted)
            if not isinstance(error, TimeoutError):
                raise
            raise LimitError(
                f"The server is busy: this request waited {self._max_wait_s:g} s. Try again.",
                retry_after_s=self._max_wait_s,
                code=BUSY,
            ) from None

    def _grant(self) -> None:
        while self._free:
            next_key = next(
                (name for name in self._waiting if self._at_work[name] < self._per_key), None
            )
            if next_key is None:
                return
            self._start(next_key)

    def _start(self, turn_key: str) -> None:
        granted = self._waiting[turn_key].popleft()
        if not self._waiting[turn_key]:
            del self._waiting[turn_key]
        if not granted.done():  # If it is done, its request has just ended.
            self._at_work[turn_key] += 1
            self._free -= 1
            granted.set_result(None)

    def _end(self, turn_key: str) -> None:
        self._at_work[turn_key] -= 1
        if not self._at_work[turn_key]:
            del self._at_work[turn_key]
        self._free += 1
        if turn_key in self._waiting:
            self._waiting.move_to_end(turn_key)
        self._grant()

    def _leave(self, turn_key: str, granted: asyncio.Future[None]) -> None:
        queue = self._waiting.get(turn_key)
        if queue is not None and granted in queue:
            queue.remove(granted)
            if not queue:
                del self._waiting[turn_key]
