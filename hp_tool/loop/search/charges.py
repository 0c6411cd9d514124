"""Cost of runs: how long jobs held devices, and how long they waited in the queue."""

import contextlib
import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from datetime import UTC, datetime
from functools import partial

from hp_tool.domain.measurement import Measurement
from hp_tool.domain.ports import Launcher, Store, Timekeeping
from hp_tool.domain.records import REUSED, Lease, RunAccount, RunRecord
from hp_tool.domain.states import JobState
from hp_tool.errors import EngineAwayError, InputError, LauncherError
from hp_tool.loop.assumptions import assumed
from hp_tool.loop.search.fidelity import num_gpus
from hp_tool.loop.search.problem import Question


class Charges:
    """Queue and run times of jobs, observed by polling, for engines that do not report them."""

    def __init__(self, *, clock: Callable[[], float], carried_gpu_seconds: float = 0.0) -> None:
        """Create the record.

        `carried_gpu_seconds` is the cost of a check before the first run, which is charged to that
        run.
        """
        self._clock, self._carried = clock, carried_gpu_seconds
        self._started_at: dict[str, float] = {}
        self._running_since: dict[str, float] = {}
        self._waiting_until: dict[str, float] = {}
        self._lasted_s: dict[str, float] = {}

    def start(self, run: RunRecord) -> bool:
        """Record that a run was submitted, now or by an earlier coordinator.

        Return False if this is already recorded.
        """
        if run.id in self._started_at:
            return False
        self._started_at[run.id] = self._clock() - submitted_ago_s(run)
        return True

    def watch(self, states: Mapping[str, JobState]) -> None:
        """Record the job states, by run id."""
        for run_id, state in states.items():
            if state is JobState.RUNNING:
                self._running_since.setdefault(run_id, self._clock())
            elif state is JobState.QUEUED:  # Or queued again.
                self._running_since.pop(run_id, None)
                self._waiting_until[run_id] = self._clock()

    def end(self, run: RunRecord, handle: str, *, launcher: Launcher) -> None:
        """Record how long an ended job held devices, if the engine reports it."""
        with contextlib.suppress(LauncherError):  # Otherwise use the observed time.
            if (
                isinstance(launcher, Timekeeping)
                and (lasted_s := launcher.lasted_s(handle)) is not None
            ):
                self._lasted_s[run.id] = lasted_s

    def waited_s(self, run: RunRecord) -> float:
        """Return the seconds since the run was submitted."""
        now = self._clock()
        return now - self._started_at.get(run.id, now)

    def ran_s(self, run: RunRecord) -> float:
        """Return the observed time for which the job held devices, in seconds."""
        now = self._clock()
        return now - self._running_since.get(run.id, now)

    def gpu_seconds(self, run: RunRecord, measurement: Measurement) -> float:
        """Return the GPU-seconds reported by the engine, else the observed ones."""
        carried, self._carried = self._carried, 0.0
        return carried + _gpu_seconds(
            run, wall_s=measurement.wall_s, ran_s=self._longest_s(run, measurement)
        )

    def account(self, run: RunRecord, measurement: Measurement) -> RunAccount:
        """Return the job's data to store with the measurement.

        Empty if the run was never submitted.
        """
        if run.id not in self._started_at or REUSED in run.predicted:
            return {}
        waited_s = self._lasted_s.get(run.id, self.waited_s(run))
        return _account(measurement, waited_s=waited_s, ran_s=self._longest_s(run, measurement))

    def _longest_s(self, run: RunRecord, measurement: Measurement) -> float:
        """Return the longest time for which the job may have held devices, in seconds."""
        if (
            run.id in self._running_since
            or measurement.refused
            or measurement.status == "preempted"
        ):
            return self.ran_s(run)
        return min(self.waited_s(run), self._clock() - self._waiting_until.get(run.id, -math.inf))


def end_run(
    run: RunRecord,
    *,
    store: Store,
    launcher: Launcher,
    lease: Lease,
    cause: str,
    ran_s: float = 0.0,
) -> None:
    """End an open run's job with all its processes, and abandon the run.

    Its GPU-seconds are those in the job's record, else its observed run time `ran_s`; the sweep
    corrects them later. If the engine is unreachable, the call does not wait. The search ends, and
    the sweep ends the job.
    """
    try:
        launcher.cancel(run.job_name)
    except EngineAwayError as error:
        raise LauncherError(error.message) from error
    except OSError:  # The runs folder is not writable.
        if run.handle is not None or launcher.find(run.job_name) is not None:
            raise
        # There is no job. If a delayed worker submits it later, that worker or the sweep ends it.
    known = Measurement(status="preempted")
    with contextlib.suppress(Exception):  # The job is cancelled, and the run must end.
        handle = launcher.find(run.job_name)
        known = known if handle is None else launcher.fetch(handle)
    gpu_seconds = _gpu_seconds(run, wall_s=known.wall_s, ran_s=ran_s)
    account = with_log(_account(known, waited_s=submitted_ago_s(run), ran_s=ran_s), known)
    store.abandon_run(
        lease=lease, run_id=run.id, cause=cause, gpu_seconds=gpu_seconds, account=account
    )


def finish_run(
    run: RunRecord,
    measurement: Measurement,
    *,
    store: Store,
    lease: Lease,
    problem: Question,
    gpu_seconds: float,
    account: RunAccount,
) -> RunRecord:
    """Store a run's measurement. If the database rejects its text, the run counts as crashed."""
    store_it = partial(
        store.finish_run, lease=lease, run_id=run.id, gpu_seconds=gpu_seconds, account=account
    )
    try:
        return store_it(measurement=problem.new_measurement(run=run, measurement=measurement))
    except InputError as error:
        cause = f"its result cannot be stored: {error.message}"
        crashed = Measurement(
            status="crashed", cause=cause, wall_s=measurement.wall_s, log_tail=measurement.log_tail
        )
        return store_it(measurement=problem.new_measurement(run=run, measurement=crashed))


def fetch_ended_job(launcher: Launcher, handle: str, state: JobState) -> Measurement:
    """Return the run time, nodes and log of a job that has ended, was cancelled or was lost."""
    cause = f"the engine ended the job: {state}"
    try:
        known = launcher.fetch(handle)
    except (LauncherError, OSError):
        return Measurement(status="preempted", cause=cause)
    return Measurement(
        status="preempted",
        cause=known.cause if known.status == "preempted" and known.cause else cause,
        hardware=known.hardware,
        wall_s=known.wall_s,
        log_tail=known.log_tail,
        suspects=known.suspects,
    )


def with_log(account: RunAccount, measurement: Measurement) -> RunAccount:
    """Return the account of an abandoned run with the nodes and log of its measurement.

    An abandoned run has no stored measurement.
    """
    traces: RunAccount = {}
    if measurement.hardware is not None:
        traces["hosts"] = list(measurement.hardware.hosts)
    if measurement.log_tail:
        traces["log_tail"] = measurement.log_tail
    if measurement.suspects:
        traces["suspects"] = list(measurement.suspects)
    return {**account, **traces}


def failed_hosts(runs: Sequence[RunRecord]) -> tuple[str, ...]:
    """Return the nodes that may have caused at least `Search.node_failures` failed runs."""
    suspected = Counter(host for run in runs for host in (run.account or {}).get("suspects", ()))
    return tuple(
        sorted(host for host, count in suspected.items() if count >= assumed().search.node_failures)
    )


def submitted_ago_s(run: RunRecord) -> float:
    """Return the seconds since the run was submitted; 0 if it was never submitted."""
    if run.submitted_at is None:
        return 0.0
    return max((datetime.now(UTC) - run.submitted_at).total_seconds(), 0.0)


def _account(measurement: Measurement, *, waited_s: float, ran_s: float) -> RunAccount:
    wall_s = ran_s if measurement.wall_s is None else measurement.wall_s
    return {"queue_s": max(waited_s - wall_s, 0.0), "wall_s": wall_s}


def _gpu_seconds(run: RunRecord, *, wall_s: float | None, ran_s: float) -> float:
    return (ran_s if wall_s is None else wall_s) * num_gpus(run.parallel, run.fidelity)
