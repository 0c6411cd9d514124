"""How far the cost model is believed before anything has run on the machine at hand."""

from __future__ import annotations

from dataclasses import dataclass

from hp_tool.domain.hardware import Kind
from hp_tool.units import GIB


@dataclass(frozen=True, slots=True, kw_only=True)
class Prior:
    """Widths of the prior. Factors are log-normal around 1; overheads are half-normal, most likely 0."""

    name: str
    common_log_sd: float
    """One factor on every part: the device as a whole is faster or slower than its profile says."""
    group_log_sd: float
    """A further factor on each group of parts (compute, communication, memory-bound)."""
    step_overhead_s: float
    """Scale of a fixed cost of each optimizer step: data loading, launch of the schedule, Python."""
    layer_overhead_s: float
    """Scale of a fixed cost of one micro-batch's forward and backward pass through one layer: kernel launches."""
    residual_log_sd: float
    """What remains per configuration once the factors are right."""
    memory_log_sd: float
    """One factor on the predicted bytes."""
    memory_overhead_bytes: float
    """Scale of bytes that every configuration needs on top."""
    memory_residual_log_sd: float
    """What remains of memory per configuration."""
    degrees_of_freedom: float = 4.0
    """Observations that the residual widths above are worth against measured residuals."""
    alike_log_sd: float = 0.15
    """Median of the standard deviation of what configurations alike have in common beyond the factors."""
    alike_length: float = 1.0
    """Median of the distance over which they have, in units of the features' scales."""
    slow_share: float = 0.1
    """Share of runs that stall; see `residual`."""


GPU_PRIOR = Prior(
    name="gpu",
    common_log_sd=0.10,
    group_log_sd=0.20,
    step_overhead_s=5e-3,
    layer_overhead_s=50e-6,
    residual_log_sd=0.06,
    memory_log_sd=0.05,
    memory_overhead_bytes=0.5 * GIB,
    memory_residual_log_sd=0.04,
)
"""A device with a datasheet and an efficiency profile: predictions are within tens of per cent."""

CPU_PRIOR = Prior(
    name="cpu",
    common_log_sd=1.0,
    group_log_sd=0.7,
    step_overhead_s=20e-3,
    layer_overhead_s=1e-3,
    residual_log_sd=0.15,
    memory_log_sd=0.30,
    memory_overhead_bytes=0.5 * GIB,
    memory_residual_log_sd=0.10,
)
"""Hosts differ by whole factors from each other and share their cores: the profile says little until something ran."""


def prior_for(*, kind: Kind) -> Prior:
    """The default prior of a device kind."""
    return CPU_PRIOR if kind == "cpu" else GPU_PRIOR
