"""What the port promises to coordinators: one at a time holds a search, and only that one
writes.
"""

from __future__ import annotations

import time

import pytest

from hp_tool.domain.parallel import ParallelConfig
from hp_tool.domain.ports import Store
from hp_tool.domain.states import SearchState
from hp_tool.errors import ConflictError, InputError
from tests.store.acting import LONG_S, QUERY, SHORT_S, NewMeasurementFactory, claimed, intended


def test_claims_go_by_priority_then_age(store: Store) -> None:
    first, _, urgent = (store.create_search(query=QUERY, priority=p).id for p in (0, 0, 5))
    order = [store.claim_search(holder="w", lease_s=LONG_S) for _ in range(2)]
    assert [claim[0].id for claim in order if claim] == [urgent, first]


def test_nothing_to_claim(store: Store) -> None:
    assert store.claim_search(holder="w", lease_s=LONG_S) is None
    claimed(store)
    store.create_search(query=QUERY, paused=True)
    assert store.claim_search(holder="w", lease_s=LONG_S) is None


def test_a_paused_search_is_taken_only_by_its_id(store: Store) -> None:
    search = store.create_search(query=QUERY, paused=True)
    claim = store.claim_search(holder="me", lease_s=LONG_S, search_id=search.id)
    assert claim is not None
    assert (claim[0].state, claim[0].lease, claim[1].token) == (SearchState.RUNNING, claim[1], 1)
    assert store.claim_search(holder="other", lease_s=LONG_S, search_id=search.id) is None


def test_an_expired_lease_is_taken_over_and_its_late_holder_changes_nothing(
    store: Store, new_measurement: NewMeasurementFactory
) -> None:
    late = claimed(store, lease_s=SHORT_S)
    run = intended(store, late)
    time.sleep(2 * SHORT_S)
    claim = store.claim_search(holder="next", lease_s=LONG_S)
    assert claim is not None
    search, lease = claim
    assert (search.id, lease.token) == (late.search_id, late.token + 1)
    before = (
        store.get_search(search_id=search.id),
        store.runs(search_id=search.id),
        store.events(search_id=search.id),
    )
    writes = [
        lambda: store.renew_lease(lease=late, lease_s=LONG_S),
        lambda: store.release_search(lease=late),
        lambda: store.finish_search(lease=late, state=SearchState.FAILED),
        lambda: store.set_progress(lease=late, progress={"done": 1}),
        lambda: store.append_event(lease=late, kind="log", payload={}),
        lambda: intended(store, late, ParallelConfig()),
        lambda: store.mark_submitted(lease=late, run_id=run.id, handle="7"),
        lambda: store.abandon_run(lease=late, run_id=run.id, cause="late"),
        lambda: store.finish_run(
            lease=late, run_id=run.id, measurement=new_measurement(), gpu_seconds=1.0
        ),
    ]
    for write in writes:
        with pytest.raises(ConflictError) as caught:
            write()
        assert caught.value.code == "lease_lost"
    after = (
        store.get_search(search_id=search.id),
        store.runs(search_id=search.id),
        store.events(search_id=search.id),
    )
    assert after == before
    assert store.measurements().items == ()


def test_an_expired_lease_that_nobody_took_still_writes(store: Store) -> None:
    lease = claimed(store, lease_s=SHORT_S)
    time.sleep(2 * SHORT_S)
    store.set_progress(lease=lease, progress={"done": 1})
    renewed = store.renew_lease(lease=lease, lease_s=LONG_S)
    assert renewed.progress == {"done": 1}
    assert renewed.lease is not None
    assert renewed.lease.token == lease.token
    assert store.claim_search(holder="w", lease_s=LONG_S) is None


def test_a_released_search_waits_for_the_next_with_its_first_start_kept(store: Store) -> None:
    lease = claimed(store)
    started = store.get_search(search_id=lease.search_id).started_at
    assert store.release_search(lease=lease).state is SearchState.QUEUED
    with pytest.raises(ConflictError):
        store.renew_lease(lease=lease, lease_s=LONG_S)
    claim = store.claim_search(holder="next", lease_s=LONG_S)
    assert claim is not None
    assert (claim[1].token, claim[0].started_at) == (2, started)


def test_finishing_stores_the_outcome_and_ends_the_lease(store: Store) -> None:
    lease = claimed(store)
    ended = store.finish_search(
        lease=lease, state=SearchState.FAILED, stopped_because="error", error={"code": "internal"}
    )
    assert (ended.state, ended.stopped_because, ended.error, ended.lease) == (
        "failed",
        "error",
        {"code": "internal"},
        None,
    )
    assert ended.finished_at is not None
    with pytest.raises(ConflictError):
        store.finish_search(lease=lease, state=SearchState.SUCCEEDED)


def test_a_search_ends_only_in_a_final_state(store: Store) -> None:
    with pytest.raises(InputError):
        store.finish_search(lease=claimed(store), state=SearchState.PAUSED)


def test_success_leaves_no_open_run_behind(store: Store) -> None:
    lease = claimed(store)
    run = intended(store, lease)
    for state in (SearchState.SUCCEEDED, SearchState.CANCELLED):
        with pytest.raises(ConflictError, match="1 open run"):
            store.finish_search(lease=lease, state=state)
    store.abandon_run(lease=lease, run_id=run.id, cause="not needed")
    assert (
        store.finish_search(lease=lease, state=SearchState.SUCCEEDED).state is SearchState.SUCCEEDED
    )
