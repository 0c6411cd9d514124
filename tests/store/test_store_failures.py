"""Searches that fail: what they hold, how they are steered, and when the store gives them up."""

from __future__ import annotations

import time
from typing import Any

import pytest

from hp_tool.domain.ports import Store
from hp_tool.domain.records import Lease, OpenRunsLimit
from hp_tool.domain.states import RunState, SearchState
from hp_tool.errors import LimitError
from hp_tool.store.coordination import MAX_LOST_CLAIMS
from tests.store.acting import LONG_S, SHORT_S, claimed, intended


def taken(store: Store, *, lease_s: float = SHORT_S) -> Lease | None:
    """What the next worker gets once the one before has fallen silent."""
    time.sleep(2 * SHORT_S)
    claim = store.claim_search(holder="next", lease_s=lease_s)
    return claim and claim[1]


def lost(store: Store, *, times: int) -> Lease:
    """A search that so many workers in a row were lost over, with the lease of the one after."""
    lease: Lease | None = claimed(store, lease_s=SHORT_S)
    for _ in range(times):
        lease = taken(store)
    assert lease is not None
    return lease


def test_a_search_that_costs_every_worker_its_life_is_given_up(store: Store) -> None:
    lease = lost(store, times=MAX_LOST_CLAIMS - 1)
    other = store.create_search(query={"cluster": "another"}, owner="bob")
    claim = store.claim_search(holder="w", lease_s=LONG_S)
    assert claim is not None
    assert claim[0].id == other.id
    assert taken(store) is None
    failed = store.get_search(search_id=lease.search_id)
    assert (failed.state, failed.stopped_because) == (SearchState.FAILED, "worker_lost_repeatedly")
    assert failed.error is not None
    assert failed.error["message"].startswith(f"{MAX_LOST_CLAIMS} workers in a row died")
    store.resume_search(search_id=failed.id)
    assert taken(store) is not None
    assert taken(store) is not None  # it begins anew


def test_a_search_that_gets_on_or_is_handed_over_is_not_given_up(store: Store) -> None:
    lease = lost(store, times=MAX_LOST_CLAIMS - 1)
    run = intended(store, lease)
    for _ in range(MAX_LOST_CLAIMS - 1):
        lease = taken(store)
        assert lease is not None
    store.mark_submitted(lease=lease, run_id=run.id, handle="1")
    for _ in range(MAX_LOST_CLAIMS - 1):
        lease = taken(store)
        assert lease is not None
    store.release_search(lease=lease)
    for _ in range(MAX_LOST_CLAIMS):
        lease = taken(store)
        assert lease is not None


def test_whoever_asks_for_a_search_by_its_id_gets_it(store: Store) -> None:
    lease = lost(store, times=MAX_LOST_CLAIMS - 1)
    for _ in range(2):
        time.sleep(2 * SHORT_S)
        assert (
            store.claim_search(holder="me", lease_s=SHORT_S, search_id=lease.search_id) is not None
        )


def test_a_search_given_up_with_a_run_open_is_cancelled_by_the_next_worker(store: Store) -> None:
    lease = lost(store, times=0)
    run = intended(store, lease)
    for _ in range(MAX_LOST_CLAIMS):
        again = taken(store)
    assert again is None
    assert store.request_cancel(search_id=lease.search_id).state is SearchState.QUEUED
    claim = store.claim_search(holder="w", lease_s=LONG_S)
    assert claim is not None
    assert (claim[0].requested, claim[0].lost_claims) == ("cancel", MAX_LOST_CLAIMS - 1)
    store.abandon_run(lease=claim[1], run_id=run.id, cause="cancelled")
    assert (
        store.finish_search(lease=claim[1], state=SearchState.CANCELLED).state
        is SearchState.CANCELLED
    )


def test_a_failed_search_without_open_runs_is_cancelled_at_once(store: Store) -> None:
    lease = claimed(store)
    store.finish_search(
        lease=lease,
        state=SearchState.FAILED,
        stopped_because="internal",
        error={"code": "internal"},
    )
    cancelled = store.request_cancel(search_id=lease.search_id)
    assert (cancelled.state, cancelled.stopped_because, cancelled.error) == (
        SearchState.CANCELLED,
        "cancelled",
        None,
    )
    assert cancelled.finished_at is not None


def test_only_searches_that_have_not_ended_hold_slots(store: Store) -> None:
    limit = OpenRunsLimit(cluster="narrow", runs=1)
    for _ in range(2):
        store.create_search(query={"cluster": "narrow"})
    first, second = (store.claim_search(holder="w", lease_s=LONG_S) for _ in range(2))
    assert first is not None
    assert second is not None
    run = intended(store, first[1])
    more: dict[str, Any] = {
        "lease": second[1],
        "parallel": run.parallel,
        "fidelity": run.fidelity,
        "predicted": {},
    }
    with pytest.raises(LimitError):
        store.intend_run(**more, limit=limit)
    store.finish_search(lease=first[1], state=SearchState.FAILED)
    assert store.count_open_runs(cluster="narrow") == 0
    assert store.intend_run(**more, limit=limit).state is RunState.INTENDED
