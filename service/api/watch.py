"""Wait for search events, with one database poll for all waiting requests."""

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
    """Wakes requests that wait for a change of their search.

    Each process has one instance, which is used on its event loop only.
    """

    def __init__(
        self, *, heads: Callable[[Collection[str]], Mapping[str, Head]], poll_s: float
    ) -> None:
        self._heads = heads
        self._poll_s = poll_s
        self._waiting: dict[str, set[_Waiter]] = {}
        self._poller: asyncio.Task[None] | None = None

    async def news(self, search_id: str, *, seen: Head, limit_s: float) -> None:
        """Wait up to `limit_s` seconds for a new event, a new state, or the search's deletion.

        Raises:
            StoreError: The database does not respond.
        """
        waiter = _Waiter(search_id, seen, asyncio.get_running_loop().create_future())
        self._waiting.setdefault(search_id, set()).add(waiter)
        if self._poller is None or self._poller.done():
            self._poller = asyncio.create_task(self._poll())
        try:
            async with asyncio.timeout(limit_s):
                await waiter.news
        except TimeoutError:
            return
        finally:
            self._waiting[search_id].discard(waiter)
            if not self._waiting[search_id]:
                del self._waiting[search_id]

    async def _poll(self) -> None:
        while self._waiting:
            await asyncio.sleep(self._poll_s)
            # Waiters that join later wait for the next poll.
            waiters = [waiter for group in self._waiting.values() for waiter in group]
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
    return (waiter for waiter in waiters if not waiter.news.done())
