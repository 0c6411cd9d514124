"""Requests take turns by key: many of one key delay another key by one request, and a long wait is answered 503."""

from __future__ import annotations

import asyncio
import threading
import time
from typing import Any

import httpx
import pytest

from hp_tool.domain.access import Scope
from hp_tool.errors import LimitError
from hp_tool.queries import schema
from hp_tool.store import SqlStore
from service import keys
from service.app import create_app
from service.clients.retries import wait_s
from service.http.turns import Turns
from service.settings import Settings
from tests.service.processes import served

QUERY: dict[str, Any] = {
    "kind": "training",
    "model": "llama-3-8b",
    "cluster": {"gpu": "h100-sxm-80gb", "num_gpus": 8},
    "training": {"sequence_length": 8192, "global_batch_size": 64},
}


def test_keys_take_turns() -> None:
    order: list[str] = []

    async def work(turns: Turns, who: str) -> None:
        async with turns.turn(who):
            order.append(who)
            await asyncio.sleep(0.01)

    async def all_of_them() -> None:
        turns = Turns(at_once=1, at_once_per_key=1, max_wait_s=5.0)
        many = [asyncio.create_task(work(turns, "a")) for _ in range(10)]
        await asyncio.sleep(0.015)
        few = [asyncio.create_task(work(turns, who)) for who in "bcb"]
        await asyncio.gather(*many, *few)

    asyncio.run(all_of_them())
    assert order.index("b") <= 3 and order.index("c") <= 4
    assert [place for place, who in enumerate(order) if who == "b"][1] <= 6
    assert len(order) == 13


def test_one_key_has_no_more_than_its_share_and_a_cancelled_wait_leaves_no_trace() -> None:
    async def check() -> None:
        turns = Turns(at_once=2, at_once_per_key=1, max_wait_s=0.05)
        async with turns.turn("a"):
            with pytest.raises(LimitError) as caught:
                async with turns.turn("a"):
                    pass
            assert (caught.value.code, caught.value.retry_after_s) == ("busy", 0.05)
            async with turns.turn("b"):
                waiting = asyncio.create_task(_hold(turns, None))
                await asyncio.sleep(0.01)
                waiting.cancel()
                await asyncio.gather(waiting, return_exceptions=True)
        for who in ("a", "b", None):
            async with turns.turn(who):
                pass

    asyncio.run(check())


async def _hold(turns: Turns, who: str | None) -> None:
    async with turns.turn(who):
        await asyncio.sleep(1.0)


def test_rankings_of_one_key_do_not_delay_another_key(store: SqlStore, monkeypatch: pytest.MonkeyPatch) -> None:
    from service.api import estimates

    known = estimates.recommend_answer(schema.parse_query(QUERY), top=1)

    def slow(*_: Any, **__: Any) -> Any:
        time.sleep(0.4)
        return known

    monkeypatch.setattr(estimates, "recommend_answer", slow)
    first, second = (
        {"Authorization": f"Bearer {keys.issue(store=store, owner=owner, scope=Scope.READ)[1]}"} for owner in ("a", "b")
    )
    statuses: list[httpx.Response] = []

    def ask(number: int) -> None:
        query = QUERY | {"training": {"sequence_length": 8192, "global_batch_size": 64 * (number + 1)}}
        statuses.append(httpx.post(f"{url}/v1/recommendations", json=query, headers=first, timeout=60))

    with served(create_app(Settings(max_queue_s=2.0), store=store)) as url:
        threads = [threading.Thread(target=ask, args=(number,)) for number in range(16)]
        for thread in threads:
            thread.start()
        time.sleep(1.0)
        started = time.monotonic()
        answer = httpx.post(f"{url}/v1/recommendations", json=QUERY, headers=second, timeout=60)
        waited_s = time.monotonic() - started
        for thread in threads:
            thread.join()
    assert answer.status_code == 200 and waited_s < 1.6  # 16 requests of the other key would take 6.4 s
    busy = [each for each in statuses if each.status_code == 503]
    assert busy and all(each.status_code in (200, 503) for each in statuses)
    assert all(each.json()["code"] == "busy" and each.headers["Retry-After"] == "2" for each in busy)


def test_clients_wait_as_long_as_a_busy_server_says() -> None:
    busy = httpx.Response(503, headers={"Retry-After": "4"})
    ranking = httpx.Request("POST", "http://server/v1/recommendations")
    assert wait_s(ranking, busy, attempt=4) == 4.0
    assert wait_s(ranking, busy, attempt=5) is None
    assert wait_s(httpx.Request("POST", "http://server/v1/searches"), busy, attempt=1) is None
    assert wait_s(ranking, httpx.Response(503), attempt=1) == pytest.approx(0.2)
