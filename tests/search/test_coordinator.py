"""The loop against a real SQLite store and an engine in memory: what it keeps, and what it survives."""

from __future__ import annotations

import errno
import time
from collections import Counter

import numpy as np
import optuna
import pytest
from optuna.trial import TrialState

from hp_tool.calibration import CPU_PRIOR, GPU_PRIOR
from hp_tool.domain.jobs import JobState
from hp_tool.domain.measurement import Measurement
from hp_tool.domain.records import RunState
from hp_tool.errors import ConflictError, LauncherError
from hp_tool.search.account import coverage_runs, spent_by
from hp_tool.search.coordinator import FOLDER_PATIENCE_S, LONGEST_FOLDER_WAIT_S, Coordinator
from hp_tool.search.sampler import CostModelSampler
from hp_tool.search.study import StudyProjection
from hp_tool.store import open_store
from tests.search.search_engine import MemoryEngine, best_row, make_problem
from tests.search.search_tables import true_step_s


class Killed(BaseException):
    """Ends the coordinator where it stands, as a kill would."""


class Bench:
    """One store, one engine, and coordinators one after the other."""

    def __init__(self, tmp_path, **settings):
        self.store = open_store(f"sqlite:///{tmp_path / 'hp.db'}")
        self.problem = make_problem(**settings)
        self.engine = MemoryEngine(problem=self.problem)
        self.storage = optuna.storages.InMemoryStorage()
        self.search_id = self.store.create_search(query={"kind": "training"}).id
        self.reports = []

    def claim(self, lease_s=60.0):
        _, lease = self.store.claim_search(holder="test", lease_s=lease_s, search_id=self.search_id)
        return lease

    def projection(self, storage=None):
        sampler = CostModelSampler(
            table=self.problem.table,
            prior=GPU_PRIOR,
            coverage_runs=coverage_runs(self.problem.settings, prior=CPU_PRIOR),
            seed=0,
        )
        return StudyProjection(search_id=self.search_id, problem=self.problem, sampler=sampler, storage=storage or self.storage)

    def coordinator(self, lease=None, **options):
        self.last = self.projection(options.pop("storage", None))
        return Coordinator(
            store=self.store,
            launcher=self.engine,
            lease=lease or self.claim(),
            problem=self.problem,
            projection=self.last,
            report=lambda kind, payload: self.reports.append((kind, payload)),
            **{"sleep": lambda seconds: None} | options,
        )

    def runs(self):
        return self.store.runs(search_id=self.search_id)


@pytest.fixture
def bench(tmp_path):
    made = []

    def make(**settings):
        made.append(Bench(tmp_path, **settings))
        return made[-1]

    yield make
    for each in made:
        each.store.close()


def test_a_search_finds_the_best_and_stops_when_more_cannot_pay(bench):
    b = bench(budget_runs=12)
    outcome = b.coordinator().run()
    runs = b.runs()
    assert outcome.state == "succeeded"
    assert outcome.stopped_because == "no_expected_gain"
    assert 4 <= len(runs) < 12
    assert all(run.state is RunState.FINISHED and run.measurement.status == "ok" for run in runs)
    best = min(runs, key=lambda run: run.measurement.step_s)
    truth = true_step_s(b.problem.table)
    assert best.measurement.step_s <= 1.03 * truth[best_row(b.problem)]
    assert spent_by(runs).gpu_seconds == pytest.approx(len(runs) * 10.0 * 8)


def test_budgets_hold(bench):
    b = bench(budget_runs=3, min_gain_fraction=0.0)
    assert b.coordinator().run().stopped_because == "budget_runs"
    assert len(b.runs()) == 3


def test_the_gpu_second_budget_is_not_knowingly_overdrawn(bench):
    b = bench(budget_runs=50, budget_gpu_seconds=200.0, min_gain_fraction=0.0)
    assert b.coordinator().run().stopped_because == "budget_gpu_seconds"
    assert len(b.runs()) == 2  # a third run of 80 GPU-seconds would pass 200


@pytest.mark.parametrize("status", ["oom", "crashed", "timeout"])
def test_a_bad_candidate_does_not_end_the_search(bench, status):
    b = bench(budget_runs=6, min_gain_fraction=0.0)
    bad = []

    def outcome(request):
        if not bad or bad[0] == request.parallel:
            bad[:] = [request.parallel]
            return Measurement(status=status, cause="it broke", wall_s=1.0, log_tail="the end")
        return None

    b.engine.outcome = outcome
    assert b.coordinator().run().state == "succeeded"
    runs = b.runs()
    assert Counter(run.measurement.status for run in runs) == {"ok": 5, status: 1}
    failed = next(run for run in runs if run.measurement.status == status)
    assert (failed.measurement.cause, failed.measurement.log_tail) == ("it broke", "the end")
    assert len({run.digest for run in runs}) == 6
    trials = b.last.study.get_trials()
    states = {"oom": TrialState.COMPLETE, "crashed": TrialState.FAIL, "timeout": TrialState.PRUNED}
    trial = next(t for t in trials if t.user_attrs["status"] == status)
    assert trial.state == states[status]
    assert trial.user_attrs["cause"] == "it broke"
    assert (trial.constraints.get("memory", 0.0) > 0) == (status == "oom")


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


def wait_for_claim(b):
    for _ in range(200):
        claimed = b.store.claim_search(holder="next", lease_s=60.0, search_id=b.search_id)
        if claimed:
            return claimed[1]
        time.sleep(0.01)
    raise AssertionError("the lease never expired")


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


def test_cancel_ends_a_job_that_was_submitted_by_a_coordinator_which_died_before_storing_its_handle(bench, monkeypatch):
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


def test_pause_lets_the_run_finish_and_resume_goes_on(bench):
    b = bench(budget_runs=4, min_gain_fraction=0.0)
    polls = []

    def pause():
        polls.append(1)
        if len(polls) == 2:
            b.store.request_pause(search_id=b.search_id)

    b.engine.on_poll = pause
    lease = b.claim()
    assert b.coordinator(lease=lease).run().state == "paused"
    assert [run.state for run in b.runs()] == [RunState.FINISHED]
    b.store.release_search(lease=lease, paused=True)
    b.store.resume_search(search_id=b.search_id)
    assert b.coordinator().run().state == "succeeded"
    assert len(b.runs()) == 4


@pytest.mark.parametrize(("budget_runs", "runs"), [(1, 1), (3, 3), (5, 5)])
def test_a_budget_changed_during_a_run_holds_from_then_on(bench, budget_runs, runs):
    b = bench(budget_runs=4, min_gain_fraction=0.0)
    polls = []

    def change():
        polls.append(1)
        if len(polls) == 2:
            b.store.change_budget(search_id=b.search_id, budget_runs=budget_runs)

    b.engine.on_poll = change
    outcome = b.coordinator(lease_s=0.001).run()
    assert (outcome.stopped_because, len(b.runs())) == ("budget_runs", runs)
    assert [event.payload for event in b.store.events(search_id=b.search_id) if event.kind == "budget"] == [
        {"budget_runs": budget_runs}
    ]


def test_a_release_leaves_the_job_to_the_next_coordinator(bench):
    b = bench(budget_runs=2, min_gain_fraction=0.0)
    lease = b.claim()
    outcome = b.coordinator(lease=lease, should_release=lambda: bool(b.engine.submissions)).run()
    assert outcome.state == "released"
    assert b.engine.cancelled == []
    b.store.release_search(lease=lease)
    assert b.coordinator().run().state == "succeeded"
    assert len(b.engine.jobs) == 2


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
    assert [run.state for run in attempts] == [RunState.ABANDONED, RunState.ABANDONED, RunState.FINISHED]
    assert attempts[-1].measurement.status == "preempted"
    assert sum(run.measurement is not None and run.measurement.status == "ok" for run in b.runs()) == 2


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
    odd = Measurement(status="ok", step_s=1.0, wall_s=10.0, differences={"fuses": ("package" * 100,)})
    b.engine.outcome = lambda request: odd if len(b.engine.submissions) == 1 else None
    assert b.coordinator().run().state == "succeeded"
    first, second = (run.measurement for run in b.runs())
    assert first.status == "crashed" and first.cause.startswith("its result cannot be stored: cluster_key has")
    assert second.status == "ok" and b.runs()[0].gpu_seconds == 80.0


def test_interrupted_by_hand_it_ends_the_job_and_pauses(bench):
    b = bench(budget_runs=2)

    def interrupt():
        raise KeyboardInterrupt

    b.engine.on_poll = interrupt
    assert b.coordinator().run().stopped_because == "interrupted"
    assert len(b.engine.cancelled) == 1
    assert [run.state for run in b.runs()] == [RunState.ABANDONED]


def test_earlier_measurements_stand_for_runs_where_that_is_asked_for(bench):
    b = bench(budget_runs=3, min_gain_fraction=0.0)
    b.coordinator().run()
    earlier = {run.digest: run.measurement_id for run in b.runs()}
    before = len(b.engine.submissions)
    b.search_id = b.store.create_search(query={"kind": "training"}).id
    b.coordinator(reusable=earlier).run()
    runs = b.runs()
    reused = [run for run in runs if run.digest in earlier]
    assert reused and all(run.gpu_seconds == 0.0 and run.submitted_at is None for run in reused)
    assert spent_by(runs).profile_runs == 3 == len(b.engine.submissions) - before


def test_the_study_is_a_projection_that_can_be_thrown_away(bench, tmp_path):
    b = bench(budget_runs=4, min_gain_fraction=0.0)
    rdb = optuna.storages.RDBStorage(f"sqlite:///{tmp_path / 'hp.db'}")
    b.coordinator(storage=rdb).run()
    first = b.last.study.get_trials()
    assert len(first) == 4
    for _ in range(2):  # syncing again adds nothing
        b.projection(rdb).sync(b.runs())
    assert len(b.last.study.get_trials()) == 4
    optuna.delete_study(study_name=b.search_id, storage=rdb)
    again = b.projection(rdb)
    again.sync(b.runs())
    rebuilt = again.study.get_trials()
    assert [t.params for t in rebuilt] == [t.params for t in first]
    assert [t.value for t in rebuilt] == [t.value for t in first]
    assert {t.user_attrs["run_id"] for t in rebuilt} == {run.id for run in b.runs()}


def test_predictions_are_stored_before_the_run_and_improve(bench):
    b = bench(budget_runs=8, min_gain_fraction=0.0)
    b.coordinator().run()
    errors = [abs(np.log(run.predicted["calibrated_step_s"] / run.measurement.step_s)) for run in b.runs()]
    assert np.median(errors[4:]) < np.median(errors[:2])
    assert b.runs()[0].predicted["chosen_by"] == "analytic_best"
    assert b.runs()[0].predicted["calibration_measurements"] == 0
    assert b.runs()[-1].predicted["calibration_measurements"] == 7
    proposed = [event.payload for event in b.store.events(search_id=b.search_id) if event.kind == "proposed"]
    assert [payload["run_id"] for payload in proposed] == [run.id for run in b.runs()]
    assert proposed[-1]["calibration"]["measurements"] == 7


def test_a_leader_within_the_noise_of_its_rival_runs_again_for_longer(bench):
    b = bench(budget_runs=12, min_gain_fraction=0.01)

    def noisy(request):
        row = b.problem.row(request.parallel)
        step_s = float(true_step_s(b.problem.table)[row])
        times = tuple(step_s * factor for factor in (0.2, 0.5, 1.0, 1.5, 1.8))
        return Measurement(status="ok", step_s=step_s, step_times_s=times, wall_s=10.0)

    b.engine.outcome = noisy
    b.coordinator().run()
    last = b.runs()[-1]
    assert last.predicted["chosen_by"] == "repeat"
    assert last.fidelity.steps == 2 * b.problem.settings.steps
    assert len([run for run in b.runs() if run.parallel == last.parallel]) == 2
    assert b.engine.jobs[last.job_name].request.steps == last.fidelity.steps
