"""The loop of one search: propose, intend, submit, poll, fetch, store, learn, and again. All effects go through ports.

Whatever happens to this process, the next coordinator finds in the store what was intended and at the engine what was
submitted, and goes on from there: finished runs are never repeated, running ones are adopted by their job's name.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from typing import Literal

from hp_tool.domain.digests import configuration_digest
from hp_tool.domain.measurement import Fidelity, Measurement
from hp_tool.domain.parallel import ParallelConfig
from hp_tool.domain.ports import JobState, Launcher, Store
from hp_tool.domain.records import REUSED, JsonObject, Lease, RunRecord, RunState, SearchRecord
from hp_tool.errors import LauncherError
from hp_tool.search.problem import SearchProblem
from hp_tool.search.stopping import Spent, why_stop
from hp_tool.search.study import StudyProjection

MAX_ATTEMPTS = 3
"""Submissions of one configuration whose jobs are preempted or lost, before it is given up."""
MAX_ENGINE_FAILURES = 20
"""Questions in a row that the engine may leave unanswered."""
Report = Callable[[str, JsonObject], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """How the loop ended; the caller ends or releases the search accordingly."""

    state: Literal["succeeded", "cancelled", "paused", "released"]
    stopped_because: str


class _Stop(Exception):  # noqa: N818 - not an error: unwinds the loop between and during runs
    def __init__(self, outcome: Outcome) -> None:
        self.outcome = outcome


class Coordinator:
    """Holds one search's lease while it works. Not reusable, one thread."""

    def __init__(
        self,
        *,
        store: Store,
        launcher: Launcher,
        lease: Lease,
        problem: SearchProblem,
        projection: StudyProjection,
        reusable: Mapping[str, str] | None = None,
        lease_s: float = 60.0,
        poll_s: float = 0.25,
        report: Report = lambda kind, payload: None,
        should_release: Callable[[], bool] = lambda: False,
        sleep: Callable[[float], None] = time.sleep,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`reusable`: ids of stored measurements that stand for runs, by configuration digest. `should_release`: this
        process is asked to end; the search goes back to the queue with its job running, for the next one to adopt."""
        self._store, self._launcher, self._lease, self._problem = store, launcher, lease, problem
        self._projection = projection
        self._reusable = reusable or {}
        self._lease_s, self._poll_s = lease_s, poll_s
        self._report, self._should_release = report, should_release
        self._sleep, self._clock = sleep, clock
        self._renewed_at = -float("inf")
        self._run_started_at = clock()

    def run(self) -> Outcome:
        """Work until there is a reason to stop. Raises ConflictError `lease_lost` at once, jobs untouched, where another
        coordinator took over, and LauncherError where the engine stays out of reach."""
        try:
            while True:
                record = self._heartbeat(every_s=0.0)
                runs = self._store.runs(search_id=self._lease.search_id)
                unfinished = next((run for run in runs if not run.state.ended), None)
                if unfinished is not None:
                    self._carry_out(unfinished)
                elif record is not None and record.requested == "pause":
                    raise _Stop(Outcome(state="paused", stopped_because="paused"))
                else:
                    self._projection.sync(runs)
                    self._next(runs)
        except _Stop as stop:
            outcome = stop.outcome
        except KeyboardInterrupt:
            self._end_open_jobs(cause="interrupted")
            outcome = Outcome(state="paused", stopped_because="interrupted")
        self._projection.sync(self._store.runs(search_id=self._lease.search_id))
        return outcome

    def _next(self, runs: list[RunRecord]) -> None:
        """Decide on the next run and store the intent; raises _Stop where another run cannot pay."""
        again = _to_try_again(runs)
        if again is not None:
            self._intend(again.parallel, again.predicted)
            return
        settings, spent = self._problem.settings, spent_by(runs)
        proposal = self._projection.proposal()
        average_s = spent.gpu_seconds / spent.profile_runs if spent.profile_runs else 0.0
        reason = why_stop(settings=settings, spent=spent, next_run_gpu_seconds=average_s, proposal=proposal)
        self._progress(runs, spent=spent, expected_gain=proposal.expected_gain if proposal else 0.0)
        if reason is not None or proposal is None:
            raise _Stop(Outcome(state="succeeded", stopped_because=reason or "space_exhausted"))
        trial, row = self._projection.ask()
        parallel = self._problem.candidates.config(row)
        calibration = self._projection.sampler.calibration(study=self._projection.study)
        predicted = self._problem.predicted(
            row=row, calibration=calibration, reason=proposal.reason, expected_gain=proposal.expected_gain
        )
        reused = self._reusable.get(configuration_digest(parallel=parallel))
        run = self._intend(parallel, predicted if reused is None else {**predicted, REUSED: reused})
        self._projection.bind(trial=trial, run=run)
        told = {"calibrated_step_s": predicted["calibrated_step_s"], "chosen_by": proposal.reason}
        payload = {"run_id": run.id, "number": run.number, "parallel": asdict(run.parallel), **told}
        self._store.append_event(lease=self._lease, kind="proposed", payload={**payload, "calibration": calibration.summary()})

    def _intend(self, parallel: ParallelConfig, predicted: JsonObject) -> RunRecord:
        return self._store.intend_run(lease=self._lease, parallel=parallel, fidelity=Fidelity(), predicted=predicted)

    def _carry_out(self, run: RunRecord) -> None:
        """Bring an open run to its end, wherever an earlier coordinator left it."""
        if REUSED in run.predicted:
            earlier = self._store.get_measurement(measurement_id=run.predicted[REUSED])
            self._finish(run, earlier.measurement, gpu_seconds=0.0)
            return
        self._run_started_at = self._clock()
        self._report("run_started", _about(run))
        try:
            handle = run.handle or self._submit(run)
        except LauncherError as error:
            self._give_back(run, Measurement(status="crashed", cause=f"not submitted: {error.message}"))
            return
        state = self._wait(handle)
        if state is JobState.FINISHED:
            measurement = self._launcher.fetch(handle)
        else:
            measurement = Measurement(status="preempted", cause=f"the engine ended the job: {state}")
        if measurement.status == "preempted":
            self._give_back(run, measurement)
        else:
            self._finish(run, measurement, gpu_seconds=self._gpu_seconds(measurement))

    def _give_back(self, run: RunRecord, measurement: Measurement) -> None:
        """An attempt that says nothing about the configuration: try again, but not forever."""
        gpu_seconds = self._gpu_seconds(measurement)
        if run.attempt + 1 >= MAX_ATTEMPTS:
            self._finish(run, measurement, gpu_seconds=gpu_seconds)
            return
        cause = measurement.cause or measurement.status
        self._store.abandon_run(lease=self._lease, run_id=run.id, cause=cause, gpu_seconds=gpu_seconds)
        self._report("run_abandoned", {**_about(run), "cause": cause})

    def _submit(self, run: RunRecord) -> str:
        """Start the job of a stored intent, or find it already started: its name is the run's, whoever submits it."""
        plan = self._launcher.plan(self._problem.request(run), job_name=run.job_name)
        handle = self._launcher.submit(plan)
        self._store.mark_submitted(lease=self._lease, run_id=run.id, handle=handle)
        return handle

    def _wait(self, handle: str) -> JobState:
        """Poll until the job ended, keeping the lease and watching for a cancel."""
        failures = 0
        while True:
            try:
                state = self._launcher.poll([handle]).get(handle, JobState.LOST)
                failures = 0
            except LauncherError:
                failures += 1
                if failures >= MAX_ENGINE_FAILURES:
                    raise
                state = JobState.RUNNING
            if state not in (JobState.QUEUED, JobState.RUNNING):
                return state
            self._heartbeat(every_s=min(self._lease_s / 3, 2.0))
            self._sleep(self._poll_s)

    def _finish(self, run: RunRecord, measurement: Measurement, *, gpu_seconds: float) -> None:
        new = self._problem.new_measurement(run=run, measurement=measurement)
        stored = self._store.finish_run(lease=self._lease, run_id=run.id, measurement=new, gpu_seconds=gpu_seconds)
        told = stored.measurement or measurement
        self._report("run_finished", {**_about(run), "status": told.status, "step_s": told.step_s, "cause": told.cause})

    def _heartbeat(self, *, every_s: float) -> SearchRecord | None:
        """Renew the lease where it is due, and follow at once what cannot wait.

        A cancel ends the running job. A release leaves it to the next coordinator. A pause lets it finish, since its
        result is nearly paid for; the loop looks at the returned record.
        """
        if self._should_release():
            raise _Stop(Outcome(state="released", stopped_because="released"))
        if self._clock() - self._renewed_at < every_s:
            return None
        record = self._store.renew_lease(lease=self._lease, lease_s=self._lease_s)
        self._renewed_at = self._clock()
        if record.requested == "cancel":
            self._end_open_jobs(cause="cancelled")
            raise _Stop(Outcome(state="cancelled", stopped_because="cancelled"))
        return record

    def _end_open_jobs(self, *, cause: str) -> None:
        """End the jobs of all open runs with every process of theirs, and say so in the store."""
        for run in self._store.runs(search_id=self._lease.search_id):
            if run.state.ended:
                continue
            handle = run.handle or self._launcher.find(run.job_name)
            if handle is not None:
                self._launcher.cancel(handle)
            self._store.abandon_run(lease=self._lease, run_id=run.id, cause=cause, gpu_seconds=self._gpu_seconds(None))

    def _gpu_seconds(self, measurement: Measurement | None) -> float:
        """Devices x wall seconds: the job's own account where it has one, else how long it was waited for."""
        wall_s = self._clock() - self._run_started_at
        if measurement is not None and measurement.wall_s is not None:
            wall_s = measurement.wall_s
        return wall_s * self._problem.cluster.num_gpus

    def _progress(self, runs: list[RunRecord], *, spent: Spent, expected_gain: float) -> None:
        timed = [(run.measurement.step_s, run) for run in runs if run.measurement and run.measurement.step_s]
        best_step_s, best = min(timed, key=lambda pair: pair[0], default=(None, None))
        self._store.set_progress(
            lease=self._lease,
            progress={
                "profile_runs": spent.profile_runs,
                "budget_runs": self._problem.settings.budget_runs,
                "gpu_seconds": spent.gpu_seconds,
                "best_step_s": best_step_s,
                "best_parallel": asdict(best.parallel) if best else None,
                "expected_gain_fraction": min(expected_gain, 1.0),
            },
        )


def spent_by(runs: list[RunRecord]) -> Spent:
    """What runs have cost: reused measurements are no runs, abandoned ones cost seconds only."""
    real = sum(run.state is RunState.FINISHED and REUSED not in run.predicted for run in runs)
    return Spent(profile_runs=real, gpu_seconds=sum(run.gpu_seconds or 0.0 for run in runs))


def _about(run: RunRecord) -> JsonObject:
    return {"run_id": run.id, "number": run.number, "parallel": asdict(run.parallel), "predicted": run.predicted}


def _to_try_again(runs: list[RunRecord]) -> RunRecord | None:
    """The first configuration whose last attempt was abandoned for no fault of its own."""
    last = {run.digest: run for run in runs}
    return next((run for run in last.values() if run.state is RunState.ABANDONED and run.attempt + 1 < MAX_ATTEMPTS), None)
