"""Jobs on this host, each with its own folder and supervisor. Detects GPUs without torch."""

import contextlib
import fcntl
import json
import os
import re
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Iterable
from dataclasses import replace
from functools import cached_property
from pathlib import Path

import psutil

from hp_tool.cluster.launchers import jobs, readback, supervisor, torchrun
from hp_tool.cluster.launchers.jobs import measure, parse_ending
from hp_tool.cluster.launchers.readback import DamagedError
from hp_tool.domain.device_names import catalogue_gpu_name
from hp_tool.domain.jobs import LaunchPlan
from hp_tool.domain.measurement import Hardware, Measurement
from hp_tool.domain.requests import RunRequest
from hp_tool.domain.states import JobState
from hp_tool.errors import InputError, LauncherError

_STATES = {"cancelled": JobState.CANCELLED, "terminated": JobState.PREEMPTED, "lost": JobState.LOST}
# Set in every job process, to find the processes after their supervisor was killed.
_FOLDER_VARIABLE = "HP_JOB_FOLDER"
_STARTED, _ENDED, _CANCEL = "started.json", "ended.json", "cancel"
_END_TIMEOUT_S = 10.0
"""Maximum number of seconds in which the supervisor of a damaged folder must end its job."""
_START_TIMEOUT_S = 30.0
_CANCEL_TIMEOUT_S = 30.0
OVERSUBSCRIPTION_LIMIT = 4
"""Maximum number of CPU processes per logical core, enough for a 2 x 2 layout on one core.
Measurements record the oversubscription.
"""


class LocalLauncher:
    """Launch jobs on this host, one at a time. A handle is the job name."""

    name = "local"
    lock = "~devices"
    """File that the running job locks, so that only one job runs at a time."""

    def __init__(self, *, root: Path | str | None = None, cpu_only: bool = False) -> None:
        """Store job folders under `root`, which must be on a local disk.

        The default is HP_RUNS_DIR or a folder in the user's data folder.
        """
        self._root = Path(root).absolute() if root is not None else jobs.default_root().absolute()
        self._cpu_only = cpu_only

    @cached_property
    def _hardware(self) -> Hardware:
        return detect_hardware(cpu_only=self._cpu_only)

    def hardware(self) -> Hardware:
        return self._hardware

    def answers(self) -> str:
        return f"this host: {self._hardware.num_gpus} x {self._hardware.gpu}"

    def plan(self, request: RunRequest, *, job_name: str) -> LaunchPlan:
        host = self.hardware()
        if request.gpu != host.gpu or request.num_gpus > host.num_gpus:
            message = (
                f"This host has {host.num_gpus} x {host.gpu}, not {request.num_gpus} x "
                f"{request.gpu}."
            )
            raise InputError(message, code="launcher_mismatch", field="cluster")
        return torchrun.job_plan(request, job_name=job_name)

    def describe(self, plan: LaunchPlan) -> str:
        return jobs.plan_text(plan)

    def submit(self, plan: LaunchPlan) -> str:
        folder = self._folder(plan.job_name)
        job = {
            "command": list(plan.command),
            "timeout_s": plan.timeout_s,
            "num_gpus": plan.num_gpus,
            "devices_lock": str(self._root / self.lock),
            "max_log_bytes": jobs.max_log_bytes(),
        }
        jobs.create_folder(folder, files={**plan.files, jobs.JOB: json.dumps(job)})
        if not readback.path_exists(folder / _STARTED) and not readback.path_exists(
            folder / _CANCEL
        ):
            self._start(folder, environment=self.environment(plan))
        return plan.job_name

    def find(self, job_name: str) -> str | None:
        """Return the job's handle; None if the job never started and `submit` must start it."""
        return job_name if jobs.has_file(self._folder(job_name), name=_STARTED) else None

    def poll(self, handles: Iterable[str]) -> dict[str, JobState]:
        return {handle: self._state(self._folder(handle)) for handle in handles}

    def cancel(self, job_name: str) -> None:
        """Cancel a job.

        The launcher first writes the cancel file, then checks whether the job has started. The
        supervisor does the reverse, so at least one of them sees the other. If the folder is
        damaged, the job's processes are ended directly.
        """
        folder = self._folder(job_name)
        try:
            jobs.create_marker(folder, _CANCEL)
        except DamagedError:
            _end_processes(folder)
        deadline = time.monotonic() + _CANCEL_TIMEOUT_S
        while self._state(folder).is_open:
            if time.monotonic() > deadline:
                raise LauncherError(f"Job {job_name} did not end within {_CANCEL_TIMEOUT_S:g} s.")
            time.sleep(0.02)
        if jobs.read_submission(folder) is None or not readback.path_exists(folder / _STARTED):
            # The folder has no valid state, but the supervisor will find the cancel file.
            _await_processes(folder)

    def open_jobs(self) -> list[str]:
        started = (path.parent for path in self._root.glob(f"*/{_STARTED}"))
        return [each.name for each in started if _is_locked(each / "lock")]

    def fetch(self, handle: str) -> Measurement:
        folder = self._folder(handle)
        if folder.is_symlink():
            return jobs.damaged_measurement(
                "replaced by a link", ending=jobs.Ending(reason="damaged"), log_tail=""
            )
        if not readback.path_exists(folder / jobs.JOB):
            raise LauncherError(f"No job {handle} under {self._root}.")
        job, state = jobs.read_submission(folder), self._state(folder)
        if state.is_open:
            raise LauncherError(f"Job {handle} is still {state}.")
        ending, damage = _ending(folder), _find_damage(folder)
        if damage is not None and ending.reason in ("lost", "terminated"):
            ending = replace(ending, reason="damaged", error=damage)
        if job is None:
            return jobs.damaged_measurement(
                f"{jobs.JOB} was changed",
                ending=ending,
                log_tail=jobs.output(folder)[-4096:],
            )
        return measure(
            folder,
            ending=ending,
            timeout_s=job.timeout_s,
            hardware=self.part(num_gpus=job.num_gpus),
        )

    def output(self, handle: str, *, name: str | None = None) -> str:
        return jobs.output(self._folder(handle), name=name)

    def environment(self, plan: LaunchPlan) -> dict[str, str]:
        """Return the environment of the job's processes. It is never written to disk."""
        return torchrun.full_environment(plan.environment)

    def part(self, *, num_gpus: int) -> Hardware:
        """Return the hardware of a job with `num_gpus` devices, for jobs that do not report it."""
        return device_share(self.hardware(), num_gpus=num_gpus)

    def _folder(self, job_name: str) -> Path:
        return self._root / jobs.check_name(job_name)

    def _start(self, folder: Path, *, environment: dict[str, str]) -> None:
        """Start the supervisor. Return once it runs independently of this process."""
        command = [sys.executable, "-I", supervisor.__file__, str(folder)]
        with (folder / "supervisor.log").open("ab") as log:
            try:
                done = subprocess.run(
                    command,
                    env={**environment, _FOLDER_VARIABLE: str(folder)},
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=log,
                    start_new_session=True,
                    timeout=_START_TIMEOUT_S,
                    check=False,
                )
            except subprocess.TimeoutExpired:
                raise LauncherError(
                    f"The supervisor of {folder.name} did not detach within {_START_TIMEOUT_S:g} s."
                ) from None
        if done.returncode == 0:  # Another supervisor has the job.
            return
        deadline = time.monotonic() + _START_TIMEOUT_S
        # The supervisor starts at once, unless two callers start the same job at the same time.
        while not readback.path_exists(folder / _STARTED):
            if done.returncode != supervisor.EXIT_ALREADY_RUN or time.monotonic() > deadline:
                raise LauncherError(
                    f"The supervisor of {folder.name} did not start. See "
                    f"{folder / 'supervisor.log'}."
                )
            time.sleep(0.02)

    def _state(self, folder: Path) -> JobState:
        if folder.is_symlink():  # The link may lead to another job's folder.
            _end_processes(folder)
            return JobState.FINISHED
        if not readback.path_exists(folder / _STARTED):
            return JobState.CANCELLED if readback.path_exists(folder / _CANCEL) else JobState.LOST
        # Only the lock is reliable; the job may have overwritten the other files.
        if _is_locked(folder / "lock"):
            return (
                JobState.RUNNING
                if readback.path_exists(folder / "running.json")
                else JobState.QUEUED
            )
        damage = _find_damage(folder)
        if damage is not None or readback.read_json(folder / _ENDED) is None:
            _end_processes(folder)
        ending = _ending(folder)
        state = _STATES.get(ending.reason, JobState.FINISHED)
        if state.is_open or state in (JobState.PREEMPTED, JobState.LOST):
            return JobState.FINISHED if damage is not None or jobs.has_results(folder) else state
        return state


def _ending(folder: Path) -> jobs.Ending:
    return parse_ending(readback.read_json(folder / _ENDED) or {})


def _find_damage(folder: Path) -> str | None:
    return readback.find_damage(folder, needed=(_STARTED, "lock", jobs.JOB), allowed=(_ENDED,))


def _is_locked(path: Path) -> bool:
    """Return True if a supervisor holds the lock.

    The kernel releases the lock when the supervisor dies.
    """
    try:
        with readback.open_regular_file(path) as lock:
            fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except (FileNotFoundError, NotADirectoryError, ValueError):  # removed by the job
        return False
    return False


def _processes(folder: Path) -> list[psutil.Process]:
    """Return the processes of the job and its supervisor, identified by an environment variable."""
    marked = []
    for process in psutil.process_iter():
        # The process has ended, or belongs to another user.
        with contextlib.suppress(psutil.Error, OSError):
            if process.status() != psutil.STATUS_ZOMBIE and process.environ().get(
                _FOLDER_VARIABLE
            ) == str(folder):
                marked.append(process)
    return marked


def _end_processes(folder: Path) -> None:
    """Terminate the supervisor, which ends its job, then kill the remaining processes.

    psutil compares start times, so a process that reuses an id is never signalled.
    """
    limit_s = 0.0
    for process in _processes(folder):
        with contextlib.suppress(psutil.Error):
            if supervisor.__file__ in process.cmdline():
                process.terminate()
                limit_s = _END_TIMEOUT_S
    _await_processes(folder, limit_s=limit_s)


def _await_processes(folder: Path, *, limit_s: float = _END_TIMEOUT_S) -> None:
    deadline = time.monotonic() + limit_s
    while remaining := _processes(folder):
        if time.monotonic() >= deadline:
            for process in remaining:
                with contextlib.suppress(psutil.Error):
                    process.kill()
            return
        time.sleep(0.05)


def detect_hardware(*, cpu_only: bool = False) -> Hardware:
    """Return this host's NVIDIA GPUs; without GPUs, or with `cpu_only`, its CPU cores."""
    gpus = [] if cpu_only else _gpu_names()
    host = (socket.gethostname(),)
    if gpus:
        return Hardware(
            gpu=catalogue_name(gpus[0]),
            device_name=gpus[0],
            num_gpus=gpus.count(gpus[0]),
            hosts=host,
        )
    processes = OVERSUBSCRIPTION_LIMIT * (os.cpu_count() or 1)
    return device_share(Hardware(gpu="cpu", hosts=host), num_gpus=processes)


def device_share(hardware: Hardware, *, num_gpus: int) -> Hardware:
    """Return the part of this host that a job with `num_gpus` devices (cpu: processes) uses."""
    cores = psutil.cpu_count(logical=False) or os.cpu_count() or 1
    crowding = max(1.0, num_gpus / cores) if hardware.gpu == "cpu" else 1.0
    return replace(hardware, num_gpus=num_gpus, oversubscription=crowding)


def catalogue_name(device_name: str) -> str:
    """Return the catalogue name of a device, `h100-sxm-80gb` for "NVIDIA H100 80GB HBM3".

    Unknown names are converted to lower case.
    """
    return catalogue_gpu_name(device_name) or re.sub(r"[^a-z0-9]+", "-", device_name.lower()).strip(
        "-"
    )


def _gpu_names() -> list[str]:
    if shutil.which("nvidia-smi") is None:
        return []
    command = ["nvidia-smi", "--query-gpu=name", "--format=csv,noheader"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=30, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return []
    names = (
        [line.strip() for line in done.stdout.splitlines() if line.strip()]
        if done.returncode == 0
        else []
    )
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    return (
        names
        if visible is None
        else names[: len([entry for entry in visible.split(",") if entry.strip()])]
    )
