"""The loop against a real SQLite store and an engine in memory: what it keeps."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import numpy as np
import optuna
import pytest
from optuna.trial import TrialState

from hp_tool.domain.measurement import Measurement
from hp_tool.domain.records import REUSED
from hp_tool.domain.states import RunState
from hp_tool.loop.search.account import spent_by
from tests.search.search_engine import best_row
from tests.search.search_tables import true_step_s


def test_a_search_finds_the_best_and_stops_when_more_cannot_pay(bench):
    b = bench(budget_runs=20)
    outcome = b.coordinator().run()
    runs = b.runs()
    assert outcome.state == "succeeded"
    assert outcome.stopped_because == "no_expected_gain"
    assert 4 <= len(runs) < 20
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
    assert [
        event.payload for event in b.store.events(search_id=b.search_id) if event.kind == "budget"
    ] == [{"budget_runs": budget_runs}]


def test_a_release_leaves_the_job_to_the_next_coordinator(bench):
    b = bench(budget_runs=2, min_gain_fraction=0.0)
    lease = b.claim()
    outcome = b.coordinator(lease=lease, should_release=lambda: bool(b.engine.submissions)).run()
    assert outcome.state == "released"
    assert b.engine.cancelled == []
    b.store.release_search(lease=lease)
    assert b.coordinator().run().state == "succeeded"
    assert len(b.engine.jobs) == 2


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


def test_an_earlier_measurement_stands_for_the_baseline(bench):
    b = bench(budget_runs=3, min_gain_fraction=0.0)
    b.coordinator().run()
    earlier = b.runs()[-1]
    b.problem = replace(b.problem, baseline=earlier.parallel)
    b.search_id = b.store.create_search(query={"kind": "training"}).id
    b.coordinator(reusable={earlier.digest: earlier.measurement_id}).run()
    (baseline,) = (run for run in b.runs() if run.digest == earlier.digest)
    assert (baseline.predicted[REUSED], baseline.gpu_seconds) == (earlier.measurement_id, 0.0)
    assert baseline.measurement.step_s == earlier.measurement.step_s


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
    errors = [
        abs(np.log(run.predicted["calibrated_step_s"] / run.measurement.step_s)) for run in b.runs()
    ]
    assert np.median(errors[4:]) < np.median(errors[:2])
    assert b.runs()[0].predicted["chosen_by"] == "analytic_best"
    assert b.runs()[0].predicted["calibration_measurements"] == 0
    assert b.runs()[-1].predicted["calibration_measurements"] == 7
    proposed = [
        event.payload for event in b.store.events(search_id=b.search_id) if event.kind == "proposed"
    ]
    assert [payload["run_id"] for payload in proposed] == [run.id for run in b.runs()[:7]]
    assert proposed[-1]["calibration"]["measurements"] == 6
    assert b.runs()[7].predicted["chosen_by"] == "repeat"


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
