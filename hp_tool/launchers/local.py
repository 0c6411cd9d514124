"""Jobs on this host: a folder and a supervisor process each, no daemon, no state in memory; and the devices that it can give
them, detected without importing torch."""

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

from hp_tool.domain.jobs import JobState, LaunchPlan
from hp_tool.domain.measurement import Hardware, Measurement
from hp_tool.domain.requests import RunRequest
from hp_tool.errors import InputError, LauncherError
from hp_tool.launchers import jobs, supervisor, torchrun
from hp_tool.launchers.jobs import measure, recorded

_STATES = {"cancelled": JobState.CANCELLED, "terminated": JobState.PREEMPTED}
_MARK = "HP_JOB_FOLDER"  # in the environment of every job process, to find those whose supervisor was killed
_START_LIMIT_S = 30.0
_CANCEL_LIMIT_S = 30.0
OVERSUBSCRIPTION_LIMIT = 4
"""CPU processes per logical core: enough to try a 2 x 2 configuration on one core; the measurement records it."""

# The driver's name of a device -> its catalogue name.
_NAMES = (
    (r"GB200", "gb200-nvl72"),
    (r"B200", "b200-sxm-180gb"),
    (r"H200(?! NVL)", "h200-sxm-141gb"),
    (r"H800(?! (PCIe|NVL))", "h800-sxm-80gb"),
    (r"H100 PCIe", "h100-pcie-80gb"),
    (r"H100 80GB HBM3", "h100-sxm-80gb"),
    (r"A100-SXM4-80GB", "a100-sxm-80gb"),
    (r"A100-SXM4-40GB", "a100-sxm-40gb"),
    (r"V100-SXM[23]-32GB", "v100-sxm-32gb"),
    (r"L40S", "l40s-48gb"),
)


class LocalLauncher:
    """The Launcher port on one host. Jobs run one at a time; a handle is the job's name."""

    name = "local"
    lock = "~devices"
    """File under the root that a job locks while it runs: one job at a time."""

    def __init__(self, *, root: Path | str | None = None, cpu_only: bool = False) -> None:
        """root: folder of the jobs' folders, on a local disk (default: HP_RUNS_DIR, else the user's data folder)."""
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
            message = f"this host has {host.num_gpus} x {host.gpu}, not {request.num_gpus} x {request.gpu}"
            raise InputError(message, code="launcher_mismatch", field="cluster")
        return torchrun.job_plan(request, job_name=job_name)

    def describe(self, plan: LaunchPlan) -> str:
        return jobs.plan_json(plan)

    def submit(self, plan: LaunchPlan) -> str:
        folder = self._folder(plan.job_name)
        job = {
            "command": list(plan.command),
            "timeout_s": plan.timeout_s,
            "num_gpus": plan.num_gpus,
            "devices_lock": str(self._root / self.lock),
        }
        jobs.create_folder(folder, files={**plan.files, "job.json": json.dumps(job)})
        if not (folder / "started.json").exists() and not (folder / "cancel").exists():
            self._start(folder, environment=self.environment(plan))
        return plan.job_name

    def find(self, job_name: str) -> str | None:
        """None for a folder whose job never started: submit() starts it."""
        return job_name if (self._folder(job_name) / "started.json").exists() else None

    def poll(self, handles: Iterable[str]) -> dict[str, JobState]:
        return {handle: self._state(self._folder(handle)) for handle in handles}

    def cancel(self, job_name: str) -> None:
        """Write the mark, then check for a started job; a supervisor does the reverse, so one of them sees the other."""
        folder = self._folder(job_name)
        jobs.mark(folder, "cancel")
        deadline = time.monotonic() + _CANCEL_LIMIT_S
        while self._state(folder).is_open:
            if time.monotonic() > deadline:
                raise LauncherError(f"job {job_name} did not end within {_CANCEL_LIMIT_S:g} s")
            time.sleep(0.02)

    def open_jobs(self) -> list[str]:
        started = (path.parent for path in self._root.glob("*/started.json"))
        return [each.name for each in started if not (each / "ended.json").exists() and _is_locked(each / "lock")]

    def fetch(self, handle: str) -> Measurement:
        folder = self._folder(handle)
        job, state = jobs.read_json(folder / "job.json"), self._state(folder)
        if job is None:
            raise LauncherError(f"no job {handle} under {self._root}")
        if state.is_open:
            raise LauncherError(f"job {handle} is still {state}")
        hardware = self.part(num_gpus=job["num_gpus"])
        ended = jobs.read_json(folder / "ended.json")
        return measure(folder, ending=recorded(ended or {}), timeout_s=job["timeout_s"], hardware=hardware)

    def output(self, handle: str, *, name: str | None = None) -> str:
        return jobs.output(self._folder(handle), name=name)

    def environment(self, plan: LaunchPlan) -> dict[str, str]:
        """Of a job's processes; nothing of it is written down."""
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
                raise LauncherError(f"the supervisor of {folder.name} did not detach within {_START_LIMIT_S:g} s") from None
        deadline = time.monotonic() + _START_LIMIT_S
        while not (folder / "started.json").exists():  # immediate, unless two callers raced
            if done.returncode != 0 or time.monotonic() > deadline:
                raise LauncherError(f"the supervisor of {folder.name} did not start; see {folder / 'supervisor.log'}")
            time.sleep(0.02)

    def _state(self, folder: Path) -> JobState:
        if not (folder / "started.json").exists():
            return JobState.CANCELLED if (folder / "cancel").exists() else JobState.LOST
        alive = _is_locked(folder / "lock")
        ended = jobs.read_json(folder / "ended.json")  # read after the lock, because it is written before the lock is released
        if ended is not None:
            state = _STATES.get(str(ended.get("reason")), JobState.FINISHED)
            return JobState.FINISHED if state is JobState.PREEMPTED and jobs.brought(folder) else state
        if alive:
            return JobState.RUNNING if (folder / "running.json").exists() else JobState.QUEUED
        _end_stragglers(folder)
        return JobState.FINISHED if jobs.brought(folder) else JobState.LOST


def _is_locked(path: Path) -> bool:
    """Whether a supervisor holds the lock; the kernel releases it when the process ends, in whatever way."""
    with path.open() as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
    return False


def _end_stragglers(folder: Path) -> None:
    """Kill the processes of a killed supervisor. psutil checks the start time, so a recycled pid is never hit."""
    for process in psutil.process_iter():
        try:
            if process.environ().get(_MARK) == str(folder):
                process.kill()
        except (psutil.Error, OSError):  # ended meanwhile, or another user's
            continue


def detect(*, cpu_only: bool = False) -> Hardware:
    """The host's NVIDIA GPUs; if it has none (or with cpu_only), its CPU cores up to the oversubscription limit."""
    gpus = [] if cpu_only else _gpu_names()
    host = (socket.gethostname(),)
    if gpus:
        return Hardware(gpu=catalogue_name(gpus[0]), device_name=gpus[0], num_gpus=gpus.count(gpus[0]), hosts=host)
    processes = OVERSUBSCRIPTION_LIMIT * (os.cpu_count() or 1)
    return share(Hardware(gpu="cpu", hosts=host), num_gpus=processes)


def share(hardware: Hardware, *, num_gpus: int) -> Hardware:
    """The part of this host that a job of num_gpus devices (cpu: processes) gets."""
    cores = psutil.cpu_count(logical=False) or os.cpu_count() or 1
    crowding = max(1.0, num_gpus / cores) if hardware.gpu == "cpu" else 1.0
    return replace(hardware, num_gpus=num_gpus, oversubscription=crowding)


def catalogue_name(device_name: str) -> str:
    """`h100-sxm-80gb` for "NVIDIA H100 80GB HBM3"; a device that is not in the catalogue keeps its name, in lower case."""
    for pattern, name in _NAMES:
        if re.search(pattern, device_name):
            return name
    return re.sub(r"[^a-z0-9]+", "-", device_name.lower()).strip("-")


def _gpu_names() -> list[str]:
    """The visible devices' names as nvidia-smi gives them."""
    if shutil.which("nvidia-smi") is None:
        return []
    command = ["nvidia-smi", "--query-gpu=name", "--format=csv,noheader"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=30, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return []
    names = [line.strip() for line in done.stdout.splitlines() if line.strip()] if done.returncode == 0 else []
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    return names if visible is None else names[: len([entry for entry in visible.split(",") if entry.strip()])]
