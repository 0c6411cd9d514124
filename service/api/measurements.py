"""Measurements: the list, and reports of real trainings' step times. Calibrations fitted to them: versions and new ones."""

import functools
import itertools
import json
from typing import Annotated

from fastapi import APIRouter, Depends, Query, Request, status
from fastapi.responses import StreamingResponse
from starlette.concurrency import run_in_threadpool

from hp_tool.answers import Line
from hp_tool.domain.access import AccessStore
from hp_tool.domain.digests import json_digest
from hp_tool.domain.measurement import MeasurementStatus
from hp_tool.domain.records import MeasurementSource, NewMeasurement
from hp_tool.errors import HpToolError
from hp_tool.learning import MadeCalibration, MeasurementReport, calibrate, read_report
from service.api import openapi
from service.api.bodies import resolve, stream_answers
from service.api.dependencies import Cursor, FindDep, PagingDep, StoreDep, SystemStoreDep, refuse_body
from service.api.searches import EXAMPLE as SEARCH_EXAMPLE
from service.api.searches import KEY_REUSED, IdempotencyKey
from service.api.views import CalibrationView, MeasurementView, PageView

router = APIRouter(prefix="/measurements", tags=["measurements"])
calibrations = APIRouter(prefix="/calibrations", tags=["calibrations"])
Gpu = Annotated[str | None, Query(max_length=100, description="Catalogue name of the device")]
Framework = Annotated[str | None, Query(max_length=100)]
EXAMPLE = {
    "query": {name: part for name, part in SEARCH_EXAMPLE.items() if name != "search"},
    "parallel": {"tensor_parallel_size": 2},
    "measurement": {"status": "ok", "step_s": 0.25},
}


async def _body(request: Request, find: FindDep) -> NewMeasurement:
    read = functools.partial(read_report, source="reported", resolve=functools.partial(resolve, find=find))
    return await run_in_threadpool(read, await request.body())


@router.post(
    "",
    status_code=status.HTTP_201_CREATED,
    openapi_extra=openapi.body(MeasurementReport, example=EXAMPLE),
    responses=openapi.conflict(KEY_REUSED),
)
def report(
    measurement: Annotated[NewMeasurement, Depends(_body)],
    store: StoreDep,
    idempotency_key: IdempotencyKey = None,
) -> MeasurementView:
    """Store what a real training measured; later searches on that cluster learn from it."""
    return MeasurementView.of(store.add_measurement(measurement=measurement, idempotency_key=idempotency_key))


@router.post(
    "/bulk",
    response_class=StreamingResponse,
    responses=openapi.answer_lines("{status, id} or {status, error} a line, in order"),
    openapi_extra=openapi.lines(example=EXAMPLE),
)
async def report_many(
    request: Request, store: StoreDep, find: FindDep, idempotency_key: IdempotencyKey = None
) -> StreamingResponse:
    """Store many reports, one a line, streamed. A bad line becomes `status: error` in its place and harms no other; sent again
    with the same key, lines that were stored are answered as they were."""
    numbers = itertools.count()

    def answer(line: Line) -> str:
        number = next(numbers)
        try:
            if isinstance(line, HpToolError):
                raise line
            measurement = read_report(line, source="reported", resolve=functools.partial(resolve, find=find))
            key = None if idempotency_key is None else f"{json_digest(idempotency_key)}:{number}"
            stored = store.add_measurement(measurement=measurement, idempotency_key=key)
            return json.dumps({"status": "ok", "id": stored.id})
        except HpToolError as error:
            return json.dumps({"status": "error", "error": error.as_dict()})

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
    search_id: str | None = None,
    limit: Annotated[int, Query(ge=1, le=1000)] = 100,
) -> PageView[MeasurementView]:
    """Measurements that match all filters, newest first."""
    page = store.measurements(
        gpu=gpu,
        model=model,
        framework=framework,
        source=source,
        status=status,
        search_id=search_id,
        limit=limit,
        **paging,
    )
    return PageView.of(page, MeasurementView.of)


def learn(
    request: Request, store: AccessStore, *, gpu: str | None = None, framework: str | None = None
) -> tuple[MadeCalibration, ...]:
    """Fit the stored measurements; this process takes up what is new at once."""
    made = calibrate(store=store, gpu=gpu, framework=framework)
    request.app.state.calibrations.forget()
    request.app.state.answers.doubt()
    return made


@calibrations.post("", status_code=status.HTTP_201_CREATED, dependencies=[Depends(refuse_body)])
def make(request: Request, store: SystemStoreDep, gpu: Gpu = None, framework: Framework = None) -> PageView[CalibrationView]:
    """Fit the stored measurements, or those of one GPU or framework, and answer the newest version of every series.

    This needs scope submit: it learns from everybody's measurements and shows none of them. A series without new measurements
    keeps its version. Estimates use a new version at once in this process, and within seconds in others.
    """
    made = learn(request, store, gpu=gpu, framework=framework)
    return PageView(items=[CalibrationView.of(each.record) for each in made], next_cursor=None)


@calibrations.get("")
def list_calibrations(
    store: StoreDep,
    cluster_key: Annotated[str | None, Query(max_length=200)] = None,
    framework: Framework = None,
    limit: Annotated[int, Query(ge=1, le=1000)] = 50,
    cursor: Cursor = None,
) -> PageView[CalibrationView]:
    """Calibrations that match all filters, newest first."""
    page = store.list_calibrations(cluster_key=cluster_key, framework=framework, limit=limit, cursor=cursor)
    return PageView.of(page, CalibrationView.of)
