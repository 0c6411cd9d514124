"""From stored calibrations and measurements to what their pages show."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, get_args
from urllib.parse import urlencode

from hp_tool.domain.measurement import MeasurementStatus, Runner
from hp_tool.domain.records import CalibrationRecord, MeasuredCluster, MeasurementRecord, Page
from hp_tool.errors import HpToolError
from hp_tool.learning.residuals import Residual
from hp_tool.search.serving import software
from service.dashboard import formats
from service.dashboard.calibration.contexts import (
    CalibrationsPage,
    ClusterRow,
    Factor,
    LessonRow,
    MeasurementRow,
    MeasurementsPage,
    SeriesPage,
    SeriesRow,
    VersionRow,
)
from service.dashboard.calibration.plots import agreement, drift, versions_plot
from service.dashboard.links import configuration_href
from service.dashboard.serving_runs import words
from service.dashboard.trials import TONES

STATUSES: tuple[MeasurementStatus, ...] = get_args(MeasurementStatus)


def calibrations_page(
    records: Sequence[CalibrationRecord], *, clusters: Sequence[MeasuredCluster], may_fit: bool
) -> CalibrationsPage:
    """The newest of each series; `records` are newest first."""
    newest: dict[tuple[str, str, str], CalibrationRecord] = {}
    for record in records:
        newest.setdefault((record.cluster_key, record.framework, record.model_family), record)
    return CalibrationsPage(
        title="Calibration",
        json_href="/calibration.json",
        series=tuple(_series_row(record) for _, record in sorted(newest.items())),
        clusters=tuple(
            ClusterRow(
                cluster=each.cluster_key,
                gpu=each.gpu,
                framework=each.framework,
                measurements=each.measurements,
                href=f"/measurements?{urlencode({'gpu': each.gpu})}",
            )
            for each in clusters
        ),
        may_fit=may_fit,
    )


def series_page(records: Sequence[CalibrationRecord], *, lessons: Sequence[Residual]) -> SeriesPage:
    """One series; `records` are its versions, newest first, `lessons` hold the newest against its runs."""
    newest = records[0]
    rows = tuple(_lesson_row(lesson) for lesson in lessons)
    versions = tuple(_version(record) for record in records)
    taught = set(newest.payload.get("measurement_ids", ()))
    return SeriesPage(
        title=f"Calibration of {newest.cluster_key}",
        json_href=_series_href(newest, suffix=".json"),
        cluster=newest.cluster_key,
        framework=newest.framework,
        family=_family(newest),
        serves=newest.framework.split()[0] in {software(runner) for runner in get_args(Runner)},
        newest=versions[0],
        versions=versions,
        factors=tuple(_factors(newest.payload.get("summary", {}))),
        lessons=rows[::-1],
        outliers=sum(row.outlier for row in rows),
        unseen=len(taught - {lesson.record.id for lesson in lessons}),
        figures={"agreement": agreement(rows), "drift": drift(rows), "versions": versions_plot(versions)},
    )


def measurements_page(
    page: Page[MeasurementRecord], *, gpu: str, model: str, status: MeasurementStatus | None
) -> MeasurementsPage:
    """A part of the list under these filters."""
    kept = {name: value for name, value in {"gpu": gpu, "model": model, "status": status}.items() if value}
    following = f"/measurements?{urlencode({**kept, 'cursor': page.next_cursor})}" if page.next_cursor else None
    return MeasurementsPage(
        title="Measurements",
        json_href=f"/measurements.json?{urlencode(kept)}",
        gpu=gpu,
        model=model,
        status=status,
        statuses=STATUSES,
        rows=tuple(_measurement_row(record) for record in page.items),
        next_href=following,
    )


def _series_row(record: CalibrationRecord) -> SeriesRow:
    version = _version(record)
    return SeriesRow(
        cluster=record.cluster_key,
        framework=record.framework,
        family=_family(record),
        version=version.version,
        measurements=version.measurements,
        error_before=version.error_before,
        error_after=version.error_after,
        created_at=version.created_at,
        href=_series_href(record),
    )


def _version(record: CalibrationRecord) -> VersionRow:
    accuracy = record.payload.get("accuracy") or {}
    return VersionRow(
        version=record.version,
        measurements=record.num_measurements,
        error_before=accuracy.get("error_before"),
        error_after=accuracy.get("error_after"),
        created_at=record.created_at,
    )


def _series_href(record: CalibrationRecord, *, suffix: str = "") -> str:
    named = {"cluster_key": record.cluster_key, "framework": record.framework, "model_family": record.model_family}
    return f"/calibration/series{suffix}?{urlencode(named)}"


def _family(record: CalibrationRecord) -> str:
    return {"dense": "dense models", "moe": "mixtures of experts"}.get(record.model_family, "all models")


def _factors(summary: dict[str, Any]) -> list[Factor]:
    found = [
        Factor(name=f"{formats.words(name)}, times", text=f"{value:.3f}") for name, value in summary.get("factors", {}).items()
    ]
    if (value := summary.get("step_overhead_s")) is not None:
        found.append(Factor(name="added to every step", text=formats.seconds(value)))
    if (value := summary.get("layer_overhead_s")) is not None:
        found.append(Factor(name="added to every layer's pass", text=formats.seconds(value)))
    if (value := summary.get("memory_factor")) is not None:
        found.append(Factor(name="allocated memory, times", text=f"{value:.3f}"))
    if (value := summary.get("memory_overhead_bytes")) is not None:
        found.append(Factor(name="added to memory", text=formats.gib(value)))
    if (value := summary.get("residual_log_sd")) is not None:
        found.append(Factor(name="scatter that remains", text=formats.share(value)))
    return found


def _lesson_row(lesson: Residual) -> LessonRow:
    record = lesson.record
    arithmetic, details = words(record.parallel)
    return LessonRow(
        model=record.model,
        arithmetic=arithmetic,
        details=details,
        source=record.source,
        measured_s=lesson.measured_s,
        before_s=lesson.before_s,
        after_s=lesson.after_s,
        error_before=lesson.error_before,
        error_after=lesson.error_after,
        outlier=lesson.outlier,
        taught=lesson.taught,
        search_href=f"/searches/{record.search_id}" if record.search_id else None,
        configuration_href=_configuration(record),
        created_at=record.created_at,
    )


def _measurement_row(record: MeasurementRecord) -> MeasurementRow:
    measurement, predicted = record.measurement, record.predicted.get("step_s")
    measured = measurement.objective_s
    arithmetic, details = words(record.parallel)
    return MeasurementRow(
        short_id=record.id[:8],
        model=record.model,
        gpu=record.gpu,
        framework=record.framework,
        arithmetic=arithmetic,
        details=details,
        status=measurement.status,
        tone=TONES.get(measurement.status, ""),
        source=record.source,
        predicted_s=predicted,
        measured_s=measured,
        error=predicted / measured - 1.0 if predicted and measured else None,
        peak_memory_bytes=measurement.peak_memory_bytes,
        cause=measurement.cause,
        search_href=f"/searches/{record.search_id}" if record.search_id else None,
        configuration_href=_configuration(record),
        created_at=record.created_at,
    )


def _configuration(record: MeasurementRecord) -> str | None:
    """The page of what ran; None for a query that says nothing, as imported figures may, or nothing that is known today."""
    if not record.query:
        return None
    try:
        return configuration_href(record.query, parallel=record.parallel)
    except HpToolError:  # a query of another version
        return None
