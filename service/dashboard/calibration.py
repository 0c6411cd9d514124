"""/calibration and its series: prediction errors before and after, drift, outliers, and the runs. /measurements: every run."""

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from html import escape
from typing import Annotated, Any, get_args

from fastapi import APIRouter, Query, Request
from fastapi.responses import RedirectResponse

from hp_tool.domain.access import Scope
from hp_tool.domain.measurement import MeasurementStatus, Runner
from hp_tool.domain.records import CalibrationRecord, MeasurementRecord
from hp_tool.errors import HpToolError, NotFoundError
from hp_tool.learning.evidence import residual_report
from hp_tool.search.serving import software
from service.api.dependencies import Cursor, PrincipalDep, StoreDep, SystemStoreDep
from service.api.measurements import learn
from service.api.views import View
from service.dashboard import formats
from service.dashboard.figures import Figure, Trace, line, markers
from service.dashboard.page import BLANK_IS_NONE, Page, Tone, address, configuration_href, json_href, next_href, page_at
from service.dashboard.trials import TONES, words

MAX_ROWS = 50
STATUSES: tuple[MeasurementStatus, ...] = get_args(MeasurementStatus)
MAX_CALIBRATIONS = 500
"""Newest calibrations, among which the page finds the newest of each series."""
MAX_VERSIONS = 200
FAMILIES = {"dense": "dense models", "moe": "mixtures of experts"}
COST_MODEL: dict[str, object] = {"color": "--series-8", "symbol": "circle-open", "size": 8}
CALIBRATED: dict[str, object] = {"color": "--series-1", "symbol": "circle", "size": 8}
OUTLIER: dict[str, object] = {"color": "--bad", "symbol": "x-thin-open", "size": 14}
Word = Annotated[str, Query(max_length=200)]

router = APIRouter(tags=["dashboard"])


@dataclass(frozen=True, slots=True, kw_only=True)
class MeasuredRow(View):
    """A measured run, wherever one is listed. Errors are predicted / measured - 1."""

    model: str
    arithmetic: str
    details: str
    source: str
    measured_s: float | None
    search_href: str | None
    """None for a measurement that was reported or imported."""
    configuration_href: str | None
    """None if the stored query is empty or from another version."""
    created_at: datetime

    @staticmethod
    def computed(record: MeasurementRecord) -> dict[str, Any]:
        arithmetic, details = words(record.parallel)
        return {
            "arithmetic": arithmetic,
            "details": details,
            "search_href": f"/searches/{record.search_id}" if record.search_id else None,
            "configuration_href": _configuration_href(record),
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class MeasurementRow(MeasuredRow):
    """A stored measurement."""

    short_id: str
    gpu: str
    framework: str
    status: MeasurementStatus
    tone: Tone
    predicted_s: float | None
    error: float | None
    peak_memory_bytes: int | None
    cause: str | None


@dataclass(frozen=True, slots=True, kw_only=True)
class MeasurementsPage(Page):
    """Measurements, newest first."""

    gpu: str
    model: str
    status: MeasurementStatus | None
    statuses: tuple[MeasurementStatus, ...]
    rows: tuple[MeasurementRow, ...]
    next_href: str | None


@dataclass(frozen=True, slots=True, kw_only=True)
class VersionRow(View):
    """One version of a series. Errors are medians of |predicted / measured - 1|."""

    version: int
    measurements: int
    error_before: float | None
    error_after: float | None
    created_at: datetime

    @staticmethod
    def computed(record: CalibrationRecord) -> dict[str, Any]:
        accuracy = record.payload.get("accuracy") or {}
        errors = {name: accuracy.get(name) for name in ("error_before", "error_after")}
        return {"measurements": record.num_measurements, **errors}


@dataclass(frozen=True, slots=True, kw_only=True)
class SeriesRow(VersionRow):
    """The newest calibration of a cluster, its software and a family of models."""

    cluster: str
    framework: str
    family: str
    href: str

    @staticmethod
    def computed(record: CalibrationRecord) -> dict[str, Any]:
        places = {"cluster": record.cluster_key, "family": _family(record), "href": _series_href(record)}
        return VersionRow.computed(record) | places


@dataclass(frozen=True, slots=True, kw_only=True)
class MeasuredClusterRow(View):
    """A cluster with measurements."""

    cluster: str
    gpu: str
    framework: str
    measurements: int
    href: str
    """Page of its measurements."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CalibrationsPage(Page):
    """All series."""

    series: tuple[SeriesRow, ...]
    clusters: tuple[MeasuredClusterRow, ...]
    may_fit: bool
    """The caller may start a new fit."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Factor:
    """One fitted number: a factor of the cost model's prediction, or an overhead."""

    name: str
    text: str


@dataclass(frozen=True, slots=True, kw_only=True)
class ResidualRow(MeasuredRow):
    """One run with its predictions before and after calibration."""

    before_s: float
    after_s: float
    error_before: float
    error_after: float
    outlier: bool
    taught: bool
    """The calibration was fitted on it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SeriesPage(Page):
    """One series: its versions, the newest one's factors, and its runs."""

    cluster: str
    framework: str
    family: str
    serves: bool
    """Its runs served requests; otherwise they were training steps."""
    newest: VersionRow
    versions: tuple[VersionRow, ...]
    factors: tuple[Factor, ...]
    lessons: tuple[ResidualRow, ...]
    outliers: int
    unseen: int
    """Runs it was fitted on that are not listed."""
    figures: dict[str, Any]
    """For plot.js."""


@page_at(router, "/calibration", template="calibrations.html", section="Calibration")
def calibrations_context(store: StoreDep, principal: PrincipalDep) -> CalibrationsPage:
    """Calibrations, as shown on their page."""
    newest: dict[tuple[str, str, str], CalibrationRecord] = {}
    for record in store.list_calibrations(limit=MAX_CALIBRATIONS).items:  # newest first
        newest.setdefault((record.cluster_key, record.framework, record.model_family), record)
    return CalibrationsPage(
        title="Calibration",
        json_href="/calibration.json",
        series=tuple(SeriesRow.of(record) for _, record in sorted(newest.items())),
        clusters=tuple(
            MeasuredClusterRow.of(cluster, cluster=cluster.cluster_key, href=address("/measurements", {"gpu": cluster.gpu}))
            for cluster in store.measured_clusters()
        ),
        may_fit=principal.scope >= Scope.SUBMIT,
    )


@page_at(router, "/calibration/series", template="calibration_series.html", section="Calibration")
def series_context(store: StoreDep, cluster_key: Word, framework: Word, model_family: Word = "") -> SeriesPage:
    """One series of calibrations, as shown on its page."""
    page = store.list_calibrations(cluster_key=cluster_key, framework=framework, limit=MAX_VERSIONS)
    records = [record for record in page.items if record.model_family == model_family]
    if not records:
        raise NotFoundError(f"there is no calibration of {framework!r} on {cluster_key!r}", field="cluster_key")
    newest = records[0]
    residuals = residual_report(store=store, record=newest)
    rows = tuple(ResidualRow.of(residual.record, residual) for residual in residuals)
    versions = tuple(map(VersionRow.of, records))
    fitted_on = set(newest.payload.get("measurement_ids", ()))
    return SeriesPage(
        title=f"Calibration of {newest.cluster_key}",
        json_href=json_href(_series_href(newest)),
        cluster=newest.cluster_key,
        framework=newest.framework,
        family=_family(newest),
        serves=newest.framework.split()[0] in {software(runner) for runner in get_args(Runner)},
        newest=versions[0],
        versions=versions,
        factors=tuple(_factors(newest.payload.get("summary", {}))),
        lessons=rows[::-1],
        outliers=sum(row.outlier for row in rows),
        unseen=len(fitted_on - {residual.record.id for residual in residuals}),
        figures={"agreement": agreement(rows), "drift": drift(rows), "versions": errors_by_version(versions)},
    )


@page_at(router, "/measurements", template="measurements.html", section="Calibration")
def measurements_context(
    store: StoreDep,
    status: Annotated[MeasurementStatus | None, Query(description="How it ended"), BLANK_IS_NONE] = None,
    gpu: Word = "",
    model: Word = "",
    cursor: Cursor = None,
) -> MeasurementsPage:
    """Measurements, as shown on their page."""
    page = store.measurements(gpu=gpu or None, model=model or None, status=status, limit=MAX_ROWS, cursor=cursor)
    filters = {"gpu": gpu, "model": model, "status": status}
    return MeasurementsPage(
        title="Measurements",
        json_href=address("/measurements.json", filters),
        gpu=gpu,
        model=model,
        status=status,
        statuses=STATUSES,
        rows=tuple(map(_row, page.items)),
        next_href=next_href("/measurements", page, filters),
    )


@router.post("/calibration", include_in_schema=False)
def fit(request: Request, store: SystemStoreDep) -> RedirectResponse:
    """Fit all stored measurements, as POST /v1/calibrations does."""
    learn(request, store)
    return RedirectResponse("/calibration", status_code=303)


def _row(record: MeasurementRecord) -> MeasurementRow:
    measurement, predicted_s = record.measurement, record.predicted.get("step_s")
    measured_s = measurement.objective_s
    return MeasurementRow.of(
        record,
        measurement,
        short_id=record.id[:8],
        tone=TONES.get(measurement.status, ""),
        predicted_s=predicted_s,
        measured_s=measured_s,
        error=predicted_s / measured_s - 1.0 if predicted_s and measured_s else None,
    )


def _configuration_href(record: MeasurementRecord) -> str | None:
    try:
        return configuration_href(record.query, parallel=record.parallel) if record.query else None
    except HpToolError:
        return None


def _series_href(record: CalibrationRecord) -> str:
    names = ("cluster_key", "framework", "model_family")
    return address("/calibration/series", {name: getattr(record, name) for name in names})


def _family(record: CalibrationRecord) -> str:
    return FAMILIES.get(record.model_family, "all models")


def _factors(summary: dict[str, Any]) -> list[Factor]:
    factors = [
        Factor(name=f"{formats.words(name)}, factor", text=f"{value:.3f}") for name, value in summary.get("factors", {}).items()
    ]
    for key, name, text in (
        ("step_overhead_s", "overhead per step", formats.seconds),
        ("layer_overhead_s", "overhead per pass of a layer", formats.seconds),
        ("memory_factor", "allocated memory, factor", "{:.3f}".format),
        ("memory_overhead_bytes", "memory overhead", formats.gib),
        ("residual_log_sd", "remaining scatter", formats.share),
    ):
        if (value := summary.get(key)) is not None:
            factors.append(Factor(name=name, text=text(value)))
    return factors


def agreement(rows: Sequence[ResidualRow]) -> Figure:
    """Predicted against measured times with the identity line, both axes logarithmic."""
    times = [value for row in rows for value in (row.measured_s, row.before_s, row.after_s) if value is not None]
    ends = [min(times, default=0.1) / 1.1, max(times, default=1.0) * 1.1]
    measured, names = [row.measured_s for row in rows], _names(rows)
    before, after = [row.before_s for row in rows], [row.after_s for row in rows]
    hover = "measured %{x:.3g} s, predicted %{y:.3g} s"
    return {
        "data": [
            line("predicted = measured", x=ends, y=ends, style={"color": "--ink-soft", "dash": "dot", "width": 1}),
            markers("cost model", x=measured, y=before, text=names, hover=hover, marker=COST_MODEL),
            markers("after calibration", x=measured, y=after, text=names, hover=hover, marker=CALIBRATED),
        ],
        "layout": {
            "xaxis": {"title": "Measured step, s", "type": "log"},
            "yaxis": {"title": "Predicted step, s", "type": "log"},
        },
    }


def drift(rows: Sequence[ResidualRow]) -> Figure:
    """Errors over the time of the measurement, which reveal a change of the cluster; outliers are marked."""
    outliers = [row for row in rows if row.outlier]
    return {
        "data": [
            _errors("cost model", rows, [row.error_before for row in rows], marker=COST_MODEL),
            _errors("after calibration", rows, [row.error_after for row in rows], marker=CALIBRATED),
            _errors("outliers", outliers, [row.error_after for row in outliers], marker=OUTLIER),
        ],
        "layout": {
            "xaxis": {"title": "Measured at (UTC)", "nticks": 4, "tickangle": 0},
            "yaxis": {"title": "Predicted / measured − 1", "tickformat": "+.0%", "zeroline": True},
        },
    }


def errors_by_version(versions: Sequence[VersionRow]) -> Figure:
    """Median errors of each version, oldest first."""
    ordered = [version for version in reversed(versions) if version.error_before is not None]
    numbers = [version.version for version in ordered]
    hover = {"mode": "lines+markers", "hoverinfo": "all", "hovertemplate": "version %{x}: %{y:.1%}<extra></extra>"}
    before, after = [version.error_before for version in ordered], [version.error_after for version in ordered]
    name_after = "after calibration, on runs not fitted on"
    return {
        "data": [
            line("cost model", x=numbers, y=before, style={"color": COST_MODEL["color"]}) | hover,
            line(name_after, x=numbers, y=after, style={"color": CALIBRATED["color"]}) | hover,
        ],
        "layout": {
            "xaxis": {"title": "Version", "dtick": max(1, len(ordered) // 10)},
            "yaxis": {"title": "Median |error|", "tickformat": ".0%", "rangemode": "tozero"},
        },
    }


def _errors(name: str, rows: Sequence[ResidualRow], errors: list[float], *, marker: dict[str, object]) -> Trace:
    moments = [row.created_at.isoformat() for row in rows]
    return markers(name, x=moments, y=errors, text=_names(rows), hover="%{y:+.1%}", marker=marker | {"line": {"width": 2}})


def _names(rows: Sequence[ResidualRow]) -> list[str]:
    """Hover texts. Plotly interprets some markup, so users' words are escaped."""
    return [f"{escape(row.model)}<br>{row.arithmetic}" for row in rows]
