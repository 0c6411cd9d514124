"""The promises of docs/promises.md about searches and their jobs: each held while the faults that
threaten it come after every few calls that a worker makes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress

import pytest

from hp_tool.domain.states import RunState, SearchState
from hp_tool.errors import ConflictError
from tests.promises import audit
from tests.promises.world import CLUSTER_RUNS, LEASE_S, Process, World

Disturb = Callable[[World, Process], None]
MOMENTS = range(1, 33, 2)
"""Calls that a worker makes before the fault: a search of one run takes about thirty."""


@contextmanager
def world() -> Iterator[World]:
    made = World()
    try:
        yield made
    finally:
        made.close()


def held(promise: Callable[[World], Iterator[str]], disturb: Disturb) -> None:
    """Hold a promise where the disturbance comes after so many calls of a worker."""
    for calls in MOMENTS:
        with world() as w:
            w.submit(budget_runs=1, parallel_runs=1)
            worker = w.hire()
            worker.run(calls)
            disturb(w, worker)
            w.drain()
            assert list(promise(w)) == [], f"after {calls} calls"


def taken_over(w: World) -> None:
    """The worker sleeps until another has claimed its search."""
    w.elapsed_s += LEASE_S + 1.0
    w.hire().run(12)


def cancelled(w: World, worker: Process) -> None:
    w.cancel(w.accepted[0])


def cancelled_while_its_worker_sleeps(w: World, worker: Process) -> None:
    w.cancel(w.accepted[0])
    taken_over(w)


@pytest.mark.parametrize("how", [cancelled, cancelled_while_its_worker_sleeps])
def test_cancel_is_final(how: Disturb) -> None:
    held(audit.cancel_is_final, how)


def test_nothing_is_lost() -> None:
    held(audit.nothing_is_lost, lambda w, worker: worker.kill())


@pytest.mark.parametrize("fault", ["answer of the database", "database"])
def test_nothing_runs_twice(fault: str) -> None:
    def taken_over_beside_a_bad_database(w: World, worker: Process) -> None:
        w.armed[fault] = 1
        w.submit(budget_runs=1, parallel_runs=1)
        taken_over(w)
        w.armed[fault] = 2
        worker.run(5)

    held(audit.nothing_runs_twice, taken_over_beside_a_bad_database)


@pytest.mark.parametrize("fault", ["engine", "answer of the engine", "folder"])
def test_no_job_is_orphaned(fault: str) -> None:
    def cancelled_under_a_bad_engine(w: World, worker: Process) -> None:
        w.armed[fault] = 3
        worker.run(2)
        w.cancel(w.accepted[0])
        worker.kill()

    held(audit.no_job_is_orphaned, cancelled_under_a_bad_engine)


@pytest.mark.parametrize("seconds", [0.0, 90.0])
def test_accounting_matches_what_ran(seconds: float) -> None:
    def cancelled_later(w: World, worker: Process) -> None:
        w.elapsed_s += seconds
        w.cancel(w.accepted[0])
        worker.kill()

    held(audit.accounting_matches_what_ran, cancelled_later)


def test_retries_are_bounded() -> None:
    with world() as w:
        w.engine.fates.extend(["preempted"] * 50)
        w.submit(budget_runs=3, parallel_runs=2)
        w.drain()
        assert list(audit.retries_are_bounded(w)) == []
        assert len(w.engine.jobs) == 9


def test_limits_hold() -> None:
    with world() as w:
        for _ in range(3):
            w.submit(budget_runs=2, parallel_runs=2)
            w.hire()
        w.drain()
        assert list(audit.limits_hold(w)) == []
        assert max(job.beside_all for job in w.engine.jobs.values()) == CLUSTER_RUNS


@pytest.mark.parametrize("hours", [1.0, -1.0])
def test_events_are_in_order(hours: float) -> None:
    def paused_and_resumed_as_the_clock_jumps(w: World, worker: Process) -> None:
        with suppress(ConflictError):
            w.store.request_pause(search_id=w.accepted[0])
        w.shift_s += 3600.0 * hours
        worker.run(10)
        with suppress(ConflictError):
            w.store.resume_search(search_id=w.accepted[0])

    held(audit.events_are_in_order, paused_and_resumed_as_the_clock_jumps)


def test_runs_of_a_dead_worker_leave_the_cluster_to_others() -> None:
    """One worker is left, over an older search; the runs that fill the cluster wait for somebody to
    end them.
    """
    with world() as w:
        older = w.submit(budget_runs=1, parallel_runs=1)
        w.store.request_pause(search_id=older)
        w.submit(budget_runs=2, parallel_runs=2)
        worker = w.hire()
        while len(w.engine.open()) < CLUSTER_RUNS:
            worker.run(1)
        worker.kill()
        w.store.resume_search(search_id=older)
        w.hire().run(5)
        w.drain()
        assert audit.breaches(w) == []


@pytest.mark.parametrize("hours", [0.0, -1.0])
def test_a_search_given_back_with_runs_under_way_is_taken_up_again(hours: float) -> None:
    """Its runs fill the cluster; two older searches wait for room. The clock may have been set back
    since.
    """
    with world() as w:
        older = [w.submit(budget_runs=1, parallel_runs=1) for _ in range(2)]
        for search_id in older:
            w.store.request_pause(search_id=search_id)
        w.submit(budget_runs=2, parallel_runs=2)
        worker = w.hire()
        while len(w.engine.open()) < CLUSTER_RUNS:
            worker.run(1)
        worker.stopping = True
        worker.rest()
        w.shift_s += 3600.0 * hours
        for search_id in older:
            w.store.resume_search(search_id=search_id)
            w.hire()
        w.drain()
        assert audit.breaches(w) == []


@pytest.mark.parametrize("fault", ["engine", "folder"])
def test_a_search_that_is_interrupted_pauses_also_where_its_job_cannot_be_ended(fault: str) -> None:
    with world() as w:
        search_id = w.submit(budget_runs=1, parallel_runs=1)
        worker = w.hire()
        while not (runs := w.runs()) or runs[0].state is not RunState.SUBMITTED:
            worker.run(1)
        w.armed[fault] = 1
        worker.kill(KeyboardInterrupt())
        while w.store.get_search(search_id=search_id).state is SearchState.RUNNING:
            worker.run(1)
        assert w.store.get_search(search_id=search_id).state is SearchState.PAUSED
        w.drain()
        assert audit.breaches(w) == []


def test_the_sweep_closes_what_a_failed_search_left_open() -> None:
    """The engine is away for so long that the search fails and its job is not ended: it ends by
    itself, and nobody looks.
    """
    with world() as w:
        w.submit(budget_runs=1, parallel_runs=1)
        worker = w.hire()
        while not w.engine.open():
            worker.run(1)
        w.armed["engine"] = 1000
        while not w.searches()[0].state.ended:
            worker.run(1)
        assert w.runs()[0].state is RunState.SUBMITTED
        w.drain()
        assert audit.breaches(w) == []


def test_what_the_last_attempt_took_is_booked_though_nothing_was_heard_of_it() -> None:
    """The engine took the third job without an answer, and the runs folder no mark to end it."""
    with world() as w:
        w.submit(budget_runs=1, parallel_runs=1)
        worker = w.hire()
        w.armed |= {"engine": 2, "answer of the engine": 3, "folder": 1}
        while "folder" not in w.happened:
            worker.run(1)
        w.drain()
        assert audit.breaches(w) == []
