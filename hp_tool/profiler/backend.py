"""The devices of this run, their process group and their clock: CUDA with NCCL, or one CPU thread per process with gloo."""

import os
import platform
import socket
import time
from datetime import timedelta
from importlib import metadata
from pathlib import Path

import psutil
import torch
from torch import distributed

from hp_tool.domain.measurement import Hardware, ProfileRequest
from hp_tool.errors import InputError


def start(request: ProfileRequest) -> torch.device:
    """Select this rank's device and join the process group. Raises InputError if the machine does not match the request."""
    cpu = request.gpu == "cpu"
    if not cpu and not torch.cuda.is_available():
        raise InputError(f"the request is for {request.gpu}, but torch sees no CUDA device here")
    if (world := int(os.environ["WORLD_SIZE"])) != request.num_gpus:
        raise InputError(f"the request is for {request.num_gpus} processes, but {world} were started")
    if cpu:
        torch.set_num_threads(1)
        device = torch.device("cpu")
    else:
        device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
        torch.cuda.set_device(device)
    # A rank that waits for a failed one gives up at the run's own limit instead of torch's half hour.
    distributed.init_process_group(
        "gloo" if cpu else "nccl", timeout=timedelta(seconds=request.timeout_s), device_id=None if cpu else device
    )
    return device


def hardware(request: ProfileRequest, *, device: torch.device) -> Hardware:
    """The hardware of this run; a collective call."""
    hosts: list[str | None] = [None] * distributed.get_world_size()
    distributed.all_gather_object(hosts, socket.gethostname())
    local = int(os.environ["LOCAL_WORLD_SIZE"])
    units = psutil.cpu_count(logical=False) or os.cpu_count() or 1 if device.type == "cpu" else torch.cuda.device_count()
    return Hardware(
        gpu=request.gpu,
        device_name=_cpu_name() if device.type == "cpu" else torch.cuda.get_device_name(device),
        num_gpus=request.num_gpus,
        hosts=tuple(dict.fromkeys(host for host in hosts if host)),
        oversubscription=max(1.0, local * (torch.get_num_threads() if device.type == "cpu" else 1) / units),
    )


def versions() -> dict[str, str]:
    """The versions of the software that determines speed and memory, by package."""
    versions_by_package = {"python": platform.python_version(), "torch": torch.__version__}
    if torch.version.cuda:
        versions_by_package["cuda"] = torch.version.cuda
    for package in ("megatron-core", "transformer-engine", "hp-tool"):
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
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), platform.processor())


def synchronize(device: torch.device) -> None:
    """Wait for the device's queued work; a CPU has none."""
    if device.type == "cuda":
        torch.cuda.synchronize()


def slowest(seconds: float, *, device: torch.device) -> float:
    """The slowest rank's seconds, on all ranks; a collective call."""
    most = torch.tensor([seconds], dtype=torch.float64, device=device)
    distributed.all_reduce(most, op=distributed.ReduceOp.MAX)
    return float(most)


def now(device: torch.device) -> float:
    """Seconds on this process's clock, once the device's queued work is done."""
    synchronize(device)
    return time.perf_counter()
