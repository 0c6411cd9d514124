"""Whether reported figures can be what they say: one that is off by orders of magnitude would mislead its whole cluster."""

from __future__ import annotations

from hp_tool.domain.measurement import Measurement
from hp_tool.domain.result import Estimate
from hp_tool.errors import InputError
from hp_tool.problem import TrainingProblem
from hp_tool.targets import least_step_s

SLOWEST = 100.0
"""Times the prediction. Runs that stalled took up to fifty times as long as others like them; more is another unit."""
LEAST_WEIGHTS = 0.5
"""Of the weights that the fullest stage holds: below, the peak is not that of this configuration."""


def check_plausible(measurement: Measurement, *, problem: TrainingProblem, estimate: Estimate) -> None:
    """Raises InputError `implausible` for a step faster than the devices' arithmetic or SLOWEST times the prediction, and for a
    peak above the device's memory or below the weights it holds. Of a CPU, whose speed and memory are its host's, not.
    """
    gpu, step_s, peak = problem.cluster.gpu, measurement.step_s, measurement.peak_memory_bytes
    if gpu.kind == "cpu" or estimate.time is None or estimate.memory is None:
        return
    predicted, least = estimate.time.step_s, least_step_s(problem)
    if step_s is not None and not least <= step_s <= SLOWEST * predicted:
        raise InputError(
            f"step_s {step_s:g} cannot be: {predicted:.3g} s is predicted, {least:.3g} s is the arithmetic at twice the peak; "
            "report the seconds of one optimizer step",
            field="measurement.step_s",
            code="implausible",
        )
    weights = LEAST_WEIGHTS * estimate.memory.weights_bytes
    largest = max(kind.gpu.memory_bytes for kind in problem.cluster.kinds) if problem.cluster.kinds else gpu.memory_bytes
    if peak is not None and not weights <= peak <= largest:
        raise InputError(
            f"peak_memory_bytes {peak:,} cannot be: the device has {largest:,.0f}, its share of the weights alone is "
            f"{estimate.memory.weights_bytes:,.0f}; report the bytes of the fullest device",
            field="measurement.peak_memory_bytes",
            code="implausible",
        )
