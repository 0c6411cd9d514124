"""The devices that this host can give to one job, detected without importing torch."""

from __future__ import annotations

import os
import re
import shutil
import socket
import subprocess
from dataclasses import replace

import psutil

from hp_tool.domain.measurement import Hardware

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
