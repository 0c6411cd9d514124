"""What the loop survives: kills, cancels, engines and folders that fail."""

from __future__ import annotations

import errno
from collections import Counter

import optuna
import pytest
import sqlalchemy as sa
from optuna.trial import TrialState

from hp_tool.domain.measurement import Measurement
from hp_tool.domain.states import JobState, RunState
from hp_tool.errors import ConflictError, LauncherError
from hp_tool.loop.search.coordinator import FOLDER_PATIENCE_S, LONGEST_FOLDER_WAIT_S
from hp_tool.store import tables
from tests.search.search_bench import wait_for_claim


class Killed(BaseException):
    """Ends the coordinator where it stands, as a kill would."""


@pytest.mark.parametrize("polls", [1, 4, 8, 11])
def test_killed_at_any_moment_nothing_is_lost_repeated_or_started_twice(bench, polls):
    b = bench(budget_runs=5, min_gain_fraction=0.0)
    left = [polls]

    def kill():
        left[0] -= 1
        if left[0] == 0:
            raise Killed

    b.engine.on_poll = kill
    with pytest.raises(Killed):
        b.coordinator(lease=b.claim(lease_s=0.01), lease_s=0.01).run()
    started = dict(b.engine.jobs)
    b.engine.on_poll = lambda: None
    assert b.coordinator(lease=wait_for_claim(b)).run().state == "succeeded"
    runs = b.runs()
    assert len(runs) == 5
    assert all(run.state is RunState.FINISHED for run in runs)
    assert len({run.digest for run in runs}) == 5
    assert set(started) <= set(b.engine.jobs)
    assert len(b.engine.jobs) == 5
    assert all(count == 1 for count in Counter(b.engine.submissions).values())


@pytest.mark.parametrize("moment", ["intend_run", "submit", "mark_submitted", "finish_run"])
def test_killed_around_each_write_the_job_is_found_by_its_name(bench, moment, monkeypatch):
    b = bench(budget_runs=4, min_gain_fraction=0.0)
    owner = b.engine if moment == "submit" else b.store
    real = getattr(owner, moment)
    done = []

    def then_die(*args, **kwargs):
        answer = real(*args, **kwargs)
        if not done:
            done.append(True)
            raise Killed
        return answer

    monkeypatch.setattr(owner, moment, then_die)
    with pytest.raises(Killed):
        b.coordinator(lease=b.claim(lease_s=0.01), lease_s=0.01).run()
    assert b.coordinator(lease=wait_for_claim(b)).run().state == "succeeded"
    runs = b.runs()
    assert [run.number for run in runs] == [0, 1, 2, 3]
    assert all(run.state is RunState.FINISHED for run in runs)
    assert len(b.engine.jobs) == 4
    assert len(b.store.measurements(search_id=b.search_id).items) == 4


def test_a_late_coordinator_stops_without_touching_the_job(bench):
    b = bench(budget_runs=5)
    first = b.coordinator(lease=b.claim(lease_s=0.01), lease_s=0.01)
    taken = []

    def take_over():
        if not taken and b.engine.submissions:
            taken.append(wait_for_claim(b))

    b.engine.on_poll = take_over
    with pytest.raises(ConflictError) as caught:
        first.run()
    assert caught.value.code == "lease_lost"
    assert b.engine.cancelled == []
    assert b.runs()[0].state is RunState.SUBMITTED
    b.engine.on_poll = lambda: None
    assert b.coordinator(lease=taken[0]).run().state == "succeeded"
    assert all(count == 1 for count in Counter(b.engine.submissions).values())


def test_cancel_during_a_run_ends_its_job(bench):
    b = bench(budget_runs=5)
    polls = []

    def cancel():
        polls.append(1)
        if len(polls) == 4:  # within the second run
            b.store.request_cancel(search_id=b.search_id)

    b.engine.on_poll = cancel
    outcome = b.coordinator(lease_s=0.001).run()
    assert outcome.state == "cancelled"
    assert len(b.engine.cancelled) == 1
    assert [run.state for run in b.runs()] == [RunState.FINISHED, RunState.ABANDONED]
    assert not b.last.study.get_trials(states=(TrialState.RUNNING,))


def test_cancel_ends_a_job_that_was_submitted_by_a_coordinator_which_died_before_storing_its_handle(
    bench, monkeypatch
):
    b = bench(budget_runs=5)

    def die(**_):
        raise Killed

    with monkeypatch.context() as dying:
        dying.setattr(b.store, "mark_submitted", die)
        with pytest.raises(Killed):
            b.coordinator(lease=b.claim(lease_s=0.01), lease_s=0.01).run()
    (run,) = b.runs()
    assert run.handle is None and list(b.engine.jobs) == [run.job_name]
    b.store.request_cancel(search_id=b.search_id)
    assert b.coordinator(lease=wait_for_claim(b)).run().state == "cancelled"
    assert b.engine.cancelled == [run.job_name]
    assert [each.state for each in b.runs()] == [RunState.ABANDONED]


@pytest.mark.parametrize("state", [JobState.PREEMPTED, JobState.LOST])
def test_what_the_engine_took_off_is_tried_again_but_not_forever(bench, state):
    b = bench(budget_runs=3, min_gain_fraction=0.0)
    unlucky = []

    def outcome(request):
        if not unlucky or unlucky[0] == request.parallel:
            unlucky[:] = [request.parallel]
            return state
        return None

    b.engine.outcome = outcome
    assert b.coordinator().run().state == "succeeded"
    attempts = [run for run in b.runs() if run.parallel == unlucky[0]]
    assert [run.state for run in attempts] == [
        RunState.ABANDONED,
        RunState.ABANDONED,
        RunState.FINISHED,
    ]
    assert attempts[-1].measurement.status == "preempted"
    assert (
        sum(run.measurement is not None and run.measurement.status == "ok" for run in b.runs()) == 2
    )


def test_a_submission_that_is_refused_is_a_failed_run_with_its_cause(bench):
    b = bench(budget_runs=1)
    b.engine.refuse_submit = True
    b.coordinator().run()
    last = b.runs()[-1]
    assert last.measurement.status == "crashed"
    assert "no partition of that name" in last.measurement.cause


def test_an_engine_out_of_reach_ends_the_loop_with_the_run_still_open(bench):
    b = bench(budget_runs=2)

    def unreachable():
        raise LauncherError("cannot reach slurmctld")

    b.engine.on_poll = unreachable
    with pytest.raises(LauncherError):
        b.coordinator().run()
    assert [run.state for run in b.runs()] == [RunState.SUBMITTED]


def test_an_engine_that_answers_now_and_then_is_waited_for(bench):
    """19 failures, an answer, 19 failures, ...: it is given up only after 20 in a row."""
    b = bench(budget_runs=1)
    polls = []

    def now_and_then():
        polls.append(1)
        if len(polls) % 20:
            raise LauncherError("cannot reach slurmctld")

    b.engine.on_poll = now_and_then
    assert b.coordinator().run().state == "succeeded"
    assert [run.state for run in b.runs()] == [RunState.FINISHED]
    assert len(polls) == 3 * 20


def test_a_runs_folder_that_takes_nothing_is_waited_for(bench):
    b, waits, told = bench(budget_runs=2, min_gain_fraction=0.0), [], []
    now = [0.0]

    def sleep(seconds):
        waits.append(seconds)
        now[0] += seconds

    def full():
        if now[0] < 30.0:
            raise OSError(errno.ENOSPC, "No space left on device", "/runs/~x")
        told.append(b.store.get_search(search_id=b.search_id).progress.get("waiting_for"))

    b.engine.on_poll = full
    assert b.coordinator(sleep=sleep, clock=lambda: now[0]).run().state == "succeeded"
    assert (waits[0], max(waits)) == (0.25, LONGEST_FOLDER_WAIT_S)
    assert told[:2] == ["No space left on device: /runs/~x", None]
    assert [kind for kind, _ in b.reports].count("waiting") == 1
    assert [run.state for run in b.runs()] == [RunState.FINISHED] * 2
    assert len(b.engine.submissions) == 2


def test_a_runs_folder_that_stays_full_is_left_to_another_worker(bench):
    b, now = bench(budget_runs=2), [0.0]

    def full():
        now[0] += FOLDER_PATIENCE_S / 2 + 1.0
        raise OSError(errno.ENOSPC, "No space left on device", "/runs/~x")

    b.engine.on_poll = full
    assert b.coordinator(clock=lambda: now[0]).run().state == "released"
    assert [run.state for run in b.runs()] == [RunState.SUBMITTED]


def test_a_result_that_cannot_be_stored_is_a_crash_and_ends_no_search(bench):
    b = bench(budget_runs=2, min_gain_fraction=0.0)
    odd = Measurement(
        status="ok", step_s=1.0, wall_s=10.0, differences={"fuses": ("package" * 100,)}
    )
    b.engine.outcome = lambda request: odd if len(b.engine.submissions) == 1 else None
    assert b.coordinator().run().state == "succeeded"
    first, second = (run.measurement for run in b.runs())
    assert first.status == "crashed" and first.cause.startswith(
        "its result cannot be stored: cluster_key has"
    )
    assert second.status == "ok" and b.runs()[0].gpu_seconds == 80.0


def test_interrupted_by_hand_it_ends_the_job_and_pauses(bench):
    b = bench(budget_runs=2)

    def interrupt():
        raise KeyboardInterrupt

    b.engine.on_poll = interrupt
    assert b.coordinator().run().stopped_because == "interrupted"
    assert len(b.engine.cancelled) == 1
    assert [run.state for run in b.runs()] == [RunState.ABANDONED]


def test_a_search_whose_measurements_were_deleted_ends_with_an_error(bench, monkeypatch):
    """The store repeats no finished run, so the same proposal would return for ever."""
    b = bench(budget_runs=4, min_gain_fraction=0.0)
    intend, intended = b.store.intend_run, []

    def stop_before_the_third(**given):
        intended.append(None)
        if len(intended) == 3:
            raise Killed
        assert len(intended) < 50, "no progress"
        return intend(**given)

    monkeypatch.setattr(b.store, "intend_run", stop_before_the_third)
    with pytest.raises(Killed):
        b.coordinator(lease=b.claim(lease_s=0.01), lease_s=0.01).run()
    assert [run.state for run in b.runs()] == [RunState.FINISHED] * 2
    with b.store._writing() as connection:
        connection.execute(sa.delete(tables.measurements))
    b.storage = optuna.storages.InMemoryStorage()  # as a worker rebuilds its study
    with pytest.raises(ConflictError, match="measurement is missing"):
        b.coordinator(lease=wait_for_claim(b)).run()
