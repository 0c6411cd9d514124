"""Pages /calibration and /calibration/series: prediction errors, drift, outliers and runs."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from fastapi import APIRouter, Request
from fastapi.responses import RedirectResponse

from hp_tool.domain.access import Scope
from hp_tool.domain.records import CalibrationRecord
from hp_tool.errors import NotFoundError
from hp_tool.loop.learning.evidence import residual_report
from hp_tool.loop.learning.series import MODELS
from hp_tool.loop.search.serving import SERVING
from service.api.dependencies import PrincipalDep, RefittedDep, StoreDep, SystemStoreDep
from service.api.measurements import learn
from service.api.views import View
from service.dashboard import formats
from service.dashboard.figures import Figure, Trace, line, markers
from service.dashboard.measurements import MeasuredRow, Word
from service.dashboard.page import Page, address, done, json_href, page_at

MAX_CALIBRATIONS = 500
"""Number of newest calibrations that the page searches for the newest one of each series."""
MAX_VERSIONS = 200
MAX_HELD = 200
"""Maximum number of held measurements to count."""
FAMILIES = {"dense": "dense models", "moe": "MoE models"}
COST_MODEL: dict[str, object] = {"color": "--series-8", "symbol": "ring", "size": 8}
CALIBRATED: dict[str, object] = {"color": "--series-1", "size": 8}
OUTLIER: dict[str, object] = {"color": "--bad", "symbol": "cross", "size": 14}

router = APIRouter(tags=["dashboard"])


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
        places = {
            "cluster": record.cluster_key,
            "family": _family(record),
            "href": _series_href(record),
        }
        return VersionRow.computed(record) | places


@dataclass(frozen=True, slots=True, kw_only=True)
class MeasuredClusterRow(View):
    """A cluster with measurements."""

    cluster: str
    gpu: str
    framework: str
    measurements: int
    num_held: int
    """Number of held measurements, in addition to the others."""
    href: str
    """URL of the page with its measurements."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CalibrationsPage(Page):
    """The newest calibration of each series, and the measured clusters."""

    series: tuple[SeriesRow, ...]
    clusters: tuple[MeasuredClusterRow, ...]
    may_fit: bool
    """Whether the caller may start a fit."""
    num_held: int
    """Number of held measurements, up to MAX_HELD."""
    held_href: str | None
    """URL of the page with the held measurements; None without any."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Factor:
    """One fitted constant: a factor on the cost model's prediction, or an overhead."""

    name: str
    text: str


@dataclass(frozen=True, slots=True, kw_only=True)
class ResidualRow(MeasuredRow):
    """One run with its predictions before and after calibration."""

    before_s: float
    after_s: float
    error_before: float
    error_after: float
    """Error of a fit without this run."""
    outlier: bool
    taught: bool
    """Whether the calibration was fitted to this run."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SeriesPage(Page):
    """One series: its versions, the newest one's factors, and its runs."""

    cluster: str
    framework: str
    family: str
    serves: bool
    """Whether its runs are serving runs rather than training runs."""
    newest: VersionRow
    models: tuple[str, ...]
    """Models of its runs."""
    versions: tuple[VersionRow, ...]
    factors: tuple[Factor, ...]
    lessons: tuple[ResidualRow, ...]
    outliers: int
    unseen: int
    """Number of runs in the fit that the page does not list."""
    figures: dict[str, Any]
    """Plots in the format of plot.js."""


@page_at(router, "/calibration", template="calibrations.html", section="Calibration")
def calibrations_context(
    store: StoreDep, principal: PrincipalDep, fitted: RefittedDep
) -> CalibrationsPage:
    """List the newest calibration of each series."""
    newest: dict[tuple[str, ...], CalibrationRecord] = {}
    for record in store.list_calibrations(limit=MAX_CALIBRATIONS).items:  # Newest first.
        newest.setdefault(
            (record.cluster_key, record.framework, record.model_family, record.owner), record
        )
    waiting = Counter(
        (record.cluster_key, record.gpu, record.framework)
        for record in store.measurements(state="held", limit=MAX_HELD).items
    )
    return CalibrationsPage(
        title="Calibration",
        json_href="/calibration.json",
        series=tuple(SeriesRow.of(record) for _, record in sorted(newest.items())),
        clusters=tuple(
            MeasuredClusterRow.of(
                cluster,
                cluster=cluster.cluster_key,
                num_held=waiting[cluster.cluster_key, cluster.gpu, cluster.framework],
                href=address("/measurements", {"gpu": cluster.gpu}),
            )
            for cluster in store.measured_clusters()
        ),
        may_fit=principal.scope >= Scope.SUBMIT,
        num_held=waiting.total(),
        held_href="/measurements?state=held" if waiting else None,
    )


@page_at(router, "/calibration/series", template="calibration_series.html", section="Calibration")
def series_context(
    store: StoreDep,
    fitted: RefittedDep,
    cluster_key: Word,
    framework: Word,
    model_family: Word = "",
    owner: Word = "",
) -> SeriesPage:
    """Return the versions, errors and runs of one series of calibrations."""
    page = store.list_calibrations(cluster_key=cluster_key, framework=framework, limit=MAX_VERSIONS)
    records = [
        record
        for record in page.items
        if (record.model_family, record.owner) == (model_family, owner)
    ]
    if not records:
        raise NotFoundError(
            f"No calibration of {framework!r} on {cluster_key!r}; see /calibration.",
            field="cluster_key",
        )
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
        serves=newest.framework.split()[0].endswith(SERVING),
        newest=versions[0],
        models=tuple(f"{model} ({runs})" for model, runs in newest.payload.get(MODELS, {}).items()),
        versions=versions,
        factors=tuple(_factors(newest.payload.get("summary", {}) | newest.applied)),
        lessons=rows[::-1],
        outliers=sum(row.outlier for row in rows),
        unseen=len(fitted_on - {residual.record.id for residual in residuals}),
        figures={
            "agreement": agreement(rows),
            "drift": drift(rows),
            "versions": errors_by_version(versions),
        },
    )


@router.post("/calibration", include_in_schema=False)
def fit(request: Request, store: SystemStoreDep) -> RedirectResponse:
    """Fit all stored measurements, as POST /v1/calibrations does."""
    learn(request, store)
    return done("/calibration", "learned")


def _series_href(record: CalibrationRecord) -> str:
    names = ("cluster_key", "framework", "model_family", *(("owner",) if record.owner else ()))
    return address("/calibration/series", {name: getattr(record, name) for name in names})


def _family(record: CalibrationRecord) -> str:
    family = FAMILIES.get(record.model_family, "all models")
    return f"{family}, with {record.owner}'s reports" if record.owner else family


def _factors(summary: dict[str, Any]) -> list[Factor]:
    factors = [
        Factor(name=f"{formats.words(name)}, factor", text=f"{value:.3f}")
        for name, value in summary.get("factors", {}).items()
    ]
    for key, name, text in (
        ("step_overhead_s", "overhead per step", formats.seconds),
        ("layer_overhead_s", "overhead per pass of a layer", formats.seconds),
        ("memory_factor", "allocated memory, factor", "{:.3f}".format),
        ("memory_overhead_bytes", "memory overhead", formats.gib),
        ("residual_log_sd", "remaining scatter", formats.share),
        ("applied", "share applied to models that ran", formats.share),
        ("applied_elsewhere", "share applied to other models", formats.share),
    ):
        if (value := summary.get(key)) is not None:
            factors.append(Factor(name=name, text=text(value)))
    return factors


def agreement(rows: Sequence[ResidualRow]) -> Figure:
    """Plot predicted against measured times, with the identity line, on logarithmic axes."""
    times = [
        value
        for row in rows
        for value in (row.measured_s, row.before_s, row.after_s)
        if value is not None
    ]
    ends = [min(times, default=0.1) / 1.1, max(times, default=1.0) * 1.1]
    measured = [row.measured_s for row in rows]
    odd = [row for row in rows if row.outlier]
    odd_s = [row.after_s for row in odd]
    before, after = [row.before_s for row in rows], [row.after_s for row in rows]
    return {
        "traces": [
            line(
                "predicted = measured",
                x=ends,
                y=ends,
                style={"color": "--ink-soft", "dash": True, "width": 1},
            ),
            markers(
                "cost model", x=measured, y=before, text=_texts(rows, before), marker=COST_MODEL
            ),
            markers(
                "calibrated without the run",
                x=measured,
                y=after,
                text=_texts(rows, after),
                marker=CALIBRATED,
            ),
            markers(
                "outliers",
                x=[row.measured_s for row in odd],
                y=odd_s,
                text=_texts(odd, odd_s),
                marker=OUTLIER,
            ),
        ],
        "x": {"title": "Measured step, s", "log": True},
        "y": {"title": "Predicted step, s", "log": True},
    }


def drift(rows: Sequence[ResidualRow]) -> Figure:
    """Plot errors over time, with outliers marked. A trend shows that the cluster changed."""
    outliers = [row for row in rows if row.outlier]
    return {
        "traces": [
            _errors("cost model", rows, [row.error_before for row in rows], marker=COST_MODEL),
            _errors(
                "calibrated without the run",
                rows,
                [row.error_after for row in rows],
                marker=CALIBRATED,
            ),
            _errors("outliers", outliers, [row.error_after for row in outliers], marker=OUTLIER),
        ],
        "x": {"title": "Measured at (UTC)", "time": True},
        "y": {"title": "Predicted / measured − 1", "percent": True, "zero": True},
    }


def errors_by_version(versions: Sequence[VersionRow]) -> Figure:
    """Plot the median errors of each version, oldest first."""
    ordered = [version for version in reversed(versions) if version.error_before is not None]
    numbers = [version.version for version in ordered]
    sides = {
        "cost model": (COST_MODEL, [version.error_before for version in ordered]),
        "after calibration, on runs not fitted on": (
            CALIBRATED,
            [version.error_after for version in ordered],
        ),
    }
    return {
        "traces": [
            line(name, x=numbers, y=errors, style={"color": style["color"]})
            | {
                "mode": "both",
                "text": [
                    f"version {n}: {formats.share(error)}"
                    for n, error in zip(numbers, errors, strict=True)
                ],
            }
            for name, (style, errors) in sides.items()
        ],
        "x": {"title": "Version", "whole": True},
        "y": {"title": "Median |error|", "percent": True, "zero": True},
    }


def _errors(
    name: str, rows: Sequence[ResidualRow], errors: list[float], *, marker: dict[str, object]
) -> Trace:
    moments = [row.created_at.isoformat() for row in rows]
    text = [
        f"{row.model}\n{row.arithmetic}\n{formats.percent(error)}"
        for row, error in zip(rows, errors, strict=True)
    ]
    return markers(name, x=moments, y=errors, text=text, marker=marker)


def _texts(rows: Sequence[ResidualRow], predicted_s: Sequence[float | None]) -> list[str]:
    return [
        f"{row.model}\n{row.arithmetic}\nmeasured {formats.seconds(row.measured_s)}, predicted "
        f"{formats.seconds(seconds)}"
        for row, seconds in zip(rows, predicted_s, strict=True)
    ]
