"""Jobs on this host: a folder and a supervisor process each, no daemon, no state in memory; and the
devices that it can give them, detected without importing torch.
"""

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
from hp_tool.cluster.launchers.jobs import measure, recorded
from hp_tool.cluster.launchers.readback import DamagedError
from hp_tool.domain.device_names import known_name
from hp_tool.domain.jobs import JobState, LaunchPlan
from hp_tool.domain.measurement import Hardware, Measurement
from hp_tool.domain.requests import RunRequest
from hp_tool.errors import InputError, LauncherError

_STATES = {"cancelled": JobState.CANCELLED, "terminated": JobState.PREEMPTED, "lost": JobState.LOST}
# in the environment of every job process, to find those whose supervisor was killed
_MARK = "HP_JOB_FOLDER"
_STARTED, _ENDED, _CANCEL = "started.json", "ended.json", "cancel"
_END_LIMIT_S = 10.0
"""How long the supervisor of a damaged folder may take to end its job."""
_START_LIMIT_S = 30.0
_CANCEL_LIMIT_S = 30.0
OVERSUBSCRIPTION_LIMIT = 4
"""CPU processes per logical core: enough to try a 2 x 2 configuration on one core; the measurement
records it.
"""


class LocalLauncher:
    """The Launcher port on one host. Jobs run one at a time; a handle is the job's name."""

    name = "local"
    lock = "~devices"
    """File under the root that a job locks while it runs: one job at a time."""

    def __init__(self, *, root: Path | str | None = None, cpu_only: bool = False) -> None:
        """root: folder of the jobs' folders, on a local disk (default: HP_RUNS_DIR, else the user's
        data folder).
        """
        self._root = Path(root).absolute() if root is not None else jobs.default_root().absolute()
        self._cpu_only = cpu_only

    @cached_property
    def _hardware(self) -> Hardware:
        return detect(cpu_only=self._cpu_only)

    def hardware(self) -> Hardware:
        return self._hardware

    def answers(self) -> str:
        return f"this host: {self._hardware.num_gpus} x {self._hardware.gpu}"

    def plan(self, request: RunRequest, *, job_name: str) -> LaunchPlan:
        host = self.hardware()
        if request.gpu != host.gpu or request.num_gpus > host.num_gpus:
            message = (
                f"this host has {host.num_gpus} x {host.gpu}, not {request.num_gpus} x "
                f"{request.gpu}"
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
            "max_log_bytes": jobs.most_log_bytes(),
        }
        jobs.create_folder(folder, files={**plan.files, jobs.JOB: json.dumps(job)})
        if not readback.is_there(folder / _STARTED) and not readback.is_there(folder / _CANCEL):
            self._start(folder, environment=self.environment(plan))
        return plan.job_name

    def find(self, job_name: str) -> str | None:
        """None for a folder whose job never started: submit() starts it."""
        return job_name if jobs.has_file(self._folder(job_name), name=_STARTED) else None

    def poll(self, handles: Iterable[str]) -> dict[str, JobState]:
        return {handle: self._state(self._folder(handle)) for handle in handles}

    def cancel(self, job_name: str) -> None:
        """Write the mark, then check for a started job; a supervisor does the reverse, so one of
        them sees the other.

        A job that damaged its folder so that no mark can be laid there is ended by its processes.
        """
        folder = self._folder(job_name)
        try:
            jobs.mark(folder, _CANCEL)
        except DamagedError:
            _end_processes(folder)
        deadline = time.monotonic() + _CANCEL_LIMIT_S
        while self._state(folder).is_open:
            if time.monotonic() > deadline:
                raise LauncherError(f"job {job_name} did not end within {_CANCEL_LIMIT_S:g} s")
            time.sleep(0.02)
        if jobs.submitted(folder) is None or not readback.is_there(folder / _STARTED):
            _await_processes(folder)  # its folder does not tell: it sees the mark by itself

    def open_jobs(self) -> list[str]:
        started = (path.parent for path in self._root.glob(f"*/{_STARTED}"))
        return [each.name for each in started if _is_locked(each / "lock")]

    def fetch(self, handle: str) -> Measurement:
        folder = self._folder(handle)
        if folder.is_symlink():
            return jobs.spoilt(
                "a link is in its place", ending=jobs.Ending(reason="damaged"), log_tail=""
            )
        if not readback.is_there(folder / jobs.JOB):
            raise LauncherError(f"no job {handle} under {self._root}")
        job, state = jobs.submitted(folder), self._state(folder)
        if state.is_open:
            raise LauncherError(f"job {handle} is still {state}")
        ending, damage = _ending(folder), _damage_to(folder)
        if damage is not None and ending.reason in ("lost", "terminated"):
            ending = replace(ending, reason="damaged", error=damage)
        if job is None:
            return jobs.spoilt(
                f"{jobs.JOB} is not what was submitted",
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
        """Return the environment of a job's processes; nothing of it is written down."""
        return torchrun.full_environment(plan.environment)

    def part(self, *, num_gpus: int) -> Hardware:
        """What a job of so many devices ran on, if it cannot say so itself."""
        return share(self.hardware(), num_gpus=num_gpus)

    def _folder(self, job_name: str) -> Path:
        return self._root / jobs.check_name(job_name)

    def _start(self, folder: Path, *, environment: dict[str, str]) -> None:
        """Start the supervisor, and return once it has detached from us with the job."""
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
                raise LauncherError(
                    f"the supervisor of {folder.name} did not detach within {_START_LIMIT_S:g} s"
                ) from None
        if done.returncode == 0:  # it has the job, whatever that has done to the folder since
            return
        deadline = time.monotonic() + _START_LIMIT_S
        while not readback.is_there(folder / _STARTED):  # immediate, unless two callers raced
            if done.returncode != supervisor.HELD or time.monotonic() > deadline:
                raise LauncherError(
                    f"the supervisor of {folder.name} did not start; see "
                    f"{folder / 'supervisor.log'}"
                )
            time.sleep(0.02)

    def _state(self, folder: Path) -> JobState:
        if folder.is_symlink():  # to another's, perhaps
            _end_processes(folder)
            return JobState.FINISHED
        if not readback.is_there(folder / _STARTED):
            return JobState.CANCELLED if readback.is_there(folder / _CANCEL) else JobState.LOST
        if _is_locked(folder / "lock"):  # what else the folder says is not its supervisor's word
            return (
                JobState.RUNNING if readback.is_there(folder / "running.json") else JobState.QUEUED
            )
        damage = _damage_to(folder)
        if damage is not None or readback.read_json(folder / _ENDED) is None:
            _end_processes(folder)
        ending = _ending(folder)
        state = _STATES.get(ending.reason, JobState.FINISHED)
        if state.is_open or state in (JobState.PREEMPTED, JobState.LOST):
            return JobState.FINISHED if damage is not None or jobs.brought(folder) else state
        return state


def _ending(folder: Path) -> jobs.Ending:
    """How the job ended, by its supervisor's record."""
    return recorded(readback.read_json(folder / _ENDED) or {})


def _damage_to(folder: Path) -> str | None:
    """What a job that was started did to the files by which it is watched."""
    return readback.wrong(folder, needed=(_STARTED, "lock", jobs.JOB), allowed=(_ENDED,))


def _is_locked(path: Path) -> bool:
    """Whether a supervisor holds the lock; the kernel releases it when the process ends, in
    whatever way.
    """
    try:
        with readback.opened(path) as lock:
            fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except (FileNotFoundError, NotADirectoryError, ValueError):  # the job took it away
        return False
    return False


def _processes(folder: Path) -> list[psutil.Process]:
    """The job's supervisor and its processes, by a mark in their environment."""
    marked = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error, OSError):  # ended meanwhile, or another user's
            if process.status() != psutil.STATUS_ZOMBIE and process.environ().get(_MARK) == str(
                folder
            ):
                marked.append(process)
    return marked


def _end_processes(folder: Path) -> None:
    """End the supervisor, which ends all below it, and kill what is left. psutil checks the start
    time, so a recycled pid is never hit.
    """
    limit_s = 0.0
    for process in _processes(folder):
        with contextlib.suppress(psutil.Error):
            if supervisor.__file__ in process.cmdline():
                process.terminate()
                limit_s = _END_LIMIT_S
    _await_processes(folder, limit_s=limit_s)


def _await_processes(folder: Path, *, limit_s: float = _END_LIMIT_S) -> None:
    """Wait until none of the job's processes is left, and kill those that stay."""
    deadline = time.monotonic() + limit_s
    while left := _processes(folder):
        if time.monotonic() >= deadline:
            for process in left:
                with contextlib.suppress(psutil.Error):
                    process.kill()
            return
        time.sleep(0.05)


def detect(*, cpu_only: bool = False) -> Hardware:
    """The host's NVIDIA GPUs; if it has none (or with cpu_only), its CPU cores up to the
    oversubscription limit.
    """
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
    return share(Hardware(gpu="cpu", hosts=host), num_gpus=processes)


def share(hardware: Hardware, *, num_gpus: int) -> Hardware:
    """The part of this host that a job of num_gpus devices (cpu: processes) gets."""
    cores = psutil.cpu_count(logical=False) or os.cpu_count() or 1
    crowding = max(1.0, num_gpus / cores) if hardware.gpu == "cpu" else 1.0
    return replace(hardware, num_gpus=num_gpus, oversubscription=crowding)


def catalogue_name(device_name: str) -> str:
    """`h100-sxm-80gb` for "NVIDIA H100 80GB HBM3"; a device that is not in the catalogue keeps its
    name, in lower case.
    """
    return known_name(device_name) or re.sub(r"[^a-z0-9]+", "-", device_name.lower()).strip("-")


def _gpu_names() -> list[str]:
    """The visible devices' names as nvidia-smi gives them."""
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
