"""Watched jobs in the store: changed under a lock, told by webhook until the newest event was
taken.
"""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from typing import Any

import pytest
import sqlalchemy as sa

from hp_tool.domain.watch_records import WatchChange, WatchRecord
from hp_tool.domain.webhooks import ATTEMPTS, WebhookState
from hp_tool.errors import ConflictError, NotFoundError
from hp_tool.store import SqlStore, tables

URL = "https://ci.example/hook"


def new(store: SqlStore, **values: Any) -> WatchRecord:
    return store.create_watch(**{"name": "job", "query": None, "expected": None, **values})


def change(
    store: SqlStore,
    watch: WatchRecord,
    *,
    source: str = "s",
    message: Any = None,
    state: Any = None,
) -> WatchRecord:
    made = WatchChange(state=state, source={"rank": 0}, status="as_expected", message=message)
    return store.change_watch(watch_id=watch.id, source=source, change=lambda *_: made)


def due_now(store: SqlStore, watch: WatchRecord) -> None:
    """As if the wait for the next attempt were over."""
    earlier = store.get_watch(watch_id=watch.id).created_at - timedelta(hours=2)
    with store._writing() as connection:
        update = sa.update(tables.watches).where(tables.watches.c.id == watch.id)
        connection.execute(update.values(next_attempt_at=earlier))


def test_a_key_that_comes_again_answers_the_same_job(store: SqlStore) -> None:
    watch = new(store, idempotency_key="k", owner="ada")
    assert new(store, idempotency_key="k", owner="ada") == watch
    assert new(store, idempotency_key="k", owner="bob").id != watch.id
    with pytest.raises(ConflictError):
        new(store, idempotency_key="k", owner="ada", name="another")


def test_changes_of_many_processes_take_turns(store: SqlStore) -> None:
    watch = new(store)

    def count(number: int) -> None:
        def more(record: WatchRecord, source: Any, others: Any) -> WatchChange:
            steps = (record.state or {"steps": 0})["steps"] + 1
            return WatchChange(
                state={"steps": steps},
                source={"seen": (source or {"seen": 0})["seen"] + 1},
                status="learning",
            )

        store.change_watch(watch_id=watch.id, source=f"s{number % 3}", change=more)

    with ThreadPoolExecutor(4) as pool:
        list(pool.map(count, range(24)))
    assert store.get_watch(watch_id=watch.id).state == {"steps": 24}
    assert [each.state for each in store.watch_sources(watch_id=watch.id)] == [{"seen": 8}] * 3


def test_lists_are_by_owner_and_deleting_forgets_the_processes(store: SqlStore) -> None:
    mine, other = new(store, owner="ada"), new(store, owner="bob")
    change(store, mine)
    assert [each.id for each in store.list_watches(owner="ada").items] == [mine.id]
    assert [each.id for each in store.list_watches().items] == [other.id, mine.id]
    store.delete_watch(watch_id=mine.id)
    assert list(store.watch_sources(watch_id=mine.id)) == []
    for ask in (store.get_watch, store.delete_watch):
        with pytest.raises(NotFoundError):
            ask(watch_id=mine.id)


def test_an_event_is_told_once_and_the_newest_takes_the_place_of_one_that_was_not(
    store: SqlStore,
) -> None:
    watch = new(store, webhook=URL, owner="ada")
    change(store, watch)
    assert store.claim_watch_event() is None
    change(store, watch, message={"status": "slower_than_it_was"})
    assert store.claim_watch_event(except_of=["ada"]) is None
    claim = store.claim_watch_event()
    assert claim is not None
    assert (claim.event, claim.attempts, claim.message) == (1, 1, {"status": "slower_than_it_was"})
    assert store.claim_watch_event() is None  # nobody else while it is under way
    change(store, watch, message={"status": "as_expected"})
    store.settle_watch_event(watch=claim, error=None)  # of an event that has a successor
    again = store.claim_watch_event()
    assert again is not None
    assert (again.event, again.attempts, again.message) == (2, 1, {"status": "as_expected"})
    store.settle_watch_event(watch=again, error=None)
    stored = store.get_watch(watch_id=watch.id)
    assert stored.webhook_state is WebhookState.DELIVERED
    assert URL not in repr(stored)
    due_now(store, watch)
    assert store.claim_watch_event() is None


def test_attempts_end(store: SqlStore) -> None:
    watch = new(store, webhook=URL)
    change(store, watch, message={})
    for attempt in range(1, ATTEMPTS + 1):
        due_now(store, watch)
        claim = store.claim_watch_event()
        assert claim is not None
        assert claim.attempts == attempt
        store.settle_watch_event(watch=claim, error="answered 503")
    stored = store.get_watch(watch_id=watch.id)
    assert (stored.webhook_state, stored.last_error) == (WebhookState.FAILED, "answered 503")
    due_now(store, watch)
    assert store.claim_watch_event() is None
