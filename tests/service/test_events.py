"""The stream of a search's events over real sockets that are cut off: each event is told once,
whoever follows.
"""

from __future__ import annotations

import asyncio
import json
import logging
import socket
import threading
import time
from collections.abc import Callable, Collection
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import pytest
from starlette.concurrency import run_in_threadpool

from hp_tool.domain.access import Scope
from hp_tool.domain.measurement import Measurement
from hp_tool.domain.parallel import ParallelConfig
from hp_tool.domain.records import Head
from hp_tool.domain.states import SearchState
from hp_tool.errors import InputError, StoreError
from hp_tool.store import SqlStore
from service import keys
from service.api.watch import Watch
from service.app import create_app
from service.async_client import AsyncClient
from service.client import Client, EventStream, Lines
from service.clients.retries import ReconnectPolicy
from service.settings import Settings
from tests.service.coordinator import claim, finish, one_run
from tests.service.processes import free_port, served, wait_for

Query = dict[str, Any]
OK = Measurement(status="ok", step_s=0.4)


def read_ids(
    server: str, search: str, *, last: int | None, until: Callable[[list[int]], bool]
) -> tuple[list[int], bool]:
    """Ids that a raw connection was told after `last`, until it is cut off from here; and whether
    the end was told.
    """
    host, port = server.removeprefix("http://").split(":")
    resumed = "" if last is None else f"Last-Event-ID: {last}\r\n"
    with socket.create_connection((host, int(port)), timeout=20) as wire:
        wire.sendall(
            f"GET /v1/searches/{search}/events HTTP/1.1\r\nHost: {host}\r\n{resumed}\r\n".encode()
        )
        text, ids = "", []
        while not until(ids) and "event: end" not in text:
            text += wire.recv(256).decode()
            ids = [
                int(line.removeprefix("id: "))
                for line in text.splitlines()
                if line.startswith("id: ")
            ]
        return ids, "event: end" in text


def test_a_stream_goes_on_after_the_last_event_that_came(
    server: str, store: SqlStore, query: Query
) -> None:
    search = store.create_search(query=query).id
    lease = claim(store, search)
    one_run(store, lease, OK)
    first, _ = read_ids(server, search, last=None, until=lambda ids: len(ids) >= 2)
    one_run(store, lease, OK, ParallelConfig(tensor_parallel_size=2, sequence_parallel=True))
    second, _ = read_ids(server, search, last=first[-1], until=lambda ids: len(ids) >= 1)
    finish(store, lease)
    rest, ended = read_ids(server, search, last=second[-1], until=lambda ids: False)
    assert ended
    assert first + second + rest == [event.seq for event in store.events(search_id=search)]
    assert read_ids(server, search, last=rest[-1], until=lambda ids: False) == ([], True)


def test_a_place_in_the_stream_is_a_number_that_it_may_have(
    server: str, store: SqlStore, query: Query
) -> None:
    path = f"{server}/v1/searches/{store.create_search(query=query).id}/events"
    for place in ("x", "-1", "1.5", "\u0663".encode(), "9" * 11, str(2**31), "9" * 5000):
        answer = httpx.get(
            path,
            headers=[(b"Last-Event-ID", place if isinstance(place, bytes) else place.encode())],
        )
        assert (answer.status_code, answer.json()["field"]) == (422, "Last-Event-ID"), place
    for after in (-1, 2**31, 2**64):
        assert httpx.get(path, params={"after": after}).status_code == 422


def test_followers_miss_nothing_while_the_server_restarts(
    store: SqlStore, settings: Settings, query: Query
) -> None:
    """Away for longer than lost answers are asked for again: the events meanwhile come with the
    next connection.
    """
    port = free_port()
    url = f"http://127.0.0.1:{port}"
    seen: tuple[list[int], list[int]] = ([], [])

    def follow(search: str) -> dict[str, Any]:
        with Client(server=url) as client:
            return client.wait(search_id=search, on_event=lambda event: seen[0].append(event.seq))

    async def follow_too(search: str) -> dict[str, Any]:
        async with AsyncClient(server=url) as client:
            return await client.wait(
                search_id=search, on_event=lambda event: seen[1].append(event.seq)
            )

    search = store.create_search(query=query).id
    with ThreadPoolExecutor() as pool:
        with served(create_app(settings, store=store), port=port):
            following = [
                pool.submit(follow, search),
                pool.submit(lambda: asyncio.run(follow_too(search))),
            ]
            lease = claim(store, search)
            wait_for(lambda: all(ids and ids[-1] == 2 for ids in seen))
        one_run(store, lease, OK)
        time.sleep(1.0)
        assert all(ids == [1, 2] for ids in seen)
        with served(create_app(settings, store=store), port=port):
            finish(store, lease)
            results = [each.result(timeout=30) for each in following]
    told = [event.seq for event in store.events(search_id=search)]
    assert seen == (told, told)
    assert [result["search"]["id"] for result in results] == [search] * 2


def test_a_revoked_key_follows_no_further(store: SqlStore, query: Query) -> None:
    record, token = keys.issue(store=store, owner="ada", scope=Scope.SUBMIT)
    search = store.create_search(query=query, owner="ada").id
    with (
        served(create_app(Settings(api_key="the operator's", poll_s=0.02), store=store)) as url,
        Client(server=url, api_key=token) as client,
        Client(server=url, api_key="the operator's") as operator,
    ):
        events = client.events(search_id=search)
        assert next(events).seq == 1
        operator._http.delete(f"/v1/keys/{record.id}")
        claim(store, search)
        with pytest.raises(InputError, match="revoked"):  # what it is told as it connects again
            list(events)


@pytest.mark.parametrize("status", [None, 502, 503])
def test_patience_ends(status: int | None) -> None:
    """Nobody there, or a proxy with nobody behind it."""

    def answer(request: httpx.Request) -> httpx.Response:
        if status is None:
            raise httpx.ConnectError("refused")
        return httpx.Response(status, text="<html>Bad gateway</html>")

    with (
        Client(server="http://x", transport=httpx.MockTransport(answer)) as client,
        pytest.raises(StoreError),
    ):
        client.wait(search_id="s", patience_s=0.1)


def test_an_absence_is_counted_from_when_it_began() -> None:
    now, gone = 0.0, StoreError("gone")
    absence = ReconnectPolicy(patience_s=10.0, clock=lambda: now)
    assert absence.wait_s(gone) == 0.2
    now = 3.0
    assert absence.wait_s(gone) == 3.0
    now = 9.0
    assert absence.wait_s(gone) == 5.0
    absence.connected()
    now = 100.0
    assert absence.wait_s(gone) == 0.2
    now = 110.0
    with pytest.raises(StoreError, match="gone"):
        absence.wait_s(gone)


def test_lines_end_where_lines_end(server: str, query: Query) -> None:
    """JSON may hold what Unicode calls a line's end."""
    name = "a\u2028b\x85c"
    with Client(server=server) as client:
        (answer,) = client.batch(
            lines=[json.dumps(query | {"id": name}, ensure_ascii=False).encode()]
        )
        assert json.loads(answer)["id"] == name
    text = (
        'data: {"seq": 1, "kind": "state", "payload": {"x": "é\u2028"}, "at": '
        '"2026-01-01T00:00:00Z"}\nid: 1\n\nevent: end\n'
    )
    stream = EventStream(search_id="s", after=0)
    events = [event for byte in text.encode() for event in stream.feed(bytes([byte]))]
    assert [event.payload for event in events] == [{"x": "é\u2028"}]
    assert stream.ended
    assert Lines().feed(b"a") == []


def test_however_many_wait_the_database_is_looked_at_once(
    store: SqlStore, query: Query, monkeypatch: pytest.MonkeyPatch
) -> None:
    search = store.create_search(query=query).id
    seen, looked = Head(SearchState.QUEUED, 1), []

    def heads(search_ids: Collection[str]) -> dict[str, Head]:
        looked.append(search_ids)
        return store.heads(search_ids)

    async def hundreds() -> None:
        watch = Watch(heads=heads, poll_s=0.02)
        async with asyncio.TaskGroup() as group:
            for _ in range(300):
                group.create_task(watch.news(search, seen=seen, limit_s=30))
            idle = group.create_task(
                watch.news(search, seen=Head(SearchState.QUEUED, 9), limit_s=0.1)
            )
            await idle  # no news: its time is up
            assert 1 <= len(looked) <= 6
            assert set(map(len, looked)) == {1}
            await run_in_threadpool(claim, store, search)
        await watch.news(
            "none", seen=seen, limit_s=30
        )  # who waits for a search that is gone is told at once
        assert watch._waiting == {}

    asyncio.run(hundreds())


def test_who_waits_is_told_that_the_database_is_away() -> None:
    def heads(search_ids: Collection[str]) -> dict[str, Head]:
        raise StoreError("away")

    async def wait() -> None:
        await Watch(heads=heads, poll_s=0.01).news(
            "s", seen=Head(SearchState.QUEUED, 1), limit_s=30
        )

    with pytest.raises(StoreError, match="away"):
        asyncio.run(wait())


def test_who_joins_during_a_look_is_not_woken_by_it(store: SqlStore, query: Query) -> None:
    search = store.create_search(query=query).id
    began, go_on = threading.Event(), threading.Event()

    def heads(search_ids: Collection[str]) -> dict[str, Head]:
        began.set()
        assert go_on.wait(30)
        return store.heads(search_ids)

    async def join() -> None:
        watch = Watch(heads=heads, poll_s=0.01)
        first = asyncio.create_task(
            watch.news("none", seen=Head(SearchState.QUEUED, 1), limit_s=30)
        )
        await run_in_threadpool(began.wait, 30)
        joined = asyncio.create_task(
            watch.news(search, seen=Head(SearchState.QUEUED, 1), limit_s=30)
        )
        await asyncio.sleep(0)
        go_on.set()
        await first
        assert not (await asyncio.wait((joined,), timeout=0.05))[0]
        await run_in_threadpool(claim, store, search)
        await joined

    asyncio.run(join())


@pytest.mark.parametrize("ends", ["the reader leaves", "the database goes away"])
def test_a_stream_that_ends_early_leaves_nothing_in_the_log(
    store: SqlStore,
    settings: Settings,
    query: Query,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
    ends: str,
) -> None:
    app = create_app(settings, store=store)
    path = f"/v1/searches/{store.create_search(query=query).id}/events"

    def away(search_ids: Collection[str]) -> dict[str, Head]:
        raise StoreError("away")

    with (
        served(app) as url,
        socket.create_connection(("127.0.0.1", int(url.rpartition(":")[2])), timeout=20) as wire,
    ):
        wire.sendall(f"GET {path} HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n".encode())
        wait_for(lambda: app.state.watch._waiting)
        if ends == "the reader leaves":
            wire.close()
        else:
            monkeypatch.setattr(app.state.watch, "_heads", away)
        wait_for(lambda: not app.state.watch._waiting)
    assert [
        record.message for record in caplog.records if record.levelno >= logging.WARNING
    ] == []  # the server has ended
