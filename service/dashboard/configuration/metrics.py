"""The figures of an estimate, with their units and ranges."""

from __future__ import annotations

from hp_tool.domain.result import Estimate
from hp_tool.domain.serving import InferenceEstimate
from service.dashboard.configuration.contexts import Metric

LESS_IS_BETTER = frozenset({"seconds", "bytes", "days", "hours", "dollars", "joules"})
"""Units of which one wants little."""


def training_metrics(found: Estimate, learnt: Estimate | None) -> tuple[Metric, ...]:
    """Of a legal configuration; none of an illegal one."""
    if found.time is None or found.memory is None:
        return ()
    ranges, after = found.intervals, learnt or Estimate(feasible=True)
    step = ranges.step_s if ranges else (None, None)
    memory = ranges.memory_total_bytes if ranges else (None, None)
    rows = [
        Metric(
            name="Step time", value=found.time.step_s, unit="seconds", low=step[0], high=step[1],
            after_calibration=after.time.step_s if after.time else None,
        ),
        Metric(
            name="Memory", value=found.memory.total_bytes, unit="bytes", low=memory[0], high=memory[1],
            after_calibration=after.memory.total_bytes if after.memory else None, note="of the fullest GPU",
        ),
        Metric(
            name="Tokens/s per GPU", value=found.tokens_per_second_per_gpu, unit="rate",
            after_calibration=after.tokens_per_second_per_gpu,
        ),
        Metric(name="MFU", value=found.mfu, unit="share", after_calibration=after.mfu, note="model FLOPs of the peak"),
        Metric(name="HFU", value=found.hfu, unit="share", after_calibration=after.hfu, note="with what is recomputed"),
        Metric(name="Model TFLOP/s per GPU", value=found.model_tflops_per_gpu, unit="tflops"),
        Metric(name="Training", value=found.calendar_days, unit="days", after_calibration=after.calendar_days),
        Metric(name="GPU-hours", value=found.gpu_hours, unit="hours", after_calibration=after.gpu_hours),
        Metric(name="Cost", value=found.cost, unit="dollars", after_calibration=after.cost),
        Metric(name="Energy", value=found.energy, unit="joules"),
    ]  # fmt: skip
    return tuple(row for row in rows if row.value is not None)


def serving_metrics(found: InferenceEstimate) -> tuple[Metric, ...]:
    """Of a legal configuration; none of an illegal one."""
    ranges = found.intervals
    ttft = ranges.ttft_s if ranges else (None, None)
    tpot = ranges.tpot_s if ranges else (None, None)
    rate = ranges.output_tokens_per_second_per_gpu if ranges else (None, None)
    rows = [
        Metric(name="Time to first token", value=found.ttft_s, unit="seconds", low=ttft[0], high=ttft[1]),
        Metric(name="Time per output token", value=found.tpot_s, unit="seconds", low=tpot[0], high=tpot[1]),
        Metric(name="Request latency", value=found.request_latency_s, unit="seconds"),
        Metric(
            name="Output tokens/s per GPU", value=found.output_tokens_per_second_per_gpu, unit="rate", low=rate[0], high=rate[1]
        ),
        Metric(name="Requests/s", value=found.request_rate_per_second, unit="rate"),
        Metric(name="Memory", value=found.memory.total_bytes if found.memory else None, unit="bytes"),
        Metric(name="Requests that fit at once", value=found.max_concurrency, unit="count"),
        Metric(name="Cost per million output tokens", value=found.cost_per_million_output_tokens, unit="dollars"),
    ]
    return tuple(row for row in rows if row.value is not None)
