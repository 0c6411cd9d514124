"""/measurements: stored measurements, newest first."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime
from typing import Annotated, Any, get_args

from fastapi import APIRouter, Query

from hp_tool.domain.measurement import MeasurementStatus
from hp_tool.domain.records import MeasurementRecord
from hp_tool.errors import HpToolError
from service.api.dependencies import Cursor, StoreDep
from service.api.views import View
from service.dashboard.forms import BLANK_IS_NONE
from service.dashboard.links import address, configuration_href, next_href
from service.dashboard.page import Page, Tone, page_at
from service.dashboard.serving_runs import words
from service.dashboard.trials import TONES

MAX_ROWS = 50
STATUSES: tuple[MeasurementStatus, ...] = get_args(MeasurementStatus)
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
