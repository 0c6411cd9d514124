"""Webhooks in the store: due when the search has ended, tried a bounded number of times, never
twice at once.
"""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta

import pytest
import sqlalchemy as sa

from hp_tool.domain.states import SearchState
from hp_tool.domain.webhooks import ATTEMPTS, FIRST_WAIT_S, WebhookRecord, WebhookState, wait_s
from hp_tool.errors import ConflictError, InputError, NotFoundError
from hp_tool.store import SqlStore, tables

URL = "https://ci.example/hook"


def ended(store: SqlStore, state: SearchState = SearchState.SUCCEEDED, **given: str) -> str:
    search = store.create_search(query={"id": "q"}, webhook=URL, **given)
    claimed = store.claim_search(holder="test", lease_s=60, search_id=search.id)
    assert claimed is not None
    store.finish_search(lease=claimed[1], state=state)
    return search.id


def due_now(store: SqlStore, search_id: str) -> None:
    """As if the wait for the next attempt were over."""
    hook = tables.webhooks
    earlier = store.get_webhook(search_id=search_id).next_attempt_at - timedelta(hours=2)
    with store._writing() as connection:
        connection.execute(
            sa.update(hook).where(hook.c.search_id == search_id).values(next_attempt_at=earlier)
        )


def claim(store: SqlStore) -> WebhookRecord:
    claimed = store.claim_webhook()
    assert claimed is not None
    assert claimed[1].state.ended
    return claimed[0]


def test_an_end_is_told_once_and_not_before(store: SqlStore) -> None:
    search = store.create_search(query={}, webhook=URL)
    assert store.claim_webhook() is None
    store.request_cancel(search_id=search.id)
    webhook = claim(store)
    assert (webhook.search_id, webhook.url, webhook.attempts, webhook.state) == (
        search.id,
        URL,
        1,
        "pending",
    )
    assert store.claim_webhook() is None  # nobody else while it is under way
    store.settle_webhook(webhook=webhook, error=None)
    told = store.get_webhook(search_id=search.id)
    assert (told.state, told.last_error, told.delivered_at is None) == (
        WebhookState.DELIVERED,
        None,
        False,
    )
    due_now(store, search.id)
    assert store.claim_webhook() is None
    assert URL not in repr(told)
    with pytest.raises(NotFoundError):
        store.get_webhook(search_id=store.create_search(query={}).id)


def test_attempts_are_bounded_and_their_waits_grow(store: SqlStore) -> None:
    search_id = ended(store)
    for attempt in range(1, ATTEMPTS + 1):
        webhook = claim(store)
        assert webhook.attempts == attempt
        store.settle_webhook(webhook=webhook, error=f"answered 50{attempt}")
        left = store.get_webhook(search_id=search_id)
        assert left.last_error == f"answered 50{attempt}"
        assert left.state == (WebhookState.FAILED if attempt == ATTEMPTS else WebhookState.PENDING)
        due_now(store, search_id)
    assert store.claim_webhook() is None
    waits = [wait_s(attempt=attempt) for attempt in range(1, ATTEMPTS)]
    assert waits == sorted(waits) and waits[0] == FIRST_WAIT_S and sum(waits) < 4 * 3600


def test_a_worker_that_was_lost_is_followed_and_comes_too_late(store: SqlStore) -> None:
    search_id = ended(store)
    late = claim(store)
    due_now(store, search_id)
    second = claim(store)
    assert second.attempts == 2
    store.settle_webhook(webhook=late, error=None)
    assert store.get_webhook(search_id=search_id).state is WebhookState.PENDING
    for _ in range(ATTEMPTS - 2):
        due_now(store, search_id)
        claim(store)
    due_now(store, search_id)
    assert store.claim_webhook() is None
    given_up = store.get_webhook(search_id=search_id)
    assert (given_up.state, given_up.attempts) == (WebhookState.FAILED, ATTEMPTS)
    assert given_up.last_error is not None and "died" in given_up.last_error


def test_a_failed_search_that_goes_on_ends_and_is_told_again(store: SqlStore) -> None:
    search_id = ended(store, SearchState.FAILED)
    store.settle_webhook(webhook=claim(store), error=None)
    store.resume_search(search_id=search_id)
    assert store.claim_webhook() is None
    store.request_cancel(search_id=search_id)
    assert claim(store).attempts == 1


def test_an_idempotency_key_holds_for_the_webhook_too(store: SqlStore) -> None:
    first = store.create_search(query={}, webhook=URL, idempotency_key="k")
    assert store.create_search(query={}, webhook=URL, idempotency_key="k").id == first.id
    with pytest.raises(ConflictError):
        store.create_search(query={}, webhook=URL + "/other", idempotency_key="k")
    with pytest.raises(InputError):
        store.create_search(query={}, webhook=URL + "x" * 2000)


def test_workers_share_the_deliveries(store: SqlStore) -> None:
    searches = {ended(store) for _ in range(6)}
    with ThreadPoolExecutor(3) as pool:
        claims = [
            future.result() for future in [pool.submit(store.claim_webhook) for _ in range(30)]
        ]
    got = [found[0].search_id for found in claims if found is not None]
    assert len(got) == len(set(got))
    while (left := store.claim_webhook()) is not None:  # one that met a locked row looked away
        got.append(left[0].search_id)
    assert sorted(got) == sorted(searches)
