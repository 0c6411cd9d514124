"""Measurements: the list, and the door for real trainings to report their step times."""

from __future__ import annotations

import functools
from typing import Annotated

from fastapi import APIRouter, Depends, Query, Request, status
from starlette.concurrency import run_in_threadpool

from hp_tool.domain.measurement import MeasurementStatus
from hp_tool.domain.records import MeasurementSource, NewMeasurement
from hp_tool.learning import read_report
from service.api import openapi
from service.api.dependencies import FindDep, StoreDep
from service.api.queries import resolve
from service.api.searches import KEY_REUSED, IdempotencyKey
from service.api.views import MeasurementView, PageView

router = APIRouter(prefix="/measurements", tags=["measurements"])


async def _body(request: Request, find: FindDep) -> NewMeasurement:
    body = await request.body()
    read = functools.partial(read_report, source="reported", resolve=functools.partial(resolve, find=find))
    return await run_in_threadpool(read, body)


@router.post(
    "",
    status_code=status.HTTP_201_CREATED,
    openapi_extra=openapi.body("MeasurementReport"),
    responses=openapi.conflict(KEY_REUSED),
)
def report(
    measurement: Annotated[NewMeasurement, Depends(_body)],
    store: StoreDep,
    idempotency_key: IdempotencyKey = None,
) -> MeasurementView:
    """Store what a real training measured; later searches on that cluster learn from it."""
    return MeasurementView.of(store.add_measurement(measurement=measurement, idempotency_key=idempotency_key))


@router.get("")
def list_measurements(
    store: StoreDep,
    gpu: str | None = None,
    model: str | None = None,
    framework: str | None = None,
    source: MeasurementSource | None = None,
    status: MeasurementStatus | None = None,
    search_id: str | None = None,
    limit: Annotated[int, Query(ge=1, le=1000)] = 100,
    cursor: Annotated[str | None, Query(max_length=200)] = None,
) -> PageView[MeasurementView]:
    """Newest first; every filter given must hold."""
    page = store.measurements(
        gpu=gpu, model=model, framework=framework, source=source, status=status, search_id=search_id, limit=limit, cursor=cursor
    )
    return PageView(items=[MeasurementView.of(record) for record in page.items], next_cursor=page.next_cursor)
