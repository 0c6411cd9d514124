"""Figures of estimates, of fixes and of measured runs, with their units and ranges."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from hp_tool.domain.records import JsonObject, RunRecord
from hp_tool.domain.result import Estimate, Mend
from hp_tool.domain.serving import InferenceEstimate, ServingMend
from service.dashboard.replicas import ServingRuns, serves

MetricUnit = Literal["seconds", "bytes", "rate", "share", "change", "tflops", "days", "hours", "dollars", "joules", "count"]
LESS_IS_BETTER = frozenset({"seconds", "bytes", "days", "hours", "dollars", "joules"})
"""Units in which a smaller value is better."""
UNKNOWN = (None, None)


@dataclass(frozen=True, slots=True, kw_only=True)
class Metric:
    """One figure with its prediction interval."""

    name: str
    value: float | None
    unit: MetricUnit
    low: float | None = None
    high: float | None = None
    after_calibration: float | None = None
    """The calibrated prediction; None without measurements on this cluster."""
    note: str = ""


def training_metrics(estimate: Estimate, calibrated: Estimate | None) -> tuple[Metric, ...]:
    """Figures of a legal training configuration; empty for an illegal one."""
    if estimate.time is None or estimate.memory is None:
        return ()
    intervals, after = estimate.intervals, calibrated or Estimate(feasible=True)
    step = intervals.step_s if intervals else UNKNOWN
    memory = (intervals.memory_total_bytes if intervals else None) or UNKNOWN
    return _known(
        Metric(
            name="Step time", value=estimate.time.step_s, unit="seconds", low=step[0], high=step[1],
            after_calibration=after.time.step_s if after.time else None,
        ),
        Metric(
            name="Memory", value=estimate.memory.total_bytes, unit="bytes", low=memory[0], high=memory[1],
            after_calibration=after.memory.total_bytes if after.memory else None, note="of the fullest GPU",
        ),
        Metric(
            name="Tokens/s per GPU", value=estimate.tokens_per_second_per_gpu, unit="rate",
            after_calibration=after.tokens_per_second_per_gpu,
        ),
        Metric(name="MFU", value=estimate.mfu, unit="share", after_calibration=after.mfu, note="model FLOPs of the peak"),
        Metric(name="HFU", value=estimate.hfu, unit="share", after_calibration=after.hfu, note="including recomputation"),
        Metric(name="Model TFLOP/s per GPU", value=estimate.model_tflops_per_gpu, unit="tflops"),
        Metric(name="Training", value=estimate.calendar_days, unit="days", after_calibration=after.calendar_days),
        Metric(name="GPU-hours", value=estimate.gpu_hours, unit="hours", after_calibration=after.gpu_hours),
        Metric(name="Cost", value=estimate.cost, unit="dollars", after_calibration=after.cost),
        Metric(name="Energy", value=estimate.energy, unit="joules"),
    )  # fmt: skip


def serving_metrics(estimate: InferenceEstimate) -> tuple[Metric, ...]:
    """Figures of a legal serving configuration; empty for an illegal one."""
    intervals = estimate.intervals
    ttft, tpot, rate = (
        (intervals.ttft_s, intervals.tpot_s, intervals.output_tokens_per_second_per_gpu) if intervals else (UNKNOWN,) * 3
    )
    return _known(
        Metric(name="Time to first token", value=estimate.ttft_s, unit="seconds", low=ttft[0], high=ttft[1]),
        Metric(name="Time per output token", value=estimate.tpot_s, unit="seconds", low=tpot[0], high=tpot[1]),
        Metric(name="Request latency", value=estimate.request_latency_s, unit="seconds"),
        Metric(
            name="Output tokens/s per GPU", value=estimate.output_tokens_per_second_per_gpu, unit="rate",
            low=rate[0], high=rate[1],
        ),
        Metric(name="Requests/s", value=estimate.request_rate_per_second, unit="rate"),
        Metric(name="Memory", value=estimate.memory.total_bytes if estimate.memory else None, unit="bytes"),
        Metric(name="Maximum concurrent requests", value=estimate.max_concurrency, unit="count"),
        Metric(name="Cost per million output tokens", value=estimate.cost_per_million_output_tokens, unit="dollars"),
    )  # fmt: skip


def fix_metrics(fix: Mend | ServingMend) -> tuple[Metric, ...]:
    """Figures of a fix of an infeasible configuration, and how they change."""
    memory = Metric(name="Memory", value=fix.memory_total_bytes, unit="bytes")
    if isinstance(fix, ServingMend):
        return (
            memory,
            Metric(name="TTFT", value=fix.ttft_s, unit="seconds"),
            Metric(name="TPOT", value=fix.tpot_s, unit="seconds"),
            Metric(name="Output tokens/s per GPU", value=fix.output_tokens_per_second_per_gpu, unit="rate"),
            Metric(name="Throughput change", value=fix.throughput_change_fraction, unit="change"),
        )
    return (
        memory,
        Metric(name="Step", value=fix.step_s, unit="seconds"),
        Metric(name="Step change", value=fix.step_change_fraction, unit="change"),
    )


def measured_metrics(run: RunRecord, *, query: JsonObject) -> tuple[Metric, ...]:
    """Measured figures of a run, under the names of the predicted ones; empty if it failed."""
    measurement = run.measurement
    if measurement is None or measurement.status != "ok":
        return ()
    # A reduced run needs another amount of memory than the whole configuration.
    peak_bytes = measurement.peak_memory_bytes if run.fidelity.is_whole else None
    memory = Metric(name="Peak memory allocated", value=peak_bytes, unit="bytes")
    if not serves(query):
        return _known(
            Metric(name="Step time", value=measurement.known_step_s, unit="seconds"),
            Metric(name="Tokens/s per GPU", value=measurement.tokens_per_second_per_gpu, unit="rate"),
            memory,
        )
    if measurement.serving is None:
        return ()
    latencies = ServingRuns.of(query).seen(measurement.serving, run.parallel)
    return _known(
        Metric(name="Time to first token", value=latencies.ttft_s, unit="seconds"),
        Metric(name="Time per output token", value=latencies.tpot_s, unit="seconds"),
        Metric(name="Request latency", value=latencies.request_latency_s, unit="seconds"),
        Metric(name="Output tokens/s per GPU", value=measurement.tokens_per_second_per_gpu, unit="rate"),
        memory,
    )


def _known(*metrics: Metric) -> tuple[Metric, ...]:
    return tuple(metric for metric in metrics if metric.value is not None)
