"""Seconds that all ranks agree on."""

from __future__ import annotations

import torch
from torch import distributed


def synchronize(device: torch.device) -> None:
    """Wait for the device's queued work; a CPU has none."""
    if device.type == "cuda":
        torch.cuda.synchronize()


def slowest(seconds: float, *, device: torch.device) -> float:
    """The slowest rank's seconds, on all ranks; a collective call."""
    most = torch.tensor([seconds], dtype=torch.float64, device=device)
    distributed.all_reduce(most, op=distributed.ReduceOp.MAX)
    return float(most)
