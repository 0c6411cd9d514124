"""/calibration, its series, and /measurements."""

from __future__ import annotations

from typing import Annotated

from fastapi import APIRouter, Depends, Query, Request
from fastapi.responses import RedirectResponse

from hp_tool.domain.access import Scope
from hp_tool.domain.measurement import MeasurementStatus
from hp_tool.errors import InputError, NotFoundError
from hp_tool.learning.residuals import residual_report
from service.api.calibrations import learn
from service.api.dependencies import Cursor, PrincipalDep, StoreDep, SystemStoreDep
from service.dashboard.calibration.building import STATUSES, calibrations_page, measurements_page, series_page
from service.dashboard.calibration.contexts import CalibrationsPage, MeasurementsPage, SeriesPage
from service.dashboard.twins import page_at

SERIES = 500
"""Newest calibrations among which the newest of each series are looked for."""
VERSIONS = 200
ROWS_A_PAGE = 50

router = APIRouter(tags=["dashboard"])

Word = Annotated[str, Query(max_length=200)]


@page_at(router, "/calibration", template="calibrations.html", section="Calibration")
def calibrations_context(store: StoreDep, principal: PrincipalDep) -> CalibrationsPage:
    """What was learnt, as its page shows it."""
    records = store.list_calibrations(limit=SERIES).items
    return calibrations_page(records, clusters=store.measured_clusters(), may_fit=principal.scope >= Scope.SUBMIT)


@page_at(router, "/calibration/series", template="calibration_series.html", section="Calibration")
def series_context(store: StoreDep, cluster_key: Word, framework: Word, model_family: Word = "") -> SeriesPage:
    """One series of calibrations as its page shows it."""
    page = store.list_calibrations(cluster_key=cluster_key, framework=framework, limit=VERSIONS)
    records = [record for record in page.items if record.model_family == model_family]
    if not records:
        raise NotFoundError(f"nothing was learnt about {framework!r} on {cluster_key!r}", field="cluster_key")
    return series_page(records, lessons=residual_report(store=store, record=records[0]))


def status_filter(status: Annotated[str, Query(description="How it ended; empty for any")] = "") -> MeasurementStatus | None:
    """A form sends `status=` where nothing is chosen."""
    found = next((known for known in STATUSES if known == status), None)
    if status and found is None:
        raise InputError(f"{status!r} is not a status; use one of {', '.join(STATUSES)}", field="status")
    return found


@page_at(router, "/measurements", template="measurements.html", section="Calibration")
def measurements_context(
    store: StoreDep,
    status: Annotated[MeasurementStatus | None, Depends(status_filter)],
    gpu: Word = "",
    model: Word = "",
    cursor: Cursor = None,
) -> MeasurementsPage:
    """The list of measurements as its page shows it."""
    page = store.measurements(gpu=gpu or None, model=model or None, status=status, limit=ROWS_A_PAGE, cursor=cursor)
    return measurements_page(page, gpu=gpu, model=model, status=status)


@router.post("/calibration", include_in_schema=False)
def fit(request: Request, store: SystemStoreDep) -> RedirectResponse:
    """Learn from everybody's measurements, as POST /v1/calibrations does."""
    learn(request, store)
    return RedirectResponse("/calibration", status_code=303)
