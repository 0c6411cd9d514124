"""Failures, and what checkpoints save of a training."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from annotated_types import Interval

from hp_tool.domain.fields import Strict


@dataclass(frozen=True, slots=True, kw_only=True)
class ReliabilitySpec(Strict):
    """How often devices fail, and what a failure and a checkpoint cost. What is left out is as published."""

    mtbf_per_gpu_hours: Annotated[float, Interval(ge=1e-3, le=1e12)] | None = None
    """Mean time between the failures of one device that stop a job; None: 50,677 h, as published for Llama 3."""
    checkpoint_s: Annotated[float, Interval(ge=1e-3, le=1e7)] | None = None
    """Time for which saving a checkpoint stops training; None: its bytes at the published rate of Megatron-LM's nodes."""
    checkpoint_interval_s: Annotated[float, Interval(ge=1e-3, le=1e9)] | None = None
    """Training between two checkpoints; None: the interval that loses least."""
    restart_s: Annotated[float, Interval(ge=0.0, le=1e7)] | None = None
    """From a failure to training again; None: ten minutes to detect and diagnose, and the time to load the checkpoint."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Goodput:
    """Training time that survives failures, as a share of the calendar's."""

    fraction: float
    mtbf_s: float
    """Of the whole job."""
    checkpoint_bytes: float
    checkpoint_s: float
    checkpoint_interval_s: float
    young_interval_s: float
    """First-order optimum sqrt(2 C M), for comparison."""
    restart_s: float
    source: str
    """Where the figures that were not given come from."""
