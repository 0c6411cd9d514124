"""Waiting for news of searches: one look at the database at a time, for however many streams and
requests wait.
"""

import asyncio
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass

from starlette.concurrency import run_in_threadpool

from hp_tool.domain.records import Head


@dataclass(frozen=True, slots=True)
class _Waiter:
    search_id: str
    seen: Head
    news: asyncio.Future[None]


class Watch:
    """Wakes those who wait for a search. One per process, used only on its event loop."""

    def __init__(
        self, *, heads: Callable[[Collection[str]], Mapping[str, Head]], poll_s: float
    ) -> None:
        self._heads = heads
        self._poll_s = poll_s
        self._waiting: dict[str, set[_Waiter]] = {}
        self._looking: asyncio.Task[None] | None = None

    async def news(self, search_id: str, *, seen: Head, limit_s: float) -> None:
        """Return once the search has an event after those seen, or another state, or is gone; at
        the latest after `limit_s`.

        Raises StoreError where the database does not answer.
        """
        waiter = _Waiter(search_id, seen, asyncio.get_running_loop().create_future())
        self._waiting.setdefault(search_id, set()).add(waiter)
        if self._looking is None or self._looking.done():
            self._looking = asyncio.create_task(self._look())
        try:
            async with asyncio.timeout(limit_s):
                await waiter.news
        except TimeoutError:
            return
        finally:
            self._waiting[search_id].discard(waiter)
            if not self._waiting[search_id]:
                del self._waiting[search_id]

    async def _look(self) -> None:
        while self._waiting:
            await asyncio.sleep(self._poll_s)
            waiters = [
                each for group in self._waiting.values() for each in group
            ]  # who joins later waits for the next look
            try:
                heads = await run_in_threadpool(self._heads, tuple(self._waiting))
            except Exception as error:
                for waiter in _still_waiting(waiters):
                    waiter.news.set_exception(error)
                continue
            for waiter in _still_waiting(waiters):
                head = heads.get(waiter.search_id)
                if head is None or head.state != waiter.seen.state or head.seq > waiter.seen.seq:
                    waiter.news.set_result(None)


def _still_waiting(waiters: Iterable[_Waiter]) -> Iterator[_Waiter]:
    return (each for each in waiters if not each.news.done())
