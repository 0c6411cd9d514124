"""Jobs on this very host: a folder and a supervisor process each, no daemon, no state in memory."""

from __future__ import annotations

import fcntl
import json
import subprocess
import sys
import time
from collections.abc import Iterable
from functools import cached_property
from pathlib import Path

import psutil

from hp_tool.domain.measurement import Hardware, Measurement
from hp_tool.domain.ports import JobState, LaunchPlan
from hp_tool.domain.requests import RunRequest
from hp_tool.errors import InputError, LauncherError
from hp_tool.launchers import devices, jobs, supervisor, torchrun
from hp_tool.launchers.outcome import Ending, measure, recorded

_STATES = {"cancelled": JobState.CANCELLED, "terminated": JobState.PREEMPTED}
_MARK = "HP_JOB_FOLDER"  # in every job process's environment: finds those whose supervisor was killed
_START_LIMIT_S = 30.0
_CANCEL_LIMIT_S = 30.0


class LocalLauncher:
    """The Launcher port on one host. Jobs run one at a time; a handle is the job's name."""

    name = "local"

    def __init__(self, *, root: Path | str | None = None, cpu_only: bool = False) -> None:
        """root: where the jobs' folders live (default: HP_RUNS_DIR, else the user's data folder), on a local disk."""
        self._root = Path(root).absolute() if root is not None else jobs.default_root().absolute()
        self._cpu_only = cpu_only

    @cached_property
    def _hardware(self) -> Hardware:
        return devices.detect(cpu_only=self._cpu_only)

    def hardware(self) -> Hardware:
        return self._hardware

    def answers(self) -> str:
        return f"this host: {self._hardware.num_gpus} x {self._hardware.gpu}"

    def plan(self, request: RunRequest, *, job_name: str) -> LaunchPlan:
        """Pure. Raises InputError where the request is for other devices or more of them than this host has."""
        here = self.hardware()
        if request.gpu != here.gpu or request.num_gpus > here.num_gpus:
            asked = f"{request.num_gpus} x {request.gpu}"
            raise InputError(
                f"this host has {here.num_gpus} x {here.gpu}, not {asked}", code="launcher_mismatch", field="cluster"
            )
        return LaunchPlan(
            job_name=jobs.check_name(job_name),
            command=torchrun.one_node_command(request),
            environment=torchrun.job_environment(request),
            files=torchrun.job_files(request),
            num_gpus=request.num_gpus,
            timeout_s=request.timeout_s,
            returns=torchrun.job_returns(request),
        )

    def describe(self, plan: LaunchPlan) -> str:
        return jobs.described(plan)

    def submit(self, plan: LaunchPlan) -> str:
        folder = self._folder(plan.job_name)
        job = {
            "command": list(plan.command),
            "timeout_s": plan.timeout_s,
            "num_gpus": plan.num_gpus,
            "devices_lock": str(self._root / "~devices"),
        }
        jobs.create_folder(folder, files={**plan.files, "job.json": json.dumps(job)})
        if not (folder / "started.json").exists() and not (folder / "cancel").exists():
            self._start(folder, environment=torchrun.merged(plan.environment))
        return plan.job_name

    def find(self, job_name: str) -> str | None:
        """A folder whose job never started counts as none: submit() picks it up."""
        return job_name if (self._folder(job_name) / "started.json").exists() else None

    def poll(self, handles: Iterable[str]) -> dict[str, JobState]:
        return {handle: self._state(self._folder(handle)) for handle in handles}

    def cancel(self, job_name: str) -> None:
        """A supervisor looks for the mark after it has said that it started, and we the other way round: one sees the other."""
        folder = self._folder(job_name)
        jobs.mark(folder, "cancel")
        deadline = time.monotonic() + _CANCEL_LIMIT_S
        while self._state(folder) in (JobState.QUEUED, JobState.RUNNING):
            if time.monotonic() > deadline:
                raise LauncherError(f"job {job_name} did not end within {_CANCEL_LIMIT_S:g} s")
            time.sleep(0.02)

    def open_jobs(self) -> list[str]:
        started = (path.parent for path in self._root.glob("*/started.json"))
        return [each.name for each in started if not (each / "ended.json").exists() and _is_locked(each / "lock")]

    def fetch(self, handle: str) -> Measurement:
        """Raises LauncherError while the job has not ended."""
        folder = self._folder(handle)
        job, state = jobs.read_json(folder / "job.json"), self._state(folder)
        if job is None:
            raise LauncherError(f"no job {handle} under {self._root}")
        if state in (JobState.QUEUED, JobState.RUNNING):
            raise LauncherError(f"job {handle} is still {state}")
        hardware = devices.share(self.hardware(), num_gpus=job["num_gpus"])
        return measure(folder, ending=_ending(folder), timeout_s=job["timeout_s"], hardware=hardware)

    def output(self, handle: str, *, name: str | None = None) -> str:
        return jobs.output(self._folder(handle), name=name)

    def _folder(self, job_name: str) -> Path:
        return self._root / jobs.check_name(job_name)

    def _start(self, folder: Path, *, environment: dict[str, str]) -> None:
        """Returns once the supervisor has taken the job (it detaches from us)."""
        command = [sys.executable, "-I", supervisor.__file__, str(folder)]
        with (folder / "supervisor.log").open("ab") as log:
            try:
                done = subprocess.run(
                    command,
                    env={**environment, _MARK: str(folder)},
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=log,
                    start_new_session=True,
                    timeout=_START_LIMIT_S,
                    check=False,
                )
            except subprocess.TimeoutExpired:
                raise LauncherError(f"the supervisor of {folder.name} did not detach within {_START_LIMIT_S:g} s") from None
        deadline = time.monotonic() + _START_LIMIT_S
        while not (folder / "started.json").exists():  # at once, but for two callers in the same instant
            if done.returncode != 0 or time.monotonic() > deadline:
                raise LauncherError(f"the supervisor of {folder.name} did not start; see {folder / 'supervisor.log'}")
            time.sleep(0.02)

    def _state(self, folder: Path) -> JobState:
        if not (folder / "started.json").exists():
            return JobState.CANCELLED if (folder / "cancel").exists() else JobState.LOST
        alive = _is_locked(folder / "lock")
        ended = jobs.read_json(folder / "ended.json")  # looked at after the lock: written before it is let go
        if ended is not None:
            return _STATES.get(ended["reason"], JobState.FINISHED)
        if alive:
            return JobState.RUNNING if (folder / "running.json").exists() else JobState.QUEUED
        _end_stragglers(folder)
        return JobState.FINISHED if jobs.read_json(folder / jobs.RESULT) is not None else JobState.LOST


def _ending(folder: Path) -> Ending:
    ended = jobs.read_json(folder / "ended.json")
    return Ending(reason="lost") if ended is None else recorded(ended)


def _is_locked(path: Path) -> bool:
    """Whether a supervisor holds the lock; the kernel drops it with the process, however that ended."""
    with path.open() as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
    return False


def _end_stragglers(folder: Path) -> None:
    """Kill what a killed supervisor left behind. psutil checks the start time, so a recycled pid is never hit."""
    for process in psutil.process_iter():
        try:
            if process.environ().get(_MARK) == str(folder):
                process.kill()
        except (psutil.Error, OSError):  # ended meanwhile, or another user's
            continue
