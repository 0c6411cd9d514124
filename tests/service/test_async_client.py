"""The asynchronous client, what both clients do about lost answers, and a training that reports
itself; over a socket.
"""

from __future__ import annotations

import asyncio
import importlib.util
import threading
from pathlib import Path
from typing import Any

import httpx
import pytest

from hp_tool.domain.measurement import Measurement
from hp_tool.domain.ports import Store
from hp_tool.errors import NotFoundError, StoreError
from service.async_client import AsyncClient
from service.client import Client
from service.clients.retries import MAX_LOST_ATTEMPTS, AsyncRetryTransport, RetryTransport
from tests.service.coordinator import claim, finish, one_run

Query = dict[str, Any]
EXAMPLE = Path(__file__).parents[2] / "examples" / "report_from_training.py"


def test_the_twin_does_what_the_client_does(server: str, store: Store, query: Query) -> None:
    async def scenario() -> None:
        async with AsyncClient(server=server) as client:
            with Client(server=server) as twin:
                assert await client.estimate(query=query) == twin.estimate(query=query)
                many = await asyncio.gather(
                    *(client.recommend(query=query, top=1) for _ in range(4))
                )
                rows = twin.recommend(query=query, top=1)["recommendations"]
                assert [answer["recommendations"] for answer in many] == [rows] * 4
            with pytest.raises(NotFoundError):
                await client.search(search_id="nope")
            with pytest.raises(NotFoundError):
                [event async for event in client.events(search_id="nope")]
            search = (await client.submit_search(query=query)).id
            changed = await client.change_budget(search_id=search, budget_runs=2)
            assert changed.query["search"]["budget_runs"] == 2
            assert await client.result(search_id=search) is None
            copy = (await client.clone(search_id=search)).id
            assert (copy != search, (await client.cancel(search_id=copy)).state) == (
                True,
                "cancelled",
            )
            lease = claim(store, search)

            def work() -> None:
                one_run(store, lease, Measurement(status="ok", step_s=0.4))
                finish(store, lease)

            threading.Timer(0.3, work).start()
            seen: list[int] = []
            result = await client.wait(
                search_id=search, on_event=lambda event: seen.append(event.seq)
            )
            assert result["recommendations"][0]["rank"] == 1
            assert seen == list(range(1, len(seen) + 1))
            assert [trial.number for trial in (await client.trials(search_id=search)).trials] == [0]
            assert [view.id for view in (await client.searches(state="succeeded")).items] == [
                search
            ]

    asyncio.run(scenario())


def answering(failures: int) -> tuple[list[httpx.Request], Any]:
    """A server whose first answers get lost, and the requests that reached it."""
    seen: list[httpx.Request] = []

    def answer(request: httpx.Request) -> httpx.Response:
        seen.append(request)
        if len(seen) <= failures:
            if len(seen) % 2:
                raise httpx.ReadError("gone")
            return httpx.Response(503, json={"detail": "restarting", "code": "store_unavailable"})
        return httpx.Response(200, json={})

    return seen, answer


@pytest.mark.parametrize(
    ("method", "path", "headers", "again"),
    [
        ("GET", "/v1/searches", {}, True),
        ("POST", "/v1/estimates", {}, True),
        ("POST", "/v1/searches", {"Idempotency-Key": "k"}, True),
        ("POST", "/v1/searches/x/pause", {}, False),
    ],
)
def test_a_lost_answer_is_asked_for_again_where_that_does_no_harm(
    method: str, path: str, headers: dict[str, str], again: bool
) -> None:
    waited: list[float] = []
    seen, answer = answering(2)
    with httpx.Client(
        transport=RetryTransport(httpx.MockTransport(answer), sleep=waited.append),
        base_url="http://x",
    ) as http:
        if again:
            assert http.request(method, path, headers=headers).status_code == 200
            assert (len(seen), waited) == (3, [0.2, 0.4])
            assert {request.headers.get("Idempotency-Key") for request in seen} == {
                headers.get("Idempotency-Key")
            }
        else:
            with pytest.raises(httpx.ReadError):
                http.request(method, path, headers=headers)
            assert (len(seen), waited) == (1, [])


def test_patience_ends_in_a_loop_too() -> None:
    seen, answer = answering(10)

    async def sleep(seconds: float) -> None:
        pass

    async def scenario() -> None:
        transport = AsyncRetryTransport(httpx.MockTransport(answer), sleep=sleep)
        async with AsyncClient(server="http://x", transport=transport) as client:
            with pytest.raises(StoreError):
                await client.estimate(query={})

    asyncio.run(scenario())
    assert (
        len(seen) == MAX_LOST_ATTEMPTS**2
    )  # the client waits around the transport that waits here


def timing_out() -> tuple[list[httpx.Request], Any]:
    """A server that answers no request in time."""
    seen: list[httpx.Request] = []

    def answer(request: httpx.Request) -> httpx.Response:
        seen.append(request)
        raise httpx.ReadTimeout(f"timeout {len(seen)}")

    return seen, answer


def test_the_last_timeout_is_raised_when_no_attempt_is_left() -> None:
    seen, answer = timing_out()
    transport = RetryTransport(httpx.MockTransport(answer), sleep=lambda seconds: None)
    last = pytest.raises(httpx.ReadTimeout, match=f"^timeout {MAX_LOST_ATTEMPTS}$")
    with httpx.Client(transport=transport) as http, last:
        http.get("http://x/v1/searches")
    assert len(seen) == MAX_LOST_ATTEMPTS


def test_the_last_timeout_is_raised_in_an_event_loop() -> None:
    seen, answer = timing_out()

    async def sleep(seconds: float) -> None:
        pass

    async def scenario() -> None:
        transport = AsyncRetryTransport(httpx.MockTransport(answer), sleep=sleep)
        async with httpx.AsyncClient(transport=transport) as http:
            with pytest.raises(httpx.ReadTimeout, match=f"^timeout {MAX_LOST_ATTEMPTS}$"):
                await http.get("http://x/v1/searches")

    asyncio.run(scenario())
    assert len(seen) == MAX_LOST_ATTEMPTS


def test_a_training_hears_when_it_strays(server: str, store: Store) -> None:
    spec = importlib.util.spec_from_file_location("report_from_training", EXAMPLE)
    assert spec is not None
    assert spec.loader is not None
    example = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(example)
    (told,) = example.train(server=server, steps=8, slow_down_s=0.2)
    assert "slower than predicted by" in told
    (stored,) = store.measurements(model="toy").items
    assert stored.source == "reported"
    assert stored.measurement.step_s is not None
    assert stored.measurement.step_s > 0.2
    assert stored.predicted["step_s"] < stored.measurement.step_s


def test_only_a_clone_needs_a_key_to_be_sent_again() -> None:
    """A pause that is repeated pauses once; two clones would be two searches."""
    keys: dict[str, str | None] = {}

    def answer(request: httpx.Request) -> httpx.Response:
        keys[request.url.path.rpartition("/")[2]] = request.headers.get("Idempotency-Key")
        return httpx.Response(404, json={"code": "not_found", "detail": "no such search"})

    with Client(server="http://x", transport=httpx.MockTransport(answer)) as client:
        for action in (client.clone, client.pause):
            with pytest.raises(NotFoundError):
                action(search_id="s")
    assert keys["pause"] is None and keys["clone"]
