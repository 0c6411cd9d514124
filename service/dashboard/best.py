"""The best configuration of a search: the result's first row, or the leader while there is none."""

from __future__ import annotations

from dataclasses import replace

from hp_tool.domain.measurement import Measurement
from hp_tool.domain.records import JsonObject, RunRecord
from hp_tool.domain.result import Recommendation
from hp_tool.domain.serving import ServingRecommendation
from hp_tool.errors import HpToolError
from hp_tool.search.serving import TARGETS
from service.dashboard.contexts import Best, Latency
from service.dashboard.formats import arithmetic, details
from service.dashboard.serving_runs import LATENCIES, misses, predicted_costs, serves, targets_of, words


def recommended_best(row: Recommendation | ServingRecommendation, *, query: JsonObject) -> Best:
    """Of the first row of a search's result."""
    if isinstance(row, ServingRecommendation):
        return _served(row, query)
    predicted, known = row.estimate, row.calibrated_estimate or row.estimate
    shape, rest = arithmetic(row.parallel), details(row.parallel)
    shown = (
        _measured(row.measurement, arithmetic=shape, details=rest)
        if row.measurement
        else Best(
            arithmetic=shape,
            details=rest,
            measured=False,
            step_s=known.time.step_s if known.time else None,
            tokens_per_second_per_gpu=known.tokens_per_second_per_gpu,
        )
    )
    return replace(
        shown,
        predicted_step_s=predicted.time.step_s if predicted.time else None,
        calibrated_step_s=known.time.step_s if known.time else None,
        predicted_memory_bytes=predicted.memory.allocated_bytes if predicted.memory else None,
    )


def leading_best(run: RunRecord, *, query: JsonObject) -> Best | None:
    """Of the best run so far, beside what was predicted of it."""
    if run.measurement is None:
        return None
    shape, rest = words(run.parallel)
    best = replace(
        _measured(run.measurement, arithmetic=shape, details=rest),
        predicted_step_s=run.predicted.get("step_s"),
        calibrated_step_s=run.predicted.get("calibrated_step_s"),
        predicted_memory_bytes=run.predicted.get("memory_allocated_bytes"),
    )
    return _with_latencies(best, run, query) if serves(query) else best


def _measured(measurement: Measurement, *, arithmetic: str, details: str) -> Best:
    return Best(
        arithmetic=arithmetic,
        details=details,
        measured=True,
        step_s=measurement.objective_s,
        tokens_per_second_per_gpu=measurement.tokens_per_second_per_gpu,
        # A reduced run's memory is another configuration's.
        peak_memory_bytes=measurement.peak_memory_bytes if measurement.fidelity.is_whole else None,
    )


def _served(row: ServingRecommendation, query: JsonObject) -> Best:
    """Of a row that was measured, the calibrated estimate is what was measured."""
    predicted, known = row.estimate, row.calibrated_estimate or row.estimate
    measured = row.measurement is not None
    targets = targets_of(query)
    arithmetic, details = words(row.parallel)
    return Best(
        arithmetic=arithmetic,
        details=details,
        measured=measured,
        step_s=known.request_latency_s,
        tokens_per_second_per_gpu=known.output_tokens_per_second_per_gpu,
        peak_memory_bytes=row.measurement.peak_memory_bytes if row.measurement else None,
        predicted_step_s=predicted.request_latency_s,
        calibrated_step_s=known.request_latency_s,
        predicted_tokens_per_second_per_gpu=predicted.output_tokens_per_second_per_gpu,
        latencies=tuple(
            Latency(
                name=LATENCIES[name],
                measured_s=getattr(known, name) if measured else None,
                predicted_s=getattr(predicted, name),
                target_s=targets.get(name),
            )
            for name in TARGETS
        ),
    )


def _with_latencies(best: Best, run: RunRecord, query: JsonObject) -> Best:
    try:
        costs = predicted_costs(query, [run.parallel])
    except HpToolError:  # of another version: what was stored is shown
        return best
    targets = targets_of(query)
    load = run.measurement and run.measurement.load
    return replace(
        best,
        predicted_tokens_per_second_per_gpu=float(costs.output_tokens_per_second_per_gpu[0]),
        misses=misses(load, targets=targets) if load else (),
        latencies=tuple(
            Latency(
                name=LATENCIES[name],
                measured_s=getattr(load, name) if load else None,
                predicted_s=float(getattr(costs, name)[0]),
                target_s=targets.get(name),
            )
            for name in TARGETS
        ),
    )
