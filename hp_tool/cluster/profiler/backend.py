"""Device, process group and clock of a run: CUDA with NCCL, or a CPU thread per rank with gloo."""

import os
import platform
import shutil
import socket
import subprocess
import time
from datetime import timedelta
from importlib import metadata
from pathlib import Path

import psutil
import torch
from torch import distributed

from hp_tool.domain.measurement import DeviceState, Hardware, ProfileRequest
from hp_tool.errors import InputError


def start(request: ProfileRequest) -> torch.device:
    """Select this rank's device and join the process group.

    Raises:
        InputError: The machine does not match the request.
    """
    cpu = request.gpu == "cpu"
    if not cpu and not torch.cuda.is_available():
        raise InputError(f"The request needs {request.gpu}, but torch finds no CUDA device.")
    if (world := int(os.environ["WORLD_SIZE"])) != request.num_gpus:
        raise InputError(
            f"The request needs {request.num_gpus} processes, but {world} were started."
        )
    chosen = device(request)
    if cpu:
        torch.set_num_threads(1)
    else:
        torch.cuda.set_device(chosen)
    # A rank that waits for a failed one must stop at the run's limit, not after torch's 30 minutes.
    distributed.init_process_group(
        "gloo" if cpu else "nccl",
        timeout=timedelta(seconds=request.timeout_s),
        device_id=None if cpu else chosen,
    )
    return chosen


def device(request: ProfileRequest) -> torch.device:
    """Return this rank's device."""
    return (
        torch.device("cpu")
        if request.gpu == "cpu"
        else torch.device("cuda", int(os.environ["LOCAL_RANK"]))
    )


def hardware(request: ProfileRequest, *, device: torch.device) -> Hardware:
    """Return the hardware of this run. All ranks must call it."""
    hosts: list[str | None] = [None] * distributed.get_world_size()
    distributed.all_gather_object(hosts, socket.gethostname())
    local = int(os.environ["LOCAL_WORLD_SIZE"])
    units = (
        psutil.cpu_count(logical=False) or os.cpu_count() or 1
        if device.type == "cpu"
        else torch.cuda.device_count()
    )
    return Hardware(
        gpu=request.gpu,
        device_name=_cpu_name() if device.type == "cpu" else torch.cuda.get_device_name(device),
        num_gpus=request.num_gpus,
        hosts=tuple(dict.fromkeys(host for host in hosts if host)),
        oversubscription=max(
            1.0, local * (torch.get_num_threads() if device.type == "cpu" else 1) / units
        ),
    )


class DeviceWatch:
    """Record the state of a run's GPUs under load, during a step whose time is not measured."""

    _FIELDS = (
        "clocks.sm,clocks.max.sm,clocks_throttle_reasons.active,ecc.errors.uncorrected.volatile.total,"
        "temperature.gpu,power.draw,power.limit,driver_version"
    )

    def __init__(self, device: torch.device) -> None:
        first = (
            os.environ.get("LOCAL_RANK") == "0"
            and device.type == "cuda"
            and shutil.which("nvidia-smi") is not None
        )
        command = ["nvidia-smi", f"--query-gpu={self._FIELDS}", "--format=csv,noheader,nounits"]
        self._query = (
            subprocess.Popen(command, stdout=subprocess.PIPE, text=True) if first else None
        )

    def states(self) -> tuple[tuple[DeviceState, ...], str | None]:
        """Return the states of the GPUs on all nodes, and the driver version.

        All ranks must call it.
        """
        text = ""
        if self._query is not None:
            try:
                text, _ = self._query.communicate(timeout=30)
            except subprocess.TimeoutExpired:
                self._query.kill()
        gathered: list[tuple[tuple[DeviceState, ...], str | None]] = [
            ((), None)
        ] * distributed.get_world_size()
        distributed.all_gather_object(gathered, parse_devices(text, host=socket.gethostname()))
        drivers = [driver for _, driver in gathered if driver is not None]
        return tuple(state for states, _ in gathered for state in states), next(iter(drivers), None)


def parse_devices(text: str, *, host: str) -> tuple[tuple[DeviceState, ...], str | None]:
    """Parse the output of nvidia-smi.

    Return the GPUs and the driver version; None for missing values.
    """
    rows = [[cell.strip() for cell in line.split(",")] for line in text.splitlines()]
    rows = [row for row in rows if len(row) == 8]
    states = []
    for clock, max_clock, reasons, errors, temperature, power, limit, _ in rows:
        mask = int(reasons, 16) if reasons.startswith("0x") else 0
        states.append(
            DeviceState(
                host=host,
                sm_clock_hz=_scaled(clock, 1e6),
                sm_clock_max_hz=_scaled(max_clock, 1e6),
                throttled_by=hex(mask & ~_IDLE) if mask & ~_IDLE else None,
                uncorrected_ecc_errors=int(errors) if errors.isdecimal() else None,
                temperature_c=_scaled(temperature),
                power_w=_scaled(power),
                power_limit_w=_scaled(limit),
            )
        )
    return tuple(states), rows[0][7] if rows else None


_IDLE = 0x1
"""Bit in the driver's clock-throttling reasons that marks an idle GPU."""


def _scaled(text: str, unit: float = 1.0) -> float | None:
    try:
        return float(text) * unit
    except ValueError:  # [N/A]
        return None


def versions() -> dict[str, str]:
    """Return the versions of software that affects speed or memory, by package name."""
    versions_by_package = {"python": platform.python_version(), "torch": torch.__version__}
    if torch.version.cuda:
        versions_by_package["cuda"] = torch.version.cuda
        versions_by_package["cudnn"] = str(torch.backends.cudnn.version())
        versions_by_package["nccl"] = ".".join(map(str, torch.cuda.nccl.version()))
    packages = (
        "megatron-core",
        "transformer-engine",
        "apex",
        "deep-ep",
        "flash-attn",
        "triton",
        "hp-tool",
    )
    for package in packages:
        try:
            versions_by_package[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            continue
    return versions_by_package


def _cpu_name() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    return next(
        (line.partition(":")[2].strip() for line in lines if line.startswith("model name")),
        platform.processor(),
    )


def synchronize(device: torch.device) -> None:
    """Wait for the device's queued work. A CPU has none."""
    if device.type == "cuda":
        torch.cuda.synchronize()


def max_over_ranks(seconds: float, *, device: torch.device) -> float:
    """Return the maximum of `seconds` over all ranks. All ranks must call it."""
    maximum = torch.tensor([seconds], dtype=torch.float64, device=device)
    distributed.all_reduce(maximum, op=distributed.ReduceOp.MAX)
    return float(maximum)


def now(device: torch.device) -> float:
    """Wait for the device's queued work, then return this process's clock in seconds."""
    synchronize(device)
    return time.perf_counter()
