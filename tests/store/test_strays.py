"""Which jobs no live search owns, and what is booked to their runs."""

from __future__ import annotations

import pytest

from hp_tool.domain.parallel import ParallelConfig
from hp_tool.domain.states import RunState, SearchState
from hp_tool.store.sql import SqlStore
from tests.store.acting import QUERY, NewMeasurementFactory, claimed, intended

CLUSTER = "local:cpu"


def strays(store: SqlStore, *names: str) -> list[str]:
    return [run.id for run in store.stray_runs(cluster=CLUSTER, job_names=names)]


def test_a_job_is_a_stray_once_its_run_or_its_search_has_ended(
    store: SqlStore, new_measurement: NewMeasurementFactory
) -> None:
    lease = claimed(store)
    run = intended(store, lease)
    assert strays(store, run.job_name) == []  # whether submitted or not
    store.mark_submitted(lease=lease, run_id=run.id, handle="7")
    assert strays(store, run.job_name, "somebody-else's") == []
    store.release_search(lease=lease, paused=True)
    assert strays(store, run.job_name) == []  # whoever resumes it adopts the job
    claim = store.claim_search(holder="next", lease_s=60.0, search_id=lease.search_id)
    assert claim is not None
    store.finish_run(lease=claim[1], run_id=run.id, measurement=new_measurement(), gpu_seconds=1.0)
    assert strays(store, run.job_name) == [run.id]
    assert strays(store) == []  # what it cost is known


def test_an_abandoned_run_is_looked_at_for_a_while_on_its_own_cluster(store: SqlStore) -> None:
    lease = claimed(store)
    run = intended(store, lease)
    store.abandon_run(lease=lease, run_id=run.id, cause="lost")
    assert strays(store) == [run.id]
    assert store.stray_runs(cluster="local:gpu", job_names=[]) == []
    assert store.engines_in_use() == {CLUSTER: QUERY}


def test_a_last_attempt_of_which_nothing_was_heard_is_looked_at_too(
    store: SqlStore, new_measurement: NewMeasurementFactory
) -> None:
    lease = claimed(store)
    silent, heard = (
        intended(store, lease),
        intended(store, lease, ParallelConfig(data_parallel_size=2)),
    )
    for run, status in ((silent, "crashed"), (heard, "ok")):
        store.finish_run(
            lease=lease, run_id=run.id, measurement=new_measurement(status=status), gpu_seconds=0.0
        )
    assert strays(store) == [silent.id]


def test_only_what_was_not_booked_yet_is_booked(store: SqlStore) -> None:
    lease = claimed(store)
    first = intended(store, lease)
    second = intended(store, lease, ParallelConfig(data_parallel_size=2))
    for run in (first, second):
        store.abandon_run(lease=lease, run_id=run.id, cause="lost", gpu_seconds=5.0)
    for gpu_seconds in (8.0, 8.0, 3.0):  # by one worker after another
        store.book_stray(run_id=first.id, gpu_seconds=gpu_seconds)
    assert [run.gpu_seconds for run in store.runs(search_id=lease.search_id)] == [8.0, 5.0]
    assert store.get_search(search_id=lease.search_id).progress["gpu_seconds"] == 13.0


def test_the_result_of_an_ended_search_counts_what_is_booked_late(store: SqlStore) -> None:
    lease = claimed(store)
    run = intended(store, lease)
    store.abandon_run(lease=lease, run_id=run.id, cause="cancelled")
    result = {"id": "small", "search": {"id": lease.search_id, "gpu_seconds": 0.0}}
    store.finish_search(lease=lease, state=SearchState.CANCELLED, result=result)
    store.book_stray(run_id=run.id, gpu_seconds=60.0)
    record = store.get_search(search_id=lease.search_id)
    assert record.result == {"id": "small", "search": {"id": lease.search_id, "gpu_seconds": 60.0}}
    assert store.gpu_seconds_today() == 60.0


@pytest.mark.parametrize("resumed", [False, True])
def test_an_open_run_of_a_failed_search_is_abandoned_unless_it_was_taken_up_again(
    store: SqlStore, resumed: bool
) -> None:
    lease = claimed(store)
    run = intended(store, lease)
    store.finish_search(lease=lease, state=SearchState.FAILED)
    assert strays(store, run.job_name) == [run.id]
    if resumed:
        store.resume_search(search_id=lease.search_id)
    store.book_stray(run_id=run.id, gpu_seconds=2.0)
    (found,) = store.runs(search_id=lease.search_id)
    expected = (
        (RunState.INTENDED, None, None)
        if resumed
        else (RunState.ABANDONED, 2.0, "its search has failed")
    )
    assert (found.state, found.gpu_seconds, found.cause) == expected
