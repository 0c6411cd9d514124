"""A coordinator that was away while it submitted a job, and what the job of a run that is given up
costs.
"""

from __future__ import annotations

import pytest

from hp_tool.domain.measurement import KILLED_CAUSE, Measurement
from hp_tool.domain.states import JobState, RunState, SearchState
from hp_tool.errors import ConflictError, LauncherError
from tests.search.search_bench import Bench, wait_for_claim
from tests.search.search_engine import MemoryEngine


@pytest.fixture
def b(tmp_path):
    made = Bench(tmp_path, budget_runs=3, min_gain_fraction=0.0)
    yield made
    made.store.close()


class SleepyEngine(MemoryEngine):
    """`asleep()` happens in the middle of the first submit, of whose name it knows nothing: an
    engine that keeps no names.
    """

    def submit(self, plan):
        if not self.submissions:
            request, cancelled = self._planned, list(self.cancelled)
            self.asleep()
            self._planned, self.cancelled = request, cancelled
        return super().submit(plan)


@pytest.fixture
def sleepy(b):
    b.engine = SleepyEngine(problem=b.problem)
    return b


def test_a_job_submitted_for_a_cancelled_search_is_cancelled_by_its_late_submitter(sleepy):
    b = sleepy

    def cancelled_meanwhile():
        b.store.request_cancel(search_id=b.search_id)
        lease = wait_for_claim(b)
        assert b.coordinator(lease=lease).run().state == "cancelled"
        b.store.finish_search(lease=lease, state=SearchState.CANCELLED)

    b.engine.asleep = cancelled_meanwhile
    late = b.coordinator(lease=b.claim(lease_s=0.01), lease_s=0.01)
    with pytest.raises(ConflictError) as caught:
        late.run()
    assert caught.value.code == "lease_lost"
    (run,) = b.runs()
    assert run.state is RunState.ABANDONED
    assert b.engine.jobs[run.job_name].state is JobState.CANCELLED


def test_a_job_that_another_coordinator_has_adopted_is_left_to_it(sleepy):
    b = sleepy
    taken = []
    b.engine.asleep = lambda: taken.append(wait_for_claim(b))
    late = b.coordinator(lease=b.claim(lease_s=0.01), lease_s=0.01)
    with pytest.raises(ConflictError):
        late.run()
    assert b.engine.cancelled == []
    assert b.coordinator(lease=taken[0]).run().state == "succeeded"
    assert len(b.engine.jobs) == len(b.runs()) == 3


def test_a_cancel_books_what_the_job_took_by_its_own_account(b):
    """Not how long the coordinator that ends it has known it."""
    first = b.coordinator(
        lease=b.claim(lease_s=0.01), lease_s=0.01, should_release=lambda: bool(b.engine.submissions)
    )
    assert first.run().state == "released"
    b.store.request_cancel(search_id=b.search_id)
    assert b.coordinator(lease=wait_for_claim(b)).run().state == "cancelled"
    (run,) = b.runs()
    assert (run.state, run.gpu_seconds) == (RunState.ABANDONED, 10.0 * 8)


def test_the_name_of_an_attempt_that_is_given_up_is_given_up_too(b):
    """A submit that failed for us may still go through at the engine."""
    refusals = iter([LauncherError("no answer within 30 s")])
    submit = b.engine.submit

    def unanswered(plan):
        for refusal in refusals:
            raise refusal
        return submit(plan)

    b.engine.submit = unanswered
    assert b.coordinator().run().state == "succeeded"
    first = b.runs()[0]
    assert first.state is RunState.ABANDONED
    assert b.engine.cancelled == [first.job_name]


@pytest.mark.parametrize("times", [1, 2])
def test_a_job_that_was_killed_from_outside_is_tried_once_more_before_its_configuration_is_blamed(
    b, times
):
    killed = Measurement(status="preempted", cause=KILLED_CAUSE, wall_s=1.0)
    b.engine.outcome = lambda request: killed if len(b.engine.submissions) <= times else None
    assert b.coordinator().run().state == "succeeded"
    first, again, *_ = b.runs()
    assert (first.state, first.cause) == (RunState.ABANDONED, KILLED_CAUSE)
    assert (again.parallel, again.attempt, again.state) == (first.parallel, 1, RunState.FINISHED)
    assert again.measurement.status == ("ok" if times == 1 else "crashed")
