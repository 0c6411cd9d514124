"""The loop of one search: propose, store the intent, submit, poll, fetch, store, learn, repeat.

All I/O goes through ports. If this process dies, the next coordinator continues with the intended
runs in the store and the submitted jobs in the engine. Finished runs are never repeated, and
running jobs are found by name.
"""

import contextlib
import math
from collections.abc import Callable, Mapping
from dataclasses import asdict, replace

from hp_tool.domain.measurement import KILLED_CAUSE, Measurement
from hp_tool.domain.ports import Launcher, Queueing, Store
from hp_tool.domain.records import (
    REUSED,
    JsonObject,
    Lease,
    RunAccount,
    RunRecord,
    SearchRecord,
)
from hp_tool.domain.states import JobState
from hp_tool.errors import (
    ConflictError,
    EngineAwayError,
    InputError,
    LauncherError,
    LimitError,
    RefusedError,
)
from hp_tool.loop.assumptions import assumed
from hp_tool.loop.search.account import Outcome, open_runs, progress_of, startup_s, with_budget
from hp_tool.loop.search.charges import (
    Charges,
    end_run,
    failed_hosts,
    fetch_ended_job,
    finish_run,
    with_log,
)
from hp_tool.loop.search.fidelity import WHOLE, extrapolate
from hp_tool.loop.search.planner import Nothing, Planner, find_retry
from hp_tool.loop.search.problem import Question
from hp_tool.loop.search.rivals import Share, split_job
from hp_tool.loop.search.study import StudyProjection
from hp_tool.loop.search.terms import Site, Timing
from hp_tool.loop.search.underway import Watched

FULL_POLL_S = 1.0
"""Seconds between checks whether the cluster has room for a run."""
MAX_ENGINE_FAILURES = 20
"""Maximum number of consecutive polls that the engine does not answer."""
FOLDER_PATIENCE_S = 300.0
"""Seconds that a coordinator waits for a runs folder, an engine, or room on its cluster.

After that, the search returns to the queue. Another host may work, and this search may be the only
one that can end the runs that fill the cluster.
"""
LONGEST_FOLDER_WAIT_S = 5.0
Report = Callable[[str, JsonObject], None]


class _Stop(Exception):  # noqa: N818 - not an error: unwinds the loop between and during runs
    def __init__(self, outcome: Outcome) -> None:
        self.outcome = outcome


class Coordinator:
    """Coordinate one search under its lease. Instances are neither reusable nor thread-safe."""

    def __init__(
        self,
        *,
        store: Store,
        launcher: Launcher,
        lease: Lease,
        problem: Question,
        projection: StudyProjection,
        site: Site,
        timing: Timing,
        reusable: Mapping[str, str] | None = None,
        report: Report = lambda kind, payload: None,
        should_release: Callable[[], bool] = lambda: False,
    ) -> None:
        """Create the coordinator.

        Args:
            reusable: Ids of stored measurements that replace runs, by configuration digest.
            report: Called with each event.
            should_release: Returns True if this process should exit. The search then returns to the
                queue, and its job keeps running for the next coordinator.
        """
        self._store, self._launcher, self._lease, self._problem = store, launcher, lease, problem
        self._projection = projection
        self._planner = Planner(
            problem=problem,
            projection=projection,
            available_gpus=launcher.hardware().num_gpus,
            reusable=reusable or {},
        )
        self._site, self._timing = site, timing
        self._report, self._should_release = report, should_release
        self._renewed_at = -float("inf")
        self._charges = Charges(clock=timing.clock, carried_gpu_seconds=site.check_gpu_seconds)
        self._watched = Watched(launcher=launcher, clock=timing.clock)
        self._pending: JsonObject | None = None
        self._expected_gain: float | None = None
        self._waiting_for: str | None = None
        self._waiting_since, self._full_since = 0.0, timing.clock()

    def run(self) -> Outcome:
        """Coordinate the search until there is a reason to stop.

        Raises:
            ConflictError: Another coordinator took over (`lease_lost`). Jobs are left unchanged.
            LauncherError: The engine stays unreachable.
        """
        try:
            self._progress(
                self._runs()
            )  # What an earlier coordinator waited for may be available now.
            while True:
                try:
                    self._turn()
                except (OSError, EngineAwayError) as error:
                    self._wait_out(error)
        except _Stop as stop:
            outcome = replace(stop.outcome, expected_gain_fraction=self._expected_gain)
        except KeyboardInterrupt:
            with contextlib.suppress(
                LauncherError, OSError
            ):  # A run that cannot be ended is left to the coordinator that resumes the search.
                self._end_open_jobs(cause="interrupted")
            outcome = Outcome(state="paused", stopped_because="interrupted")
        self._projection.sync(self._runs())
        return outcome

    def _turn(self) -> None:
        """Start one more run if there is room and enough expected gain.

        Otherwise, wait for running jobs.

        Raises:
            _Stop: The search ends.
        """
        record = self._heartbeat(every_s=0.0)
        unfinished = open_runs(runs := self._runs())
        pausing = record is not None and record.requested == "pause"
        room = (
            len(unfinished) < self._problem.settings.parallel_runs
            and not pausing
            and self._has_room()
        )
        try:
            reason = self._next(runs) if room else None
        except LimitError:  # Another search took the room.
            room, reason = False, None
        self._full_since = self._timing.clock() if room or unfinished else self._full_since
        if room and reason is None:
            return
        if unfinished:
            self._advance(unfinished)
        elif pausing:
            raise _Stop(Outcome(state="paused", stopped_because="paused"))
        elif not room:  # Other searches use the whole cluster.
            if self._timing.clock() - self._full_since > FOLDER_PATIENCE_S:
                raise _Stop(Outcome(state="released", stopped_because="released"))
            self._timing.sleep(FULL_POLL_S)
        else:
            raise _Stop(Outcome(state="succeeded", stopped_because=reason or "space_exhausted"))

    def _wait_out(self, error: OSError | EngineAwayError) -> None:
        """Wait before a retry, and report the reason.

        The runs folder is full, read-only or unreachable, or the engine is unreachable.
        """
        now = self._timing.clock()
        if self._waiting_for is None:
            what = (
                f"{error.strerror or error}: {error.filename}"
                if isinstance(error, OSError)
                else error.message
            )
            self._waiting_for, self._waiting_since = what, now
            payload = {"waiting_for": self._waiting_for}
            self._progress(self._runs())
            self._store.append_event(lease=self._lease, kind="waiting", payload=payload)
            self._report("waiting", payload)
        waited_s = now - self._waiting_since
        if waited_s > FOLDER_PATIENCE_S:
            raise _Stop(Outcome(state="released", stopped_because="released"))
        self._timing.sleep(min(max(waited_s, self._timing.poll_s), LONGEST_FOLDER_WAIT_S))

    def _stop_waiting(self) -> None:
        """Report that the engine and its folder are reachable again."""
        if self._waiting_for is not None:
            self._waiting_for = None
            self._progress(self._runs())

    def _next(self, runs: list[RunRecord]) -> str | None:
        """Choose the next run and store the intent. Return why, if no run is worth its cost."""
        self._projection.sync(runs)
        proposal = self._projection.proposal() if find_retry(runs) is None else None
        decision = self._planner.decide(runs, proposal)
        if find_retry(runs) is None:
            gain = proposal.expected_further_gain if proposal else 0.0
            self._expected_gain = gain if math.isfinite(gain) else None
        self._progress(runs)
        if isinstance(decision, Nothing):
            return decision.reason
        run = self._store.intend_run(
            lease=self._lease,
            parallel=decision.parallel,
            fidelity=decision.fidelity,
            predicted=decision.predicted,
            limit=self._site.limit,
        )
        if run.state.ended:  # Without its measurement it would be proposed forever.
            raise ConflictError(
                f"Run {run.number} has ended, but its measurement is missing, so this search "
                "cannot continue. Start a new search with the same query.",
                code="measurement_missing",
            )
        if decision.trial is not None and decision.calibration is not None:
            self._projection.bind(trial=decision.trial, run=run)
            payload = {
                "run_id": run.id,
                "number": run.number,
                "parallel": asdict(run.parallel),
                "calibrated_step_s": decision.predicted["calibrated_step_s"],
                "chosen_by": decision.predicted["chosen_by"],
                "hold_probability": decision.predicted["hold_probability"],
                "calibration": decision.calibration.summary(),
            }
            self._store.append_event(lease=self._lease, kind="proposed", payload=payload)
        return None

    def _has_room(self) -> bool:
        """Return True if the cluster has room for a run.

        This is only checked before planning; `intend_run` makes the decision.
        """
        limit = self._site.limit
        return limit is None or self._store.count_open_runs(cluster=limit.cluster) < limit.runs

    def _advance(self, unfinished: list[RunRecord]) -> None:
        """Submit intended runs, and wait until a job has ended.

        Intended runs include those of an earlier coordinator.
        """
        waiting: dict[str, RunRecord] = {}
        for run in unfinished:
            if REUSED in run.predicted:
                earlier = self._store.get_measurement(measurement_id=run.predicted[REUSED])
                self._finish(run, earlier.measurement, gpu_seconds=0.0)
                return
            if self._charges.start(run):
                self._report("run_started", _about(run))
            try:
                waiting[run.handle or self._submit(run)] = run
            except RefusedError as error:
                self._refuse(run, error.message)
                return
            except EngineAwayError:
                if not waiting:  # Otherwise retried once one of those has ended.
                    raise
            except LauncherError as error:
                self._give_back(
                    run, Measurement(status="crashed", cause=f"not submitted: {error.message}")
                )
                return
            except InputError as error:
                # There is no further attempt, and the search continues.
                self._finish(
                    run,
                    Measurement(status="crashed", cause=f"not submitted: {error.message}"),
                    gpu_seconds=0.0,
                )
                return
        for handle, state in self._wait(waiting).items():
            self._end(waiting[handle], handle, state)

    def _end(self, run: RunRecord, handle: str, state: JobState) -> None:
        self._charges.end(run, handle, launcher=self._launcher)
        measurement = (
            self._launcher.fetch(handle)
            if state is JobState.FINISHED
            else fetch_ended_job(self._launcher, handle, state)
        )
        if measurement.refused:
            self._refuse(run, measurement.cause or "the job never began", measurement)
        elif measurement.cause == KILLED_CAUSE and any(
            each.digest == run.digest and each.cause == KILLED_CAUSE for each in self._runs()
        ):
            blamed = replace(measurement, status="crashed")
            self._finish(run, blamed, gpu_seconds=self._charges.gpu_seconds(run, blamed))
        elif measurement.status == "preempted":
            self._give_back(run, measurement)
        else:
            self._finish(run, measurement, gpu_seconds=self._charges.gpu_seconds(run, measurement))

    def _refuse(self, run: RunRecord, cause: str, measurement: Measurement | None = None) -> None:
        """Give up the run and end the search, because the site would also reject other runs.

        If the site has already run jobs of this search, and rejected this one for its size or
        because a node failed, the search ends with its results so far.

        Raises:
            RefusedError: The site ran no job of this search.
            _Stop: The search ends with its results.
        """
        with contextlib.suppress(LauncherError, OSError):
            self._launcher.cancel(run.job_name)
        self._abandon(
            run, replace(measurement or Measurement(status="crashed", wall_s=0.0), cause=cause)
        )
        if any(
            each.measurement is not None and each.measurement.status == "ok"
            for each in self._runs()
        ):
            self._end_open_jobs(cause="the site refused a run")
            raise _Stop(Outcome(state="succeeded", stopped_because="refused"))
        raise RefusedError(f"the cluster rejected the job: {cause}")

    def _give_back(self, run: RunRecord, measurement: Measurement) -> None:
        """Abandon an attempt that failed for external reasons.

        Retry up to `Search.attempts` times.
        """
        with contextlib.suppress(
            LauncherError, OSError
        ):  # The sweeper cancels jobs that an unreachable engine still runs.
            self._launcher.cancel(run.job_name)
        if run.attempt + 1 >= assumed().search.attempts:
            self._finish(run, measurement, gpu_seconds=self._charges.gpu_seconds(run, measurement))
        else:
            self._abandon(run, measurement)

    def _abandon(self, run: RunRecord, measurement: Measurement) -> None:
        """Store a run that failed for external reasons as abandoned.

        Its GPU-seconds, nodes and log are stored with it.
        """
        cause, gpu_seconds = (
            measurement.cause or measurement.status,
            self._charges.gpu_seconds(run, measurement),
        )
        account = with_log(self._charges.account(run, measurement), measurement)
        self._store.abandon_run(
            lease=self._lease, run_id=run.id, cause=cause, gpu_seconds=gpu_seconds, account=account
        )
        self._report("run_abandoned", {**_about(run), "cause": cause})

    def _runs(self) -> list[RunRecord]:
        return self._store.runs(search_id=self._lease.search_id)

    def _submit(self, run: RunRecord) -> str:
        """Start the job of a stored intent, or find it if it is running.

        The run's job name makes this idempotent.
        """
        runs = self._runs()
        seen_s = startup_s(runs, settings=self._problem.settings)
        request = self._problem.request(
            run, best_step_s=self._planner.best_step_s(run, runs), startup_s=seen_s
        )
        plan = self._launcher.plan(request, job_name=run.job_name)
        excluded = tuple(dict.fromkeys((*self._site.avoided_hosts, *failed_hosts(runs))))
        plan = replace(plan, excluded_hosts=excluded, search=run.search_id, owner=self._site.owner)
        handle = self._launcher.submit(plan)
        try:
            self._store.mark_submitted(lease=self._lease, run_id=run.id, handle=handle)
        except ConflictError:
            # While this process was delayed, another coordinator took over. If it adopted the run,
            # it watches this job. If the run or its search has ended, no one watches the job.
            now = self._store.get_run(search_id=run.search_id, run_id=run.id)
            if now.state.ended or self._store.get_search(search_id=run.search_id).state.ended:
                self._launcher.cancel(run.job_name)
            raise
        return handle

    def _wait(self, handles: Mapping[str, RunRecord]) -> dict[str, JobState]:
        """Poll until a job has ended. Return the ended jobs and their states.

        Meanwhile, renew the lease and check for a cancel.
        """
        failures = 0
        while True:
            states: dict[str, JobState] = {}
            try:
                answer = self._launcher.poll(list(handles))
                states = {handle: answer.get(handle, JobState.LOST) for handle in handles}
                failures = 0
            except LauncherError:
                failures += 1
                if failures >= MAX_ENGINE_FAILURES:
                    raise
            if states:
                self._charges.watch({handles[handle].id: state for handle, state in states.items()})
                self._tell_pending(handles, states)
                if self._watched.look(handles, states):
                    self._progress(self._runs())
            if ended := {handle: state for handle, state in states.items() if not state.is_open}:
                return ended
            if states:
                self._stop_waiting()
                self._enforce_queue_timeout(handles, states)
            self._heartbeat(every_s=min(self._timing.lease_s / 3, 2.0))
            self._timing.sleep(self._timing.poll_s)

    def _tell_pending(
        self, handles: Mapping[str, RunRecord], states: Mapping[str, JobState]
    ) -> None:
        queued = [handle for handle, state in states.items() if state is JobState.QUEUED]
        waiting = (
            self._launcher.waiting(queued[0])
            if queued and isinstance(self._launcher, Queueing)
            else None
        )
        pending = (
            None
            if not queued
            else {"runs": len(queued), **({} if waiting is None else asdict(waiting))}
        )
        if pending == self._pending:
            return
        reason, before = (
            None if each is None else each.get("reason") for each in (pending, self._pending)
        )
        self._pending = pending
        self._progress(self._runs())
        if pending is not None and reason != before:  # The expected start changes constantly.
            run = handles[queued[0]]
            payload = {"run_id": run.id, "number": run.number, **pending}
            self._store.append_event(lease=self._lease, kind="pending", payload=payload)
            self._report("pending", payload)

    def _enforce_queue_timeout(
        self, handles: Mapping[str, RunRecord], states: Mapping[str, JobState]
    ) -> None:
        """Cancel a run that exceeded its queue timeout, and end the search.

        Raises:
            LauncherError: Nothing was measured (`queue_timeout`).
            _Stop: The search ends with its results.
        """
        limit_s = self._problem.settings.queue_timeout_s
        late = [
            handles[handle]
            for handle, state in states.items()
            if state is JobState.QUEUED
            and limit_s is not None
            and self._charges.waited_s(handles[handle]) > limit_s
        ]
        if not late:
            return
        reason = (self._pending or {}).get("reason")
        cause = f"not started within search.queue_timeout_s of {limit_s:g} s" + (
            f" ({reason})" if reason else ""
        )
        self._end_open_jobs(cause=cause)
        if any(
            each.measurement is not None and each.measurement.status == "ok"
            for each in self._runs()
        ):
            raise _Stop(Outcome(state="succeeded", stopped_because="queue_timeout"))
        raise LauncherError(
            f"run {late[0].number} was {cause}",
            code="queue_timeout",
            field="search.queue_timeout_s",
        )

    def _finish(self, run: RunRecord, measurement: Measurement, *, gpu_seconds: float) -> None:
        account = self._charges.account(run, measurement)
        own, *beside = split_job(run, measurement, gpu_seconds=gpu_seconds)
        for share, row in zip(beside, self._problem.rival_rows(run), strict=False):
            config = self._problem.candidates.config(row)
            rival = self._store.intend_run(
                lease=self._lease, parallel=config, fidelity=WHOLE, predicted=share.predicted
            )
            self._store_end(rival, share, account={})
        # Do this last, so that the job can still be found if this worker dies earlier.
        self._store_end(run, own, account=account)
        self._stop_waiting()

    def _store_end(self, run: RunRecord, share: Share, *, account: RunAccount) -> None:
        measurement = extrapolate(run, share.measurement, runs=self._runs())
        stored = finish_run(
            run,
            measurement,
            store=self._store,
            lease=self._lease,
            problem=self._problem,
            gpu_seconds=share.gpu_seconds,
            account=account,
        )
        outcome = stored.measurement or measurement
        step = {"step_s": outcome.objective_s, "reduced": not run.fidelity.is_whole}
        self._report(
            "run_finished",
            {**_about(run), "status": outcome.status, "cause": outcome.cause, **step},
        )

    def _heartbeat(self, *, every_s: float) -> SearchRecord | None:
        """Renew the lease when it is due. Carry out a cancel or release at once.

        A cancel ends the running job. A release leaves it to the next coordinator. A pause lets it
        finish, because most of its cost is already spent; the loop checks the returned record.
        """
        if self._should_release():
            raise _Stop(Outcome(state="released", stopped_because="released"))
        if self._timing.clock() - self._renewed_at < every_s:
            return None
        record = self._store.renew_lease(lease=self._lease, lease_s=self._timing.lease_s)
        self._renewed_at = self._timing.clock()
        self._follow_budget(record)
        if record.requested == "cancel":
            self._end_open_jobs(cause="cancelled")
            raise _Stop(Outcome(state="cancelled", stopped_because="cancelled"))
        return record

    def _follow_budget(self, record: SearchRecord) -> None:
        settings = with_budget(self._problem.settings, stored=record.query.get("search") or {})
        if settings != self._problem.settings:
            self._problem = replace(self._problem, settings=settings)
            self._planner = replace(self._planner, problem=self._problem)

    def _end_open_jobs(self, *, cause: str) -> None:
        """End the jobs of all open runs with all their processes, and store this."""
        for run in open_runs(self._runs()):
            ran_s = self._charges.ran_s(run)
            end_run(
                run,
                store=self._store,
                launcher=self._launcher,
                lease=self._lease,
                cause=cause,
                ran_s=ran_s,
            )

    def _progress(self, runs: list[RunRecord]) -> None:
        progress = progress_of(
            runs, budget_runs=self._problem.settings.budget_runs, expected_gain=self._expected_gain
        )
        beside = {
            "waiting_for": self._waiting_for,
            "pending": self._pending,
            "underway": self._watched.jobs or None,
        }
        self._store.set_progress(
            lease=self._lease,
            progress=progress | {k: v for k, v in beside.items() if v is not None},
        )


def _about(run: RunRecord) -> JsonObject:
    return {
        "run_id": run.id,
        "number": run.number,
        "parallel": asdict(run.parallel),
        "predicted": run.predicted,
    }
