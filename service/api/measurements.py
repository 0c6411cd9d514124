"""Routes for measurements, reported step times of real training jobs, and fitted calibrations."""

import functools
import itertools
import json
from dataclasses import dataclass
from typing import Annotated, Literal

from fastapi import Depends, Query, Request, Response, status
from fastapi.responses import StreamingResponse

from hp_tool.domain.access import AccessStore
from hp_tool.domain.digests import json_digest
from hp_tool.domain.fields import Strict
from hp_tool.domain.measurement import MeasurementStatus
from hp_tool.domain.measurement_records import MeasurementSource, MeasurementState
from hp_tool.domain.ports import Store
from hp_tool.errors import InputError
from hp_tool.loop.learning import (
    MadeCalibration,
    MeasurementReport,
    add_report,
    add_reports,
    calibrate,
)
from hp_tool.questions.answers import Line
from service.api import openapi
from service.api.bodies import json_body, resolve_names, stream_answers
from service.api.dependencies import (
    Cursor,
    FindDep,
    PagingDep,
    StoreDep,
    SystemStoreDep,
    refit_due_calibrations,
    refuse_body,
    versioned_router,
)
from service.api.searches import EXAMPLE as SEARCH_EXAMPLE
from service.api.searches import KEY_REUSED, IdempotencyKey
from service.api.views import CalibrationView, ImportView, MeasurementView, PageView

router = versioned_router("/measurements", tag="measurements")
calibrations = versioned_router("/calibrations", tag="calibrations")
Gpu = Annotated[str | None, Query(max_length=100, description="Catalogue name of the device")]
Framework = Annotated[str | None, Query(max_length=100)]
MAX_REPORTS = 1000
"""Maximum number of reports in a list. Each takes milliseconds, so NDJSON, which is streamed, has
no limit.
"""
EXAMPLE = {
    "query": {name: part for name, part in SEARCH_EXAMPLE.items() if name != "search"},
    "parallel": {"tensor_parallel_size": 2},
    "measurement": {"status": "ok", "step_s": 0.25},
}


@dataclass(frozen=True, slots=True, kw_only=True)
class MeasurementChange(Strict):
    """New state of a measurement."""

    state: Literal["accepted", "excluded"]
    """accepted: the measurement calibrates predictions, even if it was held or deleted. excluded:
    it does not.
    """


async def _body(request: Request) -> bytes | list[bytes]:
    body = await request.body()
    if body.lstrip()[:1] != b"[":
        return body
    try:
        entries = json.loads(body)
    except (ValueError, RecursionError) as error:
        raise InputError(f"The body is not valid JSON: {error}", code="invalid_json") from None
    if not 1 <= len(entries) <= MAX_REPORTS:
        message = (
            f"The list has {len(entries)} reports. Send 1 to {MAX_REPORTS}, or send lines to "
            "/v1/measurements/bulk."
        )
        raise InputError(message, code="too_many" if entries else "missing_field")
    return [json.dumps(entry).encode() for entry in entries]


@router.post(
    "",
    status_code=status.HTTP_201_CREATED,
    openapi_extra=openapi.body(MeasurementReport, example=EXAMPLE, or_list=True),
    responses=openapi.conflict(KEY_REUSED)
    | {200: {"model": ImportView, "description": "A list, none of which was stored"}},
)
def report(
    body: Annotated[bytes | list[bytes], Depends(_body)],
    response: Response,
    store: StoreDep,
    find: FindDep,
    idempotency_key: IdempotencyKey = None,
) -> MeasurementView | ImportView:
    """Store the measurement of a real training.

    It corrects later searches and estimates for its cluster. For a list, the response gives the
    stored reports and the rejected ones with position, field and reason; 200 if nothing was stored.
    A figure 3x off its prediction causes a warning; 20x off, the measurement is held until
    accepted.
    """
    look_up = functools.partial(resolve_names, find=find)
    if isinstance(body, list):
        keys = functools.partial(_key, idempotency_key)
        imported = add_reports(body, store=store, source="reported", key=keys, resolve=look_up)
        if not imported.stored:
            response.status_code = status.HTTP_200_OK
        return ImportView.of(imported)
    record = add_report(body, store=store, source="reported", key=idempotency_key, resolve=look_up)
    response.headers["Location"] = f"/v1/measurements/{record.id}"
    return MeasurementView.of(record)


def _key(idempotency_key: str | None, number: int, line: bytes) -> str | None:
    return None if idempotency_key is None else f"{json_digest(idempotency_key)}:{number - 1}"


@router.post(
    "/bulk",
    response_class=StreamingResponse,
    responses=openapi.answer_lines("{status, id} or {status, error} per line, in order"),
    openapi_extra=openapi.lines(example=EXAMPLE),
)
async def report_many(
    request: Request, store: StoreDep, find: FindDep, idempotency_key: IdempotencyKey = None
) -> StreamingResponse:
    """Store many reports, one per line, streamed.

    An invalid line returns `status: error` and does not affect others. If sent again with the same
    key, stored lines return their first answer.
    """
    numbers = itertools.count(1)

    def answer(line: Line) -> str:
        keys = functools.partial(_key, idempotency_key)
        number = next(numbers)
        imported = add_reports(
            [line],
            store=store,
            source="reported",
            key=lambda _, data: keys(number, data),
            resolve=functools.partial(resolve_names, find=find),
        )
        for refused in imported.refused:
            error = {"code": refused.code, "message": refused.message, "field": refused.field}
            return json.dumps({"status": "error", "line": number, "error": error})
        (stored,) = imported.stored
        answer = {"id": stored.id, "state": stored.state, "warnings": stored.warnings}
        return json.dumps({"status": "ok", "line": number, **answer})

    return stream_answers(request, lambda lines: [answer(line) for line in lines])


@router.get("")
def list_measurements(
    store: StoreDep,
    paging: PagingDep,
    gpu: str | None = None,
    model: str | None = None,
    framework: str | None = None,
    source: MeasurementSource | None = None,
    status: MeasurementStatus | None = None,
    state: MeasurementState | None = None,
    search_id: str | None = None,
    limit: Annotated[int, Query(ge=1, le=1000)] = 100,
) -> PageView[MeasurementView]:
    """List measurements that match all filters, newest first.

    Deleted ones are listed only if `state` is `deleted`.
    """
    page = store.measurements(
        gpu=gpu,
        model=model,
        framework=framework,
        source=source,
        status=status,
        state=state,
        search_id=search_id,
        limit=limit,
        **paging,
    )
    return PageView.of(page, MeasurementView.of)


@router.get("/{measurement_id}")
def measurement(store: StoreDep, measurement_id: str) -> MeasurementView:
    """Return a measurement, even if deleted."""
    return MeasurementView.of(store.get_measurement(measurement_id=measurement_id))


@router.patch(
    "/{measurement_id}",
    openapi_extra=openapi.body(MeasurementChange, example={"state": "excluded"}),
)
def change(
    request: Request,
    store: StoreDep,
    measurement_id: str,
    wanted: Annotated[MeasurementChange, json_body(MeasurementChange)],
) -> MeasurementView:
    """Include or exclude a measurement from calibration.

    The next request that uses a calibration of its cluster fits a new version first; earlier
    versions remain.
    """
    return change_state(request, store, measurement_id=measurement_id, state=wanted.state)


@router.delete("/{measurement_id}")
def delete(request: Request, store: StoreDep, measurement_id: str) -> MeasurementView:
    """Exclude a measurement from calibration and from lists; PATCH with `accepted` restores it.

    Calibrations are refitted as for PATCH.
    """
    return change_state(request, store, measurement_id=measurement_id, state="deleted")


def change_state(
    request: Request, store: Store, *, measurement_id: str, state: MeasurementState
) -> MeasurementView:
    """Change a measurement's state. Its cluster's calibrations are refitted at their next use."""
    record = store.set_measurement_state(measurement_id=measurement_id, state=state)
    _reload_calibrations(request)
    return MeasurementView.of(record)


def _reload_calibrations(request: Request) -> None:
    request.app.state.calibrations.forget()
    request.app.state.answers.recheck()


def learn(
    request: Request, store: AccessStore, *, gpu: str | None = None, framework: str | None = None
) -> tuple[MadeCalibration, ...]:
    """Fit calibrations to the stored measurements, and use them in this process immediately."""
    fitted = calibrate(
        store=store, gpu=gpu, framework=framework, owner=request.state.principal.owner or ""
    )
    _reload_calibrations(request)
    return fitted


@calibrations.post("", status_code=status.HTTP_201_CREATED, dependencies=[Depends(refuse_body)])
def make(
    request: Request, store: SystemStoreDep, gpu: Gpu = None, framework: Framework = None
) -> PageView[CalibrationView]:
    """Fit the stored measurements and return the newest version of each series.

    `gpu` and `framework` restrict the fit. Requires scope submit: the fit uses everybody's runs,
    administrators' reports and, for the caller only, the caller's reports, without showing them. A
    series without new measurements keeps its version. Estimates use a new version at once in this
    process and within seconds in others.
    """
    fitted = learn(request, store, gpu=gpu, framework=framework)
    return PageView(
        items=[CalibrationView.of(calibration.record) for calibration in fitted], next_cursor=None
    )


@calibrations.get("", dependencies=[Depends(refit_due_calibrations)])
def list_calibrations(
    store: StoreDep,
    cluster_key: Annotated[str | None, Query(max_length=200)] = None,
    framework: Framework = None,
    limit: Annotated[int, Query(ge=1, le=1000)] = 50,
    cursor: Cursor = None,
) -> PageView[CalibrationView]:
    """List calibrations that match all filters, newest first; fits due ones first."""
    page = store.list_calibrations(
        cluster_key=cluster_key, framework=framework, limit=limit, cursor=cursor
    )
    return PageView.of(page, CalibrationView.of)
