"""Figures of estimates, of fixes and of measured runs, with their units and ranges."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from hp_tool.domain.records import RunRecord
from hp_tool.domain.result import Estimate, Mend
from hp_tool.domain.serving import InferenceEstimate, ServingMend
from hp_tool.render.fit import needs

MetricUnit = Literal["seconds", "bytes", "rate", "share", "change", "tflops", "days", "hours", "dollars", "joules", "count"]
LESS_IS_BETTER = frozenset({"seconds", "bytes", "days", "hours", "dollars", "joules"})
"""Units in which a smaller value is better."""


Interval = tuple[float, float] | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Metric:
    """One figure with its prediction interval."""

    name: str
    value: float | None
    unit: MetricUnit
    low: float | None = None
    high: float | None = None
    by_cost_model: float | None = None
    """What the cost model says by itself, where `value` is calibrated; None without measurements on this cluster."""
    note: str = ""


def training_metrics(estimate: Estimate, calibrated: Estimate | None) -> tuple[Metric, ...]:
    """Figures of a legal training configuration, calibrated where the cluster was measured; empty for an illegal one."""
    if estimate.time is None or estimate.memory is None:
        return ()
    known = calibrated or estimate
    step_s, memory_bytes = (known.intervals.step_s, known.intervals.memory_total_bytes) if known.intervals else (None, None)

    def figure(
        name: str, unit: MetricUnit, of: Callable[[Estimate], float | None], interval: Interval = None, note: str = ""
    ) -> Metric:
        alone = of(estimate)
        value = of(known) if calibrated else None
        return _metric(name, unit, alone if value is None else value, interval, None if value is None else alone, note=note)

    return _known(
        figure("Step time", "seconds", lambda each: each.time.step_s if each.time else None, step_s),
        figure(
            "Memory",
            "bytes",
            lambda each: each.memory.total_bytes if each.memory else None,
            memory_bytes,
            f"of the fullest GPU: {needs(known)}" if known.intervals else "of the fullest GPU",
        ),
        figure("Tokens/s per GPU", "rate", lambda each: each.tokens_per_second_per_gpu),
        figure("MFU", "share", lambda each: each.mfu, note="model FLOPs over peak, attention in full"),
        figure("MFU, causal", "share", lambda each: each.mfu_causal, note="with the causal half of attention"),
        figure("HFU", "share", lambda each: each.hfu, note="including recomputation"),
        figure("Model TFLOP/s per GPU", "tflops", lambda each: each.model_tflops_per_gpu),
        figure("Training", "days", lambda each: each.calendar_days),
        figure("GPU-hours", "hours", lambda each: each.gpu_hours),
        figure("Cost", "dollars", lambda each: each.cost),
        figure("Energy", "joules", lambda each: each.energy),
    )


def serving_metrics(estimate: InferenceEstimate) -> tuple[Metric, ...]:
    """Figures of a legal serving configuration; empty for an illegal one."""
    intervals, rate = estimate.intervals, estimate.output_tokens_per_second_per_gpu
    prices = estimate.cost_per_million_tokens
    ttft_s, tpot_s, rates = (
        (intervals.ttft_s, intervals.tpot_s, intervals.output_tokens_per_second_per_gpu) if intervals else (None, None, None)
    )
    return _known(
        _metric("Time to first token", "seconds", estimate.ttft_s, ttft_s),
        _metric("Time per output token", "seconds", estimate.tpot_s, tpot_s),
        _metric("Request latency", "seconds", estimate.request_latency_s),
        _metric("Output tokens/s per GPU", "rate", rate, rates),
        _metric("Requests/s", "rate", estimate.request_rate_per_second),
        _metric("Requests in flight", "count", estimate.concurrency),
        _metric("Users", "count", estimate.users, note="people with one request at a time"),
        _metric("Memory", "bytes", estimate.memory.total_bytes if estimate.memory else None),
        _metric("Maximum concurrent requests", "count", estimate.max_concurrency),
        _metric("Cost per million output tokens", "dollars", estimate.cost_per_million_output_tokens),
        _metric("Decoding alone, per million tokens", "dollars", prices.output if prices else None, note="without prefill"),
        _metric("Cost per million input tokens", "dollars", prices.input if prices else None, note="of prefill"),
    )


def fix_metrics(fix: Mend | ServingMend) -> tuple[Metric, ...]:
    """Figures of a fix of an infeasible configuration, and how they change."""
    memory = _metric("Memory", "bytes", fix.memory_total_bytes)
    if isinstance(fix, ServingMend):
        return (
            memory,
            _metric("TTFT", "seconds", fix.ttft_s),
            _metric("TPOT", "seconds", fix.tpot_s),
            _metric("Output tokens/s per GPU", "rate", fix.output_tokens_per_second_per_gpu),
            _metric("Throughput change", "change", fix.throughput_change_fraction),
        )
    return (
        memory,
        _metric("Step", "seconds", fix.step_s),
        _metric("Step change", "change", fix.step_change_fraction),
    )


def measured_metrics(run: RunRecord) -> tuple[Metric, ...]:
    """Measured figures of a run, under the names of the predicted ones; empty if it failed."""
    measurement = run.measurement
    if measurement is None or measurement.status != "ok":
        return ()
    rate, load = measurement.tokens_per_second_per_gpu, measurement.load
    # A reduced run needs another amount of memory than the whole configuration.
    peak_bytes = measurement.peak_memory_bytes if run.fidelity.is_whole else None
    memory = _metric("Peak memory allocated", "bytes", peak_bytes)
    if load is None:
        return _known(
            _metric("Step time", "seconds", measurement.objective_s), _metric("Tokens/s per GPU", "rate", rate), memory
        )
    return _known(
        _metric("Time to first token", "seconds", load.ttft_s),
        _metric("Time per output token", "seconds", load.tpot_s),
        _metric("Request latency", "seconds", load.request_latency_s),
        _metric("Output tokens/s per GPU", "rate", rate),
        memory,
    )


def _known(*metrics: Metric) -> tuple[Metric, ...]:
    return tuple(metric for metric in metrics if metric.value is not None)


def _metric(
    name: str,
    unit: MetricUnit,
    value: float | None,
    interval: Interval = None,
    by_cost_model: float | None = None,
    *,
    note: str = "",
) -> Metric:
    low, high = interval or (None, None)
    return Metric(name=name, value=value, unit=unit, low=low, high=high, by_cost_model=by_cost_model, note=note)
