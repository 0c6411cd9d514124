"""Figures of estimates, fixes and measured runs for pages: values with units and ranges."""

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import cast

from hp_tool.domain.records import RunRecord
from hp_tool.domain.result import Estimate, Fix
from hp_tool.domain.serving import InferenceEstimate, ServingFix
from hp_tool.domain.states import Tone
from hp_tool.wording import figures
from hp_tool.wording.figures import Figure, Unit
from hp_tool.wording.fit import memory_range_words


@dataclass(frozen=True, slots=True, kw_only=True)
class Metric:
    """One figure with its prediction interval."""

    name: str
    value: float | None
    unit: Unit
    low: float | None = None
    high: float | None = None
    by_cost_model: float | None = None
    """Value without calibration, if `value` is calibrated; None without measurements of this
    cluster.
    """
    note: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class ComparedRun:
    """A profile run of a configuration."""

    number: int
    """Number within its search, from 0."""
    state: str
    tone: Tone
    cause: str | None
    """Why it failed."""
    reduced: bool
    """Whether its times are extrapolated from a reduced run."""
    metrics: tuple[Metric, ...]
    """Measured metrics, named like the predicted ones; empty if the run failed."""


def compared_run(run: RunRecord, device: str) -> ComparedRun:
    """Return a run's results. `device` is the name for one GPU."""
    measurement = run.measurement
    return ComparedRun(
        number=run.number,
        state=str(run.shown_state),
        tone=run.shown_state.tone,
        cause=run.cause or (measurement.cause if measurement else None),
        reduced=not run.fidelity.is_whole,
        metrics=measured_metrics(run, device),
    )


def training_metrics(
    estimate: Estimate, calibrated: Estimate | None, device: str = "GPU"
) -> tuple[Metric, ...]:
    """Return the metrics of a training configuration, calibrated if the cluster was measured.

    They are empty for an illegal configuration. `device` is the name for one GPU.
    """
    if estimate.time is None or estimate.memory is None:
        return ()
    known = calibrated or estimate
    rows = (
        _metric(each, known, alone=calibrated and estimate, device=device)
        for each in figures.TRAINING
    )
    noted = f"of the fullest {device}{f': {memory_range_words(known)}' if known.intervals else ''}"
    return tuple(
        replace(row, note=noted) if row.unit == "bytes" else row
        for row in rows
        if row.value is not None
    )


def serving_metrics(estimate: InferenceEstimate, device: str = "GPU") -> tuple[Metric, ...]:
    """Return the metrics of a serving configuration; empty if it is illegal."""
    return _drop_unknown(figures.SERVING, estimate, device=device)


def fix_metrics(fix: Fix | ServingFix) -> tuple[Metric, ...]:
    """Return the metrics after a fix, and their changes."""
    shown = figures.SERVED_AFTER_FIX if isinstance(fix, ServingFix) else figures.AFTER_FIX
    return tuple(_metric(each, fix) for each in shown)


def measured_metrics(run: RunRecord, device: str = "GPU") -> tuple[Metric, ...]:
    """Return a run's measured metrics, named like the predicted ones; empty if it failed."""
    measurement = run.measurement
    if measurement is None or measurement.status != "ok":
        return ()
    shown = figures.MEASURED if measurement.load is None else figures.SERVED_MEASURED
    # The memory of a reduced run differs from that of the full configuration.
    return _drop_unknown(
        (*shown, *([figures.PEAK] if run.fidelity.is_whole else [])), measurement, device
    )


def measured_parts(run: RunRecord | None) -> dict[str, float]:
    """Return the measured seconds of a step or request, by measured part.

    Without measured parts, the whole time is one part. Without a time, the result is empty.
    """
    measurement = run and run.measurement
    if not run or not measurement or measurement.status != "ok":
        return {}
    if measurement.parts_s and run.fidelity.is_whole:
        return measurement.parts_s
    seconds = measurement.load.request_latency_s if measurement.load else measurement.objective_s
    return {"measured": seconds} if seconds else {}


def measured_peak(run: ComparedRun | None) -> float | None:
    """Return the peak memory of the fullest device in bytes; None for failed or reduced runs."""
    return (
        next((each.value for each in run.metrics if each.name == figures.PEAK.label), None)
        if run
        else None
    )


def _drop_unknown(
    shown: Iterable[Figure], source: object, device: str = "GPU"
) -> tuple[Metric, ...]:
    return tuple(
        row
        for row in (_metric(each, source, device=device) for each in shown)
        if row.value is not None
    )


def _metric(figure: Figure, source: object, *, alone: object = None, device: str = "GPU") -> Metric:
    """Return a metric.

    `alone` is the uncalibrated estimate, for values that calibrations do not cover.
    """
    value, before = figure.value(source), figure.value(alone) if alone is not None else None
    low, high = figure.stored_interval(source) or (None, None)
    return Metric(
        name=figure.label.replace("GPU", device),
        value=before if value is None else value,
        unit=cast(Unit, figure.unit),  # Numbers have no unit.
        low=low,
        high=high,
        by_cost_model=None if value is None else before,
        note=figure.note,
    )
