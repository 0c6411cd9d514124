"""Measurements: the list, and reports of real trainings' step times."""

from __future__ import annotations

import functools
import itertools
import json
from dataclasses import asdict
from typing import Annotated

from fastapi import APIRouter, Depends, Query, Request, status
from fastapi.responses import StreamingResponse
from starlette.concurrency import run_in_threadpool

from hp_tool.answers import Line
from hp_tool.domain.digests import json_digest
from hp_tool.domain.measurement import MeasurementStatus
from hp_tool.domain.records import MeasurementSource, NewMeasurement
from hp_tool.errors import HpToolError
from hp_tool.learning import MeasurementReport, read_report
from service.api import openapi
from service.api.dependencies import FindDep, PagingDep, StoreDep
from service.api.queries import resolve
from service.api.searches import EXAMPLE as SEARCH_EXAMPLE
from service.api.searches import KEY_REUSED, IdempotencyKey
from service.api.streaming import stream_answers
from service.api.views import MeasurementView, PageView

router = APIRouter(prefix="/measurements", tags=["measurements"])
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
        **asdict(paging),
    )
    return PageView.of(page, MeasurementView.of)
