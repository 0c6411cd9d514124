"""Seconds that all ranks agree on."""

from __future__ import annotations

import statistics
from collections.abc import Sequence

import torch
from torch import distributed


def synchronize(device: torch.device) -> None:
    """Wait for the device's queued work; a CPU has none."""
    if device.type == "cuda":
        torch.cuda.synchronize()


def slowest(seconds: float, *, device: torch.device) -> float:
    """The slowest rank's seconds, known to all ranks; a collective call."""
    most = torch.tensor([seconds], dtype=torch.float64, device=device)
    distributed.all_reduce(most, op=distributed.ReduceOp.MAX)
    return float(most)


def interquartile_range(values: Sequence[float]) -> float:
    """Spread of the middle half; 0 for a single value."""
    if len(values) < 2:
        return 0.0
    low, _, high = statistics.quantiles(values, n=4, method="inclusive")
    return high - low
