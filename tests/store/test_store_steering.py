"""What the port promises of searches that are cancelled, paused, resumed, and of the events that
tell it.
"""

from __future__ import annotations

import pytest

from hp_tool.domain.ports import Store
from hp_tool.domain.states import SearchState
from hp_tool.errors import ConflictError
from tests.store.acting import LONG_S, QUERY, claimed, intended


def test_a_waiting_search_is_cancelled_at_once(store: Store) -> None:
    search = store.create_search(query=QUERY)
    for _ in range(2):
        cancelled = store.request_cancel(search_id=search.id)
        assert (cancelled.state, cancelled.stopped_because) == (SearchState.CANCELLED, "cancelled")
    assert store.claim_search(holder="w", lease_s=LONG_S) is None


def test_a_running_search_is_asked(store: Store) -> None:
    lease = claimed(store)
    assert store.request_cancel(search_id=lease.search_id).state is SearchState.RUNNING
    assert store.renew_lease(lease=lease, lease_s=LONG_S).requested == "cancel"
    for steer in (store.request_pause, store.resume_search):
        with pytest.raises(ConflictError):
            steer(search_id=lease.search_id)
    ended = store.finish_search(lease=lease, state=SearchState.CANCELLED)
    assert (ended.state, ended.requested) == (SearchState.CANCELLED, None)


def test_cancelling_a_waiting_search_with_open_runs_sends_a_coordinator_to_end_them(
    store: Store,
) -> None:
    lease = claimed(store)
    intended(store, lease)
    store.release_search(lease=lease, paused=True)
    assert store.request_cancel(search_id=lease.search_id).state is SearchState.QUEUED
    claim = store.claim_search(holder="w", lease_s=LONG_S)
    assert claim is not None
    assert claim[0].requested == "cancel"
    assert (
        store.release_search(lease=claim[1], paused=True).state is SearchState.QUEUED
    )  # still to be carried out


def test_pause_and_resume(store: Store) -> None:
    lease = claimed(store)
    assert store.request_pause(search_id=lease.search_id).requested == "pause"
    assert store.resume_search(search_id=lease.search_id).requested is None
    store.request_pause(search_id=lease.search_id)
    paused = store.release_search(lease=lease)
    assert (paused.state, paused.requested) == (SearchState.PAUSED, None)
    assert store.resume_search(search_id=lease.search_id).state is SearchState.QUEUED
    assert store.request_pause(search_id=lease.search_id).state is SearchState.PAUSED


def test_a_failed_search_may_be_resumed_and_an_ended_one_not_steered(store: Store) -> None:
    lease = claimed(store)
    store.finish_search(lease=lease, state=SearchState.FAILED, error={"code": "internal"})
    again = store.resume_search(search_id=lease.search_id)
    assert (again.state, again.error, again.finished_at) == (SearchState.QUEUED, None, None)
    claim = store.claim_search(holder="w", lease_s=LONG_S)
    assert claim is not None
    store.finish_search(lease=claim[1], state=SearchState.SUCCEEDED)
    for steer in (store.request_cancel, store.request_pause, store.resume_search):
        with pytest.raises(ConflictError):
            steer(search_id=lease.search_id)


def test_events_tell_the_story_without_gaps(store: Store) -> None:
    lease = claimed(store)
    intended(store, lease)
    store.append_event(lease=lease, kind="calibrated", payload={"error": 0.1})
    store.finish_search(lease=lease, state=SearchState.FAILED)
    events = store.events(search_id=lease.search_id)
    assert [event.seq for event in events] == [1, 2, 3, 4, 5]
    told = [(event.kind, event.payload.get("state")) for event in events]
    assert told == [
        ("state", "queued"),
        ("state", "running"),
        ("run", "intended"),
        ("calibrated", None),
        ("state", "failed"),
    ]
    assert store.events(search_id=lease.search_id, after=3, limit=1) == [events[3]]
    assert store.events(search_id=lease.search_id, after=5) == []
