"""A worker and a database that is away for a while."""

from __future__ import annotations

import threading
from typing import Any

from hp_tool.domain.records import Lease, SearchRecord
from hp_tool.domain.states import SearchState
from hp_tool.errors import StoreError
from hp_tool.store import SqlStore
from service.worker import Worker
from tests.service.processes import wait_for


def test_a_worker_that_outlives_the_database_hands_its_search_back(
    store: SqlStore, query: dict[str, Any], monkeypatch: Any
) -> None:
    search = store.create_search(query=query).id
    away, stopping = iter([True, True]), threading.Event()
    release, claims = store.release_search, []

    def released(*, lease: Lease, paused: bool = False) -> SearchRecord:
        if next(away, False):
            raise StoreError("the database does not answer")
        stopping.set()
        return release(lease=lease, paused=paused)

    def interrupted(*, lease: Lease, **_: Any) -> None:
        claims.append(lease.token)
        raise StoreError("the database does not answer")

    monkeypatch.setattr(store, "release_search", released)
    monkeypatch.setattr("hp_tool.loop.tuning.run_search", interrupted)
    worker = threading.Thread(target=Worker(store=store, holder="test", stopping=stopping).run)
    worker.start()
    wait_for(lambda: not worker.is_alive())
    assert claims == [1]
    assert (
        store.get_search(search_id=search).state is SearchState.QUEUED
    )  # though its lease lasts for half a minute more
