"""The best configuration of a search: the result's first row, or the best run so far until there is one."""

from __future__ import annotations

from dataclasses import dataclass, replace

from hp_tool.domain.measurement import Measurement
from hp_tool.domain.records import JsonObject, RunRecord
from hp_tool.domain.result import Recommendation
from hp_tool.domain.serving import ServingRecommendation
from hp_tool.errors import HpToolError
from hp_tool.search.serving import TARGETS
from service.dashboard.formats import arithmetic, details
from service.dashboard.serving_runs import LATENCIES, misses, predicted_costs, serves, targets_of, words


@dataclass(frozen=True, slots=True, kw_only=True)
class Latency:
    """One latency of a serving configuration."""

    name: str
    measured_s: float | None
    predicted_s: float | None
    """By the cost model, before calibration."""
    target_s: float | None
    """Maximum; None if the query sets none."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Best:
    """The best configuration measured so far; once the search has ended the recommended one, which may not be measured."""

    arithmetic: str
    details: str
    measured: bool
    step_s: float | None
    """Measured, or predicted if `measured` is false."""
    tokens_per_second_per_gpu: float | None
    peak_memory_bytes: int | None = None
    predicted_step_s: float | None = None
    """By the cost model, before calibration."""
    calibrated_step_s: float | None = None
    """By the calibrated cost model."""
    predicted_memory_bytes: float | None = None
    latencies: tuple[Latency, ...] = ()
    """Of a serving configuration under the full load."""
    predicted_tokens_per_second_per_gpu: float | None = None
    """Of a serving configuration."""
    misses: tuple[str, ...] = ()
    """Targets that its measurement misses."""


def recommended_best(row: Recommendation | ServingRecommendation, *, query: JsonObject) -> Best:
    """The first row of a search's result, as pages show it."""
    if isinstance(row, ServingRecommendation):
        return _served(row, query)
    predicted, known, measurement = row.estimate, row.calibrated_estimate or row.estimate, row.measurement
    calibrated_step_s = known.time.step_s if known.time else None
    return Best(
        arithmetic=arithmetic(row.parallel),
        details=details(row.parallel),
        measured=measurement is not None,
        step_s=measurement.objective_s if measurement else calibrated_step_s,
        tokens_per_second_per_gpu=(measurement or known).tokens_per_second_per_gpu,
        peak_memory_bytes=_peak_memory_bytes(measurement) if measurement else None,
        predicted_step_s=predicted.time.step_s if predicted.time else None,
        calibrated_step_s=calibrated_step_s,
        predicted_memory_bytes=predicted.memory.allocated_bytes if predicted.memory else None,
    )


def leading_best(run: RunRecord, *, query: JsonObject) -> Best | None:
    """The best run so far with its predictions; None without a measurement."""
    measurement = run.measurement
    if measurement is None:
        return None
    arithmetic, details = words(run.parallel)
    best = Best(
        arithmetic=arithmetic,
        details=details,
        measured=True,
        step_s=measurement.objective_s,
        tokens_per_second_per_gpu=measurement.tokens_per_second_per_gpu,
        peak_memory_bytes=_peak_memory_bytes(measurement),
        predicted_step_s=run.predicted.get("step_s"),
        calibrated_step_s=run.predicted.get("calibrated_step_s"),
        predicted_memory_bytes=run.predicted.get("memory_allocated_bytes"),
    )
    return _with_latencies(best, run, query) if serves(query) else best


def _peak_memory_bytes(measurement: Measurement) -> int | None:
    """None for a reduced run, which needs another amount of memory than the whole configuration."""
    return measurement.peak_memory_bytes if measurement.fidelity.is_whole else None


def _served(row: ServingRecommendation, query: JsonObject) -> Best:
    """The calibrated estimate of a measured row holds the measured values."""
    predicted, known, measurement = row.estimate, row.calibrated_estimate or row.estimate, row.measurement
    arithmetic, details = words(row.parallel)
    return Best(
        arithmetic=arithmetic,
        details=details,
        measured=measurement is not None,
        step_s=known.request_latency_s,
        tokens_per_second_per_gpu=known.output_tokens_per_second_per_gpu,
        peak_memory_bytes=measurement.peak_memory_bytes if measurement else None,
        predicted_step_s=predicted.request_latency_s,
        calibrated_step_s=known.request_latency_s,
        predicted_tokens_per_second_per_gpu=predicted.output_tokens_per_second_per_gpu,
        latencies=_latencies({name: getattr(predicted, name) for name in TARGETS}, known if measurement else None, query),
    )


def _with_latencies(best: Best, run: RunRecord, query: JsonObject) -> Best:
    try:
        costs = predicted_costs(query, [run.parallel])
    except HpToolError:  # a query of another version: only stored values are shown
        return best
    load = run.measurement and run.measurement.load
    return replace(
        best,
        predicted_tokens_per_second_per_gpu=float(costs.output_tokens_per_second_per_gpu[0]),
        misses=misses(load, targets=targets_of(query)) if load else (),
        latencies=_latencies({name: float(getattr(costs, name)[0]) for name in TARGETS}, load, query),
    )


def _latencies(predicted_s: dict[str, float | None], measured: object | None, query: JsonObject) -> tuple[Latency, ...]:
    targets = targets_of(query)
    return tuple(
        Latency(
            name=LATENCIES[name],
            measured_s=getattr(measured, name) if measured else None,
            predicted_s=predicted_s[name],
            target_s=targets.get(name),
        )
        for name in TARGETS
    )
