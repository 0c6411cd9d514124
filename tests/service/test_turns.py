"""Requests take turns by key: many of one key delay another key by one request, and a long wait is
answered 503.
"""

from __future__ import annotations

import asyncio
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import pytest

from hp_tool.domain.access import Scope
from hp_tool.domain.query import Query
from hp_tool.errors import InputError, LimitError
from hp_tool.questions import schema
from hp_tool.store import SqlStore
from service import keys
from service.api import estimates
from service.app import create_app
from service.clients.retries import wait_s
from service.http.turns import Turns
from service.settings import Settings
from tests.service.processes import served, wait_for

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


def test_rankings_of_one_key_delay_another_key_by_one(
    store: SqlStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Counted in rankings, not in seconds: the machine may be busy."""
    known, begun, release = (
        estimates.answer_recommend(schema.parse_query(QUERY), top=1),
        list[str | None](),
        threading.Event(),
    )

    def ranked(query: Query, **_: Any) -> Any:
        begun.append(query.id)
        release.wait(30)
        return known

    monkeypatch.setattr(estimates, "answer_recommend", ranked)
    headers = {
        owner: {
            "Authorization": f"Bearer {keys.issue(store=store, owner=owner, scope=Scope.READ)[1]}"
        }
        for owner in ("a", "b")
    }
    with (
        served(create_app(Settings(max_queue_s=60.0), store=store)) as url,
        ThreadPoolExecutor(12) as pool,
    ):

        def ask(owner: str, number: int) -> int:
            query = QUERY | {
                "id": owner,
                "training": QUERY["training"] | {"global_batch_size": 64 * (number + 1)},
            }
            return httpx.post(
                f"{url}/v1/recommendations", json=query, headers=headers[owner], timeout=120
            ).status_code

        many = [pool.submit(ask, "a", number) for number in range(10)]
        wait_for(lambda: begun)
        few = pool.submit(ask, "b", 0)
        time.sleep(1.0)  # for the request to join the queue
        release.set()
        assert few.result(120) == 200 and {each.result(120) for each in many} == {200}
    assert begun.count("a") == 10 and begun.index("b") <= 3


def test_a_request_that_waits_too_long_is_told_when_to_come_back(
    store: SqlStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    release, begun = threading.Event(), threading.Event()

    def ranked(*_: Any, **__: Any) -> Any:
        begun.set()
        release.wait(60)
        raise InputError("ended")

    monkeypatch.setattr(estimates, "answer_recommend", ranked)
    with (
        served(create_app(Settings(max_queue_s=0.3), store=store)) as url,
        ThreadPoolExecutor(1) as pool,
    ):
        first = pool.submit(httpx.post, f"{url}/v1/recommendations", json=QUERY, timeout=120)
        begun.wait(60)
        other = httpx.post(f"{url}/v1/recommendations", json=QUERY | {"id": "another"}, timeout=60)
        estimate = httpx.post(
            f"{url}/v1/estimates",
            json=QUERY | {"parallel": {"tensor_parallel_size": 8}},
            timeout=60,
        )
        release.set()
        assert first.result(60).status_code == 422
    assert (other.status_code, other.json()["code"], other.headers["Retry-After"]) == (
        503,
        "busy",
        "1",
    )
    assert estimate.status_code == 200  # it waits for no ranking


def test_clients_wait_as_long_as_a_busy_server_says() -> None:
    busy = httpx.Response(503, headers={"Retry-After": "4"})
    ranking = httpx.Request("POST", "http://server/v1/recommendations")
    assert wait_s(ranking, busy, attempt=4) == 4.0
    assert wait_s(ranking, busy, attempt=5) is None
    assert wait_s(httpx.Request("POST", "http://server/v1/searches"), busy, attempt=1) is None
    assert wait_s(ranking, httpx.Response(503), attempt=1) == pytest.approx(0.2)
