"""Jobs on a Slurm cluster. Each is a batch job with a job folder.

Nodes either share the folder or write logs that are copied to it. No other state is stored.
"""

import contextlib
import fcntl
import json
import os
import re
import time
from collections.abc import Iterable, Mapping
from dataclasses import replace
from pathlib import Path

from hp_tool.cluster.launchers import jobs, readback, slurm_folder, slurm_script, torchrun
from hp_tool.cluster.launchers.jobs import measure
from hp_tool.cluster.launchers.options import SlurmOptions
from hp_tool.cluster.launchers.readback import DamagedError, path_exists
from hp_tool.cluster.launchers.slurm_controller import (
    NEVER_STARTS,
    NODE_FAULTS,
    ControllerUnreachableError,
    Job,
    Site,
    controller,
    job_state,
)
from hp_tool.cluster.launchers.slurm_folder import (
    ATTEMPTED,
    CANCEL,
    CLAIM,
    ENDED,
    JOB,
    REFUSED,
    SUBMITTED,
)
from hp_tool.domain.jobs import LaunchPlan, Waiting
from hp_tool.domain.measurement import Hardware, Measurement
from hp_tool.domain.requests import RunRequest
from hp_tool.domain.states import JobState
from hp_tool.errors import LauncherError

_CANCEL_TIMEOUT_S = 20.0


class SlurmLauncher:
    """Launch jobs on a Slurm cluster. A handle is the job name."""

    name = "slurm"

    def __init__(
        self,
        *,
        options: SlurmOptions | Mapping[str, object] | None = None,
        root: Path | str | None = None,
    ) -> None:
        """Connect to the cluster in `options`, by default from the file named by HP_SLURM_CONFIG.

        Args:
            options: Options of the cluster.
            root: Overrides the folder in the options.
        """
        self._options = SlurmOptions.create(options)
        folder = root if root is not None else self._options.folder
        self._root = (Path(folder) if folder is not None else jobs.default_root()).resolve()
        site = Site(ssh=self._options.ssh, clusters=self._options.clusters)
        self._controller = controller(poll_s=self._options.poll_s, site=site, folder=self._root)
        self._rehearsed = False

    def hardware(self) -> Hardware:
        return self._options.hardware(num_gpus=self._options.num_gpus)

    def answers(self) -> str:
        jobs_known = len(self._controller.jobs(fresh=True))
        plan = torchrun.smallest_plan(self._options, job_name="hp-doctor")
        rehearsed = self._controller.forecast(slurm_script.render(self._options, plan=plan))
        forecast = re.sub(r"^sbatch: (Job \d+ )?", "", jobs.last_line(rehearsed))
        return (
            f"Slurm responds: {jobs_known} jobs of this user known; a one-node job would be "
            f"accepted: {forecast}"
        )

    def plan(self, request: RunRequest, *, job_name: str) -> LaunchPlan:
        return torchrun.cluster_plan(request, job_name=job_name, options=self._options)

    def describe(self, plan: LaunchPlan) -> str:
        return slurm_script.render(self._options, plan=plan)

    def submit(self, plan: LaunchPlan) -> str:
        """Submit a job. If the controller is unreachable, `poll` submits it later.

        Before the first job, a test submission checks whether the site accepts jobs, so that a
        rejection is reported at once.

        Raises:
            RefusedError: Slurm rejects the job.
        """
        folder = self._folder(plan.job_name)
        job = {
            "environment": dict(plan.environment),
            "num_gpus": plan.num_gpus,
            "timeout_s": plan.timeout_s,
            "returns": list(plan.returns),
        }
        script = slurm_script.render(self._options, plan=plan)
        jobs.create_folder(
            folder, files={**plan.files, slurm_script.SCRIPT: script, JOB: json.dumps(job)}
        )
        with contextlib.suppress(ControllerUnreachableError):
            if not self._rehearsed and not path_exists(folder / ATTEMPTED):
                self._controller.forecast(script)
                self._rehearsed = True
            self._submit(folder)
        return plan.job_name

    def find(self, job_name: str) -> str | None:
        return job_name if jobs.has_file(self._folder(job_name), name=JOB) else None

    def poll(self, handles: Iterable[str]) -> dict[str, JobState]:
        return {handle: self._state_and_job(self._folder(handle))[0] for handle in handles}

    def waiting(self, handle: str) -> Waiting | None:
        folder = self._folder(handle)
        job = next(
            (known for known in self._controller.last_jobs if known.folder == str(folder)), None
        )
        if job is None or job.state != "PENDING":
            return None
        return Waiting(reason=job.reason, starts_at=job.starts_at)

    def cancel(self, job_name: str) -> None:
        """Cancel a job. Return once Slurm has accepted the request; processes end within KillWait.

        The cancel file is written first. `submit` checks it after Slurm has accepted the job, and
        the job checks it when it starts.
        """
        folder = self._folder(job_name)
        # A damaged folder cannot start a new job; a running one is cancelled by its id.
        with contextlib.suppress(DamagedError):
            jobs.create_marker(folder, CANCEL)
        deadline = time.monotonic() + _CANCEL_TIMEOUT_S
        while True:
            try:
                self._controller.cancel(
                    job for job in self._controller.jobs(fresh=True) if job.folder == str(folder)
                )
            except ControllerUnreachableError:
                if time.monotonic() > deadline:
                    raise
                time.sleep(0.5)
            else:
                return

    def open_jobs(self) -> list[str]:
        queue = self._controller.jobs(fresh=True)
        folders = {
            Path(job.folder) for job in queue if job_state(job.state, cancelled_by_us=True).is_open
        }
        return [folder.name for folder in folders if folder.parent == self._root]

    def fetch(self, handle: str) -> Measurement:
        folder = self._folder(handle)
        if not path_exists(folder / JOB):
            raise LauncherError(f"No job {handle} under {self._root}.")
        request = jobs.read_submission(folder)
        state, job = self._state_and_job(folder)
        if state.is_open:
            raise LauncherError(f"Job {handle} is still {state}.")
        if job is not None and job.state in ("COMPLETED", "FAILED"):
            slurm_folder.await_files(folder, options=self._options)
        timeout_s = 0.0 if request is None else request.timeout_s
        ending = slurm_folder.ending(folder, state=state, job=job, timeout_s=timeout_s)
        if request is None:
            return jobs.damaged_measurement(
                f"{JOB} was changed",
                ending=ending,
                log_tail=jobs.output(folder)[-4096:],
            )
        hardware = self._options.hardware(num_gpus=request.num_gpus)
        if job is not None and (hosts := self._controller.expand_hosts(job.nodes)):
            hardware = replace(hardware, hosts=hosts)
        measurement = measure(folder, ending=ending, timeout_s=timeout_s, hardware=hardware)
        if job is not None and job.state in NODE_FAULTS:
            measurement = replace(measurement, suspects=hardware.hosts)
        return measurement

    def output(self, handle: str, *, name: str | None = None) -> str:
        folder = self._folder(handle)
        slurm_folder.copy_from_logs(folder, options=self._options)
        return jobs.output(folder, name=name)

    def _folder(self, job_name: str) -> Path:
        return self._root / jobs.check_name(job_name)

    def _state_and_job(self, folder: Path) -> tuple[JobState, Job | None]:
        cancelled = path_exists(folder / CANCEL)
        if folder.is_symlink() or not path_exists(folder / JOB):
            return JobState.CANCELLED if cancelled else JobState.LOST, None
        slurm_folder.copy_claim(folder, options=self._options)
        try:
            if not path_exists(folder / SUBMITTED) and not path_exists(folder / CLAIM):
                if cancelled:
                    return JobState.CANCELLED, None
                self._submit_again(folder)
            if path_exists(folder / REFUSED):
                return JobState.FINISHED, None
            job = self._job(folder)
            if job is None and self._controller.asked_at <= _submitted_at(folder):
                # The controller's last answer is older than the job.
                return slurm_folder.state(folder), None
            job = job or self._job_from_accounting(folder)
            if job is not None and job.state == "PENDING" and job.reason in NEVER_STARTS:
                readback.write_text(folder / REFUSED, job.reason)
                self._controller.cancel([job])
                return JobState.FINISHED, job
        except ControllerUnreachableError:
            if self._controller.away_s > self._options.patience_s:
                raise
            slurm_folder.copy_from_logs(folder, options=self._options)
            return slurm_folder.state(folder), None
        state = None if job is None else job_state(job.state, cancelled_by_us=cancelled)
        if state is None or not state.is_open:
            slurm_folder.copy_from_logs(folder, options=self._options)
        if state is None and path_exists(folder / ENDED):
            state = JobState.FINISHED
        elif state is None:
            state = JobState.CANCELLED if cancelled else JobState.LOST
        if (
            state is JobState.FINISHED
            and cancelled
            and not any(path_exists(folder / name) for name in (ENDED, jobs.RESULT))
        ):
            state = JobState.CANCELLED  # The script found the mark and ran nothing.
        if state in (JobState.PREEMPTED, JobState.LOST) and jobs.has_results(folder):
            state = JobState.FINISHED  # The job wrote results before Slurm ended it.
        return state, job

    def _submit_again(self, folder: Path) -> None:
        """Retry a submission that failed earlier. A rejection now ends the job.

        A job that is already running is not submitted twice, even if it deleted its state files.
        """
        # Query again: an answer from before the job started does not list it.
        if self._job(folder, fresh=True) is not None:
            return
        try:
            self._submit(folder)
        except (ControllerUnreachableError, DamagedError):
            raise
        except LauncherError as error:
            readback.write_text(folder / REFUSED, error.message)

    def _submit(self, folder: Path) -> None:
        with readback.open_lock_file(folder, "submit.lock") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            if path_exists(folder / SUBMITTED) or path_exists(folder / CANCEL):
                return
            attempted = folder / ATTEMPTED
            job = None
            if path_exists(attempted):
                if time.time() - attempted.lstat().st_mtime < self._options.poll_s:
                    raise ControllerUnreachableError("Slurm could not accept the job yet.")
                job = self._job(folder, fresh=True)
            readback.touch(folder, ATTEMPTED)
            os.utime(attempted, follow_symlinks=False)
            script = folder / slurm_script.SCRIPT
            job_id = (
                job.id
                if job
                else self._controller.submit(
                    script, environment=_environment(folder, inherit=self._options.inherit)
                )
            )
            readback.write_json(folder / SUBMITTED, {"job_id": job_id, "time": time.time()})
            if path_exists(folder / CANCEL):  # cancelled before Slurm knew the job
                self._controller.cancel([Job(id=job_id, state="PENDING")])

    def _job(self, folder: Path, *, fresh: bool = False) -> Job | None:
        """Return the folder's queued job: the one that claimed the folder, else the newest."""
        in_folder = [job for job in self._controller.jobs(fresh=fresh) if job.folder == str(folder)]
        claim = slurm_folder.claiming_job_id(folder)
        return max(in_folder, key=lambda job: (job.id == claim, job.id), default=None)

    def _job_from_accounting(self, folder: Path) -> Job | None:
        """Return sacct's record of a job that left the queue.

        Return None if sacct has no record, or still reports the job as open.
        """
        handed_over = slurm_folder.read_submission(folder)
        job_id = slurm_folder.claiming_job_id(folder) or (
            handed_over.job_id if handed_over else None
        )
        job = self._controller.accounting_record(job_id) if job_id is not None else None
        return None if job is None or job_state(job.state, cancelled_by_us=True).is_open else job


def _submitted_at(folder: Path) -> float:
    """Return the latest time at which Slurm may have accepted the job, in seconds since 1970."""
    submission = slurm_folder.read_submission(folder)
    if submission is not None:
        return min(submission.time, time.time())
    with contextlib.suppress(FileNotFoundError, NotADirectoryError):
        return min((folder / CLAIM).lstat().st_mtime, time.time())
    return 0.0


def _environment(folder: Path, *, inherit: Iterable[str]) -> dict[str, str]:
    return torchrun.environment_elsewhere(
        json.loads((folder / JOB).read_text())["environment"], inherit=inherit
    )
