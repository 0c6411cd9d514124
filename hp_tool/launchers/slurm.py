"""Jobs on a Slurm cluster: a folder and a batch job each, no daemon, no state in memory. The nodes share the folder or, where
`logs` are all they share, print into those."""

from __future__ import annotations

import contextlib
import fcntl
import json
import time
from collections.abc import Iterable, Mapping
from pathlib import Path

from hp_tool.domain.measurement import Hardware, Measurement
from hp_tool.domain.ports import JobState, LaunchPlan
from hp_tool.domain.requests import RunRequest
from hp_tool.errors import InputError, LauncherError
from hp_tool.launchers import jobs, slurm_folder, slurm_logs, slurm_options, slurm_script, torchrun
from hp_tool.launchers.outcome import measure
from hp_tool.launchers.slurm_controller import Controller, ControllerAway, Job
from hp_tool.launchers.slurm_folder import ATTEMPTED, CANCEL, CLAIM, ENDED, JOB, REFUSED, SUBMITTED
from hp_tool.launchers.slurm_options import SlurmOptions
from hp_tool.launchers.slurm_states import NEVER_STARTS, job_state

_OPEN = (JobState.QUEUED, JobState.RUNNING)
_CANCEL_PATIENCE_S = 20.0


class SlurmLauncher:
    """The Launcher port on a Slurm cluster. A handle is the job's name."""

    name = "slurm"

    def __init__(self, *, options: SlurmOptions | Mapping[str, object] | None = None, root: Path | str | None = None) -> None:
        """options: the cluster (default: the file that HP_SLURM_CONFIG names); root: in place of the options' folder."""
        if isinstance(options, Mapping):
            options = slurm_options.parse(options, origin="the options of the Slurm launcher")
        self._options = options if options is not None else slurm_options.load()
        folder = root if root is not None else self._options.folder
        self._root = (Path(folder) if folder is not None else jobs.default_root()).resolve()
        self._controller = Controller(poll_s=self._options.poll_s)

    def hardware(self) -> Hardware:
        return self._share(self._options.num_gpus)

    def answers(self) -> str:
        return f"Slurm answers: {len(self._controller.jobs(fresh=True))} jobs of this user in its memory"

    def plan(self, request: RunRequest, *, job_name: str) -> LaunchPlan:
        """Pure. Raises InputError where the request is for other devices or more of them than one job may have."""
        options = self._options
        if request.gpu != options.gpu:
            message = f"this Slurm cluster has {options.gpu}, not {request.gpu}"
            raise InputError(message, code="launcher_mismatch", field="cluster")
        nodes = jobs.num_nodes(request, gpus_per_node=options.gpus_per_node, max_nodes=options.max_nodes)
        return LaunchPlan(
            job_name=jobs.check_name(job_name),
            command=torchrun.multi_node_command(request, num_nodes=nodes, python=options.python),
            environment=torchrun.job_environment(request, num_hosts=nodes, operator=options.environment),
            files=torchrun.job_files(request),
            num_gpus=request.num_gpus,
            timeout_s=request.timeout_s,
            returns=torchrun.job_returns(request),
        )

    def describe(self, plan: LaunchPlan) -> str:
        return slurm_script.render(self._options, plan=plan)

    def submit(self, plan: LaunchPlan) -> str:
        """Raises LauncherError where Slurm refuses the job. One that it cannot be asked about waits here for its answer."""
        folder = self._folder(plan.job_name)
        job = {
            "environment": dict(plan.environment),
            "num_gpus": plan.num_gpus,
            "timeout_s": plan.timeout_s,
            "returns": list(plan.returns),
        }
        script = slurm_script.render(self._options, plan=plan)
        jobs.create_folder(folder, files={**plan.files, slurm_script.SCRIPT: script, JOB: json.dumps(job)})
        with contextlib.suppress(ControllerAway):  # poll() goes on trying
            self._submit(folder)
        return plan.job_name

    def find(self, job_name: str) -> str | None:
        return job_name if (self._folder(job_name) / JOB).exists() else None

    def poll(self, handles: Iterable[str]) -> dict[str, JobState]:
        """Raises LauncherError once the controller has been away for longer than the options' patience."""
        return {handle: self._look(self._folder(handle))[0] for handle in handles}

    def cancel(self, job_name: str) -> None:
        """Returns once Slurm has taken the order; it ends the processes, within its KillWait at most.

        The mark in the folder comes first. A submit looks for it once Slurm has accepted the job, and the job when it starts.
        """
        folder = self._folder(job_name)
        jobs.mark(folder, CANCEL)
        deadline = time.monotonic() + _CANCEL_PATIENCE_S
        while True:
            try:
                self._controller.cancel(job.id for job in self._controller.jobs(fresh=True) if job.folder == str(folder))
            except ControllerAway:
                if time.monotonic() > deadline:
                    raise
                time.sleep(0.5)
            else:
                return

    def open_jobs(self) -> list[str]:
        queue = self._controller.jobs(fresh=True)
        folders = {Path(job.folder) for job in queue if job_state(job.state, cancelled_by_us=True) in _OPEN}
        return [folder.name for folder in folders if folder.parent == self._root]

    def fetch(self, handle: str) -> Measurement:
        """Raises LauncherError while the job has not ended."""
        folder = self._folder(handle)
        asked = jobs.read_json(folder / JOB)
        if asked is None:
            raise LauncherError(f"no job {handle} under {self._root}")
        state, job = self._look(folder)
        if state in _OPEN:
            raise LauncherError(f"job {handle} is still {state}")
        if job is not None and job.state in ("COMPLETED", "FAILED"):
            slurm_folder.await_files(folder, bring=lambda: slurm_logs.bring(folder, options=self._options))
        ending = slurm_folder.ending(folder, state=state, job=job, timeout_s=asked["timeout_s"])
        return measure(folder, ending=ending, timeout_s=asked["timeout_s"], hardware=self._share(asked["num_gpus"]))

    def output(self, handle: str, *, name: str | None = None) -> str:
        folder = self._folder(handle)
        slurm_logs.bring(folder, options=self._options)
        return jobs.output(folder, name=name)

    def _share(self, num_gpus: int) -> Hardware:
        return Hardware(gpu=self._options.gpu, num_gpus=num_gpus, hosts=(self._options.name,))

    def _folder(self, job_name: str) -> Path:
        return self._root / jobs.check_name(job_name)

    def _look(self, folder: Path) -> tuple[JobState, Job | None]:
        """The job's state, with what Slurm says about it where it says anything."""
        cancelled = (folder / CANCEL).exists()
        if not (folder / JOB).exists():
            return JobState.CANCELLED if cancelled else JobState.LOST, None
        slurm_logs.bring_claim(folder, options=self._options)
        try:
            if not (folder / SUBMITTED).exists() and not (folder / CLAIM).exists():
                if cancelled:
                    return JobState.CANCELLED, None
                self._submit_again(folder)
            if (folder / REFUSED).exists():
                return JobState.FINISHED, None
            # An answer from before the job was accepted does not know it: ask again before it counts as gone.
            job = self._job(folder) or self._job(folder, fresh=True) or self._accounted(folder)
            if job is not None and job.state == "PENDING" and job.reason in NEVER_STARTS:
                (folder / REFUSED).write_text(job.reason)
                self._controller.cancel([job.id])
                return JobState.FINISHED, job
        except ControllerAway:
            if self._controller.away_s > self._options.patience_s:
                raise
            slurm_logs.bring(folder, options=self._options)
            return slurm_folder.state(folder), None
        if job is None or job_state(job.state, cancelled_by_us=cancelled) not in _OPEN:
            slurm_logs.bring(folder, options=self._options)
        if job is not None:
            state = job_state(job.state, cancelled_by_us=cancelled)
        elif (folder / ENDED).exists():
            state = JobState.FINISHED
        else:
            state = JobState.CANCELLED if cancelled else JobState.LOST
        if state in (JobState.PREEMPTED, JobState.LOST) and jobs.read_json(folder / jobs.RESULT) is not None:
            state = JobState.FINISHED  # it was done before it was taken away
        return state, job

    def _submit_again(self, folder: Path) -> None:
        """For a job that the controller has not yet been able to accept; a refusal now is how it ended."""
        try:
            self._submit(folder)
        except ControllerAway:
            raise
        except LauncherError as error:
            (folder / REFUSED).write_text(error.message)

    def _submit(self, folder: Path) -> None:
        """Have the controller accept the folder's job, unless it already has or the job is cancelled."""
        with (folder / "submit.lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            if (folder / SUBMITTED).exists() or (folder / CANCEL).exists():
                return
            attempted = folder / ATTEMPTED
            known = None
            if attempted.exists():
                if time.time() - attempted.stat().st_mtime < self._options.poll_s:
                    raise ControllerAway("Slurm could not take the job yet")
                known = self._job(folder, fresh=True)
            attempted.touch()
            script = folder / slurm_script.SCRIPT
            job_id = known.id if known else self._controller.submit(script, environment=_environment(folder))
            jobs.write_json(folder / SUBMITTED, {"job_id": job_id, "time": time.time()})
            if (folder / CANCEL).exists():  # by somebody who may have looked before Slurm knew the job
                self._controller.cancel([job_id])

    def _job(self, folder: Path, *, fresh: bool = False) -> Job | None:
        """The folder's job in the queue: the one that claimed it, else the newest."""
        ours = [job for job in self._controller.jobs(fresh=fresh) if job.folder == str(folder)]
        claim = slurm_folder.claimed_by(folder)
        return max(ours, key=lambda job: (job.id == claim, job.id), default=None)

    def _accounted(self, folder: Path) -> Job | None:
        """What the accounting says of a job that left the queue; one that it believes to be open is lost to both."""
        submitted = jobs.read_json(folder / SUBMITTED)
        job_id = slurm_folder.claimed_by(folder) or (submitted["job_id"] if submitted else None)
        job = self._controller.accounted(job_id) if job_id is not None else None
        return None if job is None or job_state(job.state, cancelled_by_us=True) in _OPEN else job


def _environment(folder: Path) -> dict[str, str]:
    """What sbatch hands to the job: our own variables (none that are secret), then the plan's."""
    environment = torchrun.merged(json.loads((folder / JOB).read_text())["environment"])
    environment.pop("CUDA_VISIBLE_DEVICES", None)  # this host's; Slurm sets the job's own
    return environment
