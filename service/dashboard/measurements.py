"""Page /measurements: all measured runs, their use in calibration, and actions on them."""

from collections.abc import Iterator
from dataclasses import dataclass
from datetime import datetime
from functools import partial
from typing import Annotated, Any, get_args

from fastapi import APIRouter, Query, Request
from fastapi.responses import RedirectResponse

from hp_tool.domain.access import Scope
from hp_tool.domain.measurement import MeasurementStatus
from hp_tool.domain.measurement_records import (
    COMPARED_FIGURES,
    WARNING_RATIO,
    MeasurementRecord,
    MeasurementState,
)
from hp_tool.domain.states import Outcome
from hp_tool.domain.units import format_factor
from hp_tool.errors import InputError
from service.api.dependencies import Cursor, PrincipalDep, StoreDep
from service.api.measurements import change_state
from service.api.views import View
from service.dashboard import formats
from service.dashboard.page import (
    BLANK_IS_NONE,
    Form,
    Page,
    Tone,
    address,
    configuration_href,
    done,
    next_href,
    page_at,
    stored_configuration,
)
from service.dashboard.trials import configuration_words

MAX_ROWS = 50
STATES: tuple[MeasurementState, ...] = get_args(MeasurementState)
STATUSES: tuple[MeasurementStatus, ...] = get_args(MeasurementStatus)
Word = Annotated[str, Query(max_length=200)]

router = APIRouter(tags=["dashboard"])


@dataclass(frozen=True, slots=True, kw_only=True)
class MeasuredRow(View):
    """A measured run in any list. Errors are predicted / measured - 1."""

    model: str
    arithmetic: str
    details: str
    source: str
    measured_s: float | None
    search_href: str | None
    """URL of its search; None for a measurement that was reported or imported."""
    configuration_href: str | None
    """URL of its configuration; None if the stored query is empty or belongs to another version."""
    created_at: datetime

    @staticmethod
    def computed(record: MeasurementRecord) -> dict[str, Any]:
        arithmetic, details = configuration_words(record.parallel, record.query)
        return {
            "arithmetic": arithmetic,
            "details": details,
            "search_href": f"/searches/{record.search_id}" if record.search_id else None,
            "configuration_href": _configuration_href(record),
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class Action:
    """A button, and the state that it gives to a measurement."""

    label: str
    state: MeasurementState


ACCEPT, EXCLUDE = (
    Action(label="Accept", state="accepted"),
    Action(label="Exclude", state="excluded"),
)
TRUST = Action(label="Trust", state="accepted")
"""Administrators' action that makes a measurement calibrate everybody's predictions, not only its
owner's.
"""
DELETE = Action(label="Delete", state="deleted")
ACTIONS: dict[MeasurementState, tuple[Action, ...]] = {
    "accepted": (EXCLUDE,),
    "held": (ACCEPT, EXCLUDE),
    "excluded": (ACCEPT, DELETE),
    "deleted": (ACCEPT,),
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
    teaches: str | None
    """Predicted quantities that it calibrates, in words; None for an accepted run that calibrates
    none.
    """
    state: MeasurementState
    warnings: tuple[str, ...]
    notes: tuple[str, ...]
    """Sentences: why the run failed, unusual values, and why it is not used."""
    actions: tuple[Action, ...]
    """Actions that are available to the caller."""
    href: str
    """URL to which the actions are posted."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MeasurementsPage(Page):
    """Measurements: those that wait for review, then the others, newest first."""

    gpu: str
    model: str
    status: MeasurementStatus | None
    statuses: tuple[MeasurementStatus, ...]
    state: MeasurementState | None
    states: tuple[MeasurementState, ...]
    rows: tuple[MeasurementRow, ...]
    next_href: str | None


@page_at(router, "/measurements", template="measurements.html", section="Calibration")
def measurements_context(
    store: StoreDep,
    principal: PrincipalDep,
    status: Annotated[
        MeasurementStatus | None, Query(description="How it ended"), BLANK_IS_NONE
    ] = None,
    state: Annotated[
        MeasurementState | None, Query(description="Whether it teaches"), BLANK_IS_NONE
    ] = None,
    gpu: Word = "",
    model: Word = "",
    cursor: Cursor = None,
) -> MeasurementsPage:
    """List measurements: those that wait for review, then the newest."""
    find = partial(
        store.measurements, gpu=gpu or None, model=model or None, status=status, limit=MAX_ROWS
    )
    page = find(state=state, cursor=cursor)
    # Measurements waiting for review come first, even if they are old.
    waiting = () if state or cursor else find(state="held").items
    first = {record.id for record in waiting}
    filters = {"gpu": gpu, "model": model, "status": status, "state": state}
    return MeasurementsPage(
        title="Measurements",
        json_href=address("/measurements.json", filters),
        gpu=gpu,
        model=model,
        status=status,
        statuses=STATUSES,
        state=state,
        states=STATES,
        rows=tuple(
            _row(record, scope=principal.scope)
            for record in (*waiting, *(record for record in page.items if record.id not in first))
        ),
        next_href=next_href("/measurements", page, filters),
    )


@router.post("/measurements/{measurement_id}", include_in_schema=False)
def change(
    request: Request, fields: Form, store: StoreDep, measurement_id: str
) -> RedirectResponse:
    """Change whether a measurement calibrates predictions, as PATCH and DELETE do in the API."""
    store.get_measurement(measurement_id=measurement_id)
    state = next((each for each in STATES if each == fields.get("state")), None)
    if state is None:
        raise InputError(f"`state` must be one of {', '.join(STATES)}.", field="state")
    change_state(request, store, measurement_id=measurement_id, state=state)
    return done("/measurements", "changed")


def _row(record: MeasurementRecord, *, scope: Scope) -> MeasurementRow:
    measurement, predicted_s = record.measurement, record.predicted.get("step_s")
    trust = (
        (TRUST,)
        if scope >= Scope.ADMIN and record.state == "accepted" and not record.trusted
        else ()
    )
    measured_s = measurement.objective_s
    return MeasurementRow.of(
        record,
        measurement,
        short_id=record.id[:8],
        tone=Outcome(measurement.status).tone,
        predicted_s=predicted_s,
        measured_s=measured_s,
        teaches=(used_for := _use_words(record)),
        notes=tuple(_notes(record, used_for=used_for)),
        error=predicted_s / measured_s - 1.0 if predicted_s and measured_s else None,
        actions=(*trust, *ACTIONS[record.state]) if scope >= Scope.SUBMIT else (),
        href=f"/measurements/{record.id}",
    )


def _use_words(record: MeasurementRecord) -> str | None:
    measurement = record.measurement
    if stored_configuration(record.query, record) is None:
        return None
    if measurement.status == "crashed" and measurement.fidelity.is_whole:
        return "crash"
    if measurement.status == "oom":
        return "out of memory"
    timed = measurement.status == "ok" and measurement.objective_s is not None
    names = ("time",) * timed + ("memory",) * (measurement.peak_memory_bytes is not None)
    return " and ".join(names) or None


def _notes(record: MeasurementRecord, *, used_for: str | None) -> Iterator[str]:
    measurement = record.measurement
    if measurement.cause:
        yield measurement.cause
    yield from warning_words(record)
    if used_for is None and record.state == "accepted":
        yield f"Not used: {_unused_words(record)}"


def warning_words(record: MeasurementRecord) -> Iterator[str]:
    """Describe the values in the record's `warnings`: `1,539 s, 25 times the predicted 61.57 s`."""
    for name, distance in record.distances.items():
        if distance >= WARNING_RATIO:
            measured, predicted = (
                getattr(record.measurement, name),
                record.predicted[COMPARED_FIGURES[name]],
            )
            write = formats.seconds if name.endswith("_s") else formats.gib
            side = "" if measured > predicted else "below "
            far = format_factor(distance)
            yield f"{write(measured)}, {far} {side}the predicted {write(predicted)}"


def _unused_words(record: MeasurementRecord) -> str:
    if not record.query:
        return "its query was not stored"
    if stored_configuration(record.query, record) is None:
        return "its query has another version"
    if record.measurement.status == "crashed":
        return "a shortened run crashed"
    return "it measured nothing"


def _configuration_href(record: MeasurementRecord) -> str | None:
    configuration = stored_configuration(record.query, record)
    return None if configuration is None else configuration_href(configuration)
