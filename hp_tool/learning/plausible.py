"""Whether reported figures can be what they say: one that is off by orders of magnitude would mislead its whole cluster."""

from __future__ import annotations

from hp_tool.domain.measurement import Measurement
from hp_tool.domain.result import Estimate
from hp_tool.errors import InputError
from hp_tool.training.problem import TrainingProblem

ORDERS = 100.0
"""Times the prediction, or this part of it: runs that stalled took up to fifty times as long as others like them; what is
farther off is another unit.
"""


def check_plausible(measurement: Measurement, *, problem: TrainingProblem, estimate: Estimate) -> None:
    """Raises InputError `implausible` for a step ORDERS away from the prediction, and for a peak above the device's memory.
    Of a CPU, whose speed and memory are its host's, not.
    """
    gpu, step_s, peak = problem.cluster.gpu, measurement.step_s, measurement.peak_memory_bytes
    if gpu.kind == "cpu" or estimate.time is None:
        return
    predicted = estimate.time.step_s
    if step_s is not None and not predicted / ORDERS <= step_s <= ORDERS * predicted:
        raise InputError(
            f"step_s {step_s:g} cannot be where {predicted:.3g} is predicted; report the seconds of one optimizer step",
            field="measurement.step_s",
            code="implausible",
        )
    largest = max(kind.gpu.memory_bytes for kind in problem.cluster.kinds) if problem.cluster.kinds else gpu.memory_bytes
    if peak is not None and peak > largest:
        raise InputError(
            f"peak_memory_bytes {peak:,} cannot be: the device has {largest:,.0f}; report the bytes of the fullest device",
            field="measurement.peak_memory_bytes",
            code="implausible",
        )
