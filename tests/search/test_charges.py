"""What a run costs, what a site's refusal ends, and how long a job may wait."""

from __future__ import annotations

import pytest

from hp_tool.domain.jobs import Waiting
from hp_tool.domain.measurement import Hardware, Measurement
from hp_tool.domain.states import JobState, RunState
from hp_tool.errors import LauncherError, RefusedError
from tests.search.search_bench import Bench
from tests.search.search_engine import MemoryEngine


class Clock:
    """Seconds that pass with every poll."""

    def __init__(self, step_s: float) -> None:
        self.now, self.step_s = 0.0, step_s

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock(60.0)


class Crowded(MemoryEngine):
    """An engine whose first job waits `polls` times, and says why."""

    clock: Clock
    polls = 10

    def poll(self, handles):
        self.clock.now += self.clock.step_s
        states = super().poll(handles)
        first = self.submissions[0]
        if first in states and self.jobs[first].polls <= self.polls:
            self.jobs[first].state = JobState.QUEUED
            states[first] = JobState.QUEUED
        elif first in states and states[first] is JobState.QUEUED:
            states[first] = JobState.RUNNING
        return states

    def fetch(self, handle):
        if self.jobs[handle].state is JobState.CANCELLED:
            return Measurement(status="preempted", cause="cancelled on request", wall_s=0.0)
        return super().fetch(handle)

    def waiting(self, handle):
        return Waiting(reason="Resources", starts_at="2026-11-22T10:00:00")


@pytest.fixture
def bench(tmp_path, clock):
    made = []

    def make(**settings):
        b = Bench(tmp_path, min_gain_fraction=0.0, **settings)
        b.engine = Crowded(problem=b.problem)
        b.engine.clock = clock
        made.append(b)
        return b

    yield make
    for each in made:
        each.store.close()


def test_waiting_costs_nothing_and_is_a_figure_of_its_own(bench, clock):
    b = bench(budget_runs=1)
    assert b.coordinator(clock=clock).run().state == "succeeded"
    (run,) = b.runs()
    assert run.gpu_seconds == 10.0 * 8  # by the engine's account
    assert run.account["wall_s"] == 10.0
    assert run.account["queue_s"] == pytest.approx(11 * 60.0 - 10.0, abs=61.0)
    assert b.store.get_search(search_id=b.search_id).progress["queue_s"] == run.account["queue_s"]


def test_a_job_is_charged_from_the_first_poll_that_saw_it_run(bench, clock):
    """Polls 60 seconds apart see it queued, three times running, then finished: 180 seconds pass
    between the second and the last poll.
    """
    b = bench(budget_runs=1)
    seen = []

    def poll(handles):
        clock.now += clock.step_s
        seen.append(clock.now)
        states = [JobState.QUEUED, *3 * [JobState.RUNNING], JobState.FINISHED]
        return dict.fromkeys(handles, states[min(len(seen), len(states)) - 1])

    b.engine.poll = poll
    b.engine.fetch = lambda handle: Measurement(status="crashed", cause="no account of its time")
    b.coordinator(clock=clock).run()
    run = b.runs()[0]
    assert (run.account["queue_s"], run.account["wall_s"]) == (120.0, 180.0)
    assert run.gpu_seconds == 180.0 * 8


class Silent(Crowded):
    """An engine whose first job runs and ends between two polls, and leaves no account."""

    polls = 1

    def poll(self, handles):
        states = super().poll(handles)
        first = self.submissions[0]
        if states.get(first) is JobState.RUNNING:
            self.jobs[first].state = states[first] = JobState.FINISHED
        return states

    def fetch(self, handle):
        return Measurement(
            status="crashed", cause="the job damaged its own folder: a link is in its place"
        )


def test_a_job_never_seen_running_is_booked_since_it_was_last_seen_waiting(bench, clock):
    b = bench(budget_runs=1)
    b.engine = Silent(problem=b.problem)
    b.engine.clock = clock
    b.coordinator(clock=clock).run()
    run = b.runs()[0]
    assert run.measurement.status == "crashed"
    assert run.gpu_seconds == 60.0 * 8  # one poll
    assert (run.account["wall_s"], run.account["queue_s"]) == (60.0, 60.0)


class Timekeeper(Crowded):
    """An engine that says how long it had a job, which is looked at much later."""

    polls = 0

    def lasted_s(self, handle):
        return 25.0


def test_a_late_look_at_a_job_that_has_ended_is_no_wait(bench, clock):
    b = bench(budget_runs=1)
    b.engine = Timekeeper(problem=b.problem)
    b.engine.clock = clock
    assert b.coordinator(clock=clock).run().state == "succeeded"
    (run,) = b.runs()
    assert clock.now >= 60.0 and run.account == {"queue_s": 25.0 - 10.0, "wall_s": 10.0}


def test_a_job_that_waits_is_shown_with_its_reason_and_when_it_is_expected(bench, clock):
    b = bench(budget_runs=1)
    seen = []
    b.engine.on_poll = lambda: seen.append(
        b.store.get_search(search_id=b.search_id).progress.get("pending")
    )
    b.coordinator(clock=clock).run()
    assert {"runs": 1, "reason": "Resources", "starts_at": "2026-11-22T10:00:00"} in seen
    assert seen[-1] is None or "pending" not in b.store.get_search(search_id=b.search_id).progress
    assert [payload["reason"] for kind, payload in b.reports if kind == "pending"] == ["Resources"]


def test_a_job_that_never_started_is_not_charged_when_it_is_cancelled(bench, clock):
    b = bench(budget_runs=1)
    b.engine.fetch = lambda handle: (_ for _ in ()).throw(LauncherError("no answer"))

    def cancel():
        if clock.now > 300.0:
            b.store.request_cancel(search_id=b.search_id)

    b.engine.on_poll = cancel
    assert b.coordinator(clock=clock, lease_s=0.001).run().state == "cancelled"
    (run,) = b.runs()
    assert (run.state, run.gpu_seconds) == (RunState.ABANDONED, 0.0)


def test_what_the_engine_took_off_is_charged_by_its_account_and_leaves_its_traces(bench, clock):
    b = bench(budget_runs=1)
    b.engine.polls = 0
    taken = []

    def outcome(request):
        if not taken or taken == [request.parallel]:
            return JobState.PREEMPTED
        return None

    def fetch(handle):
        taken[:] = ["over"]
        hardware = Hardware(gpu="test-gpu", num_gpus=8, hosts=("n7",))
        return Measurement(
            status="preempted",
            cause="PREEMPTED by urgent",
            wall_s=4.0,
            hardware=hardware,
            log_tail="step 1",
        )

    b.engine.outcome, original = outcome, b.engine.fetch
    b.engine.fetch = lambda handle: fetch(handle) if not taken else original(handle)
    b.coordinator(clock=clock).run()
    first = b.runs()[0]
    assert (first.state, first.cause, first.gpu_seconds) == (
        RunState.ABANDONED,
        "PREEMPTED by urgent",
        4.0 * 8,
    )
    assert (first.account["hosts"], first.account["log_tail"], first.account["wall_s"]) == (
        ["n7"],
        "step 1",
        4.0,
    )


def test_a_refusal_by_the_site_ends_the_search_at_the_first_answer(bench, clock):
    b = bench(budget_runs=8)
    asked = []

    def refuse(plan):
        asked.append(plan.job_name)
        raise RefusedError("invalid partition specified: nowhere")

    b.engine.submit = refuse
    with pytest.raises(RefusedError, match="invalid partition") as refused:
        b.coordinator(clock=clock).run()
    assert refused.value.code == "refused"
    (run,) = b.runs()
    assert len(asked) == 1 and run.state is RunState.ABANDONED and run.gpu_seconds == 0.0


def test_a_run_that_is_refused_once_others_have_run_leaves_the_result_so_far(bench, clock):
    b = bench(budget_runs=8)
    b.engine.polls = 0
    refused = Measurement(status="crashed", cause="ImagePullBackOff", refused=True, wall_s=0.0)
    b.engine.outcome = lambda request: refused if len(b.engine.submissions) > 2 else None
    outcome = b.coordinator(clock=clock).run()
    assert (outcome.state, outcome.stopped_because) == ("succeeded", "refused")
    assert [run.state for run in b.runs()] == [
        RunState.FINISHED,
        RunState.FINISHED,
        RunState.ABANDONED,
    ]


@pytest.mark.parametrize("measured", [False, True])
def test_a_job_that_waits_too_long_is_taken_back_and_ends_the_search(bench, clock, measured):
    b = bench(budget_runs=8, queue_timeout_s=300.0)
    if measured:
        b.engine.polls, always = 0, b.engine.poll

        def poll(handles):
            states = always(handles)
            for later in b.engine.submissions[1:]:
                b.engine.jobs[later].state = states[later] = JobState.QUEUED
            return states

        b.engine.poll = poll
        outcome = b.coordinator(clock=clock).run()
        assert (outcome.state, outcome.stopped_because) == ("succeeded", "queue_timeout")
    else:
        with pytest.raises(LauncherError, match=r"queue_timeout_s of 300 s \(Resources\)") as late:
            b.coordinator(clock=clock).run()
        assert late.value.code == "queue_timeout"
    last = b.runs()[-1]
    assert last.state is RunState.ABANDONED and last.gpu_seconds == 0.0
    assert last.job_name in b.engine.cancelled


def test_a_node_that_failed_twice_is_avoided(bench, clock):
    b = bench(budget_runs=1)
    b.engine.polls, plans = 0, []
    submit = b.engine.submit

    def noted(plan):
        plans.append(plan)
        return submit(plan)

    def fetch(handle):
        return Measurement(
            status="preempted", cause="NODE_FAIL", wall_s=1.0, suspects=("n7", f"n{len(plans)}")
        )

    b.engine.submit, original = noted, b.engine.fetch
    b.engine.outcome = lambda request: JobState.PREEMPTED if len(plans) < 3 else None
    b.engine.fetch = lambda handle: fetch(handle) if len(plans) < 3 else original(handle)
    b.coordinator(clock=clock).run()
    assert [plan.excluded_hosts for plan in plans] == [(), (), ("n7",)]
