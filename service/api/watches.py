"""Routes for watched jobs: create a watch, store a job's steps, and report slowdowns."""

from __future__ import annotations

import functools
from collections.abc import Iterable
from dataclasses import dataclass
from datetime import datetime
from typing import Annotated, Any

from fastapi import Query as Parameter
from fastapi import Response, status

from hp_tool.domain.fields import Strict
from hp_tool.domain.query import Query
from hp_tool.domain.records import JsonObject
from hp_tool.domain.watch import Name, StepBatch, Verdict
from hp_tool.domain.watch_records import WatchRecord, WatchSource
from hp_tool.domain.webhooks import WebhookState
from hp_tool.questions import schema
from hp_tool.watch import expected_pace
from hp_tool.watch.loss import AfterLoss, after_loss
from hp_tool.watch.reports import store_pace, take_steps, verdict_of
from service.api import openapi
from service.api.bodies import QueryBody, json_body, json_response, resolve_names
from service.api.dependencies import (
    CalibrationsDep,
    FindDep,
    PagingDep,
    RankingTurn,
    SettingsDep,
    StoreDep,
    WatchStoreDep,
    versioned_router,
)
from service.api.searches import EXAMPLE as SEARCH_EXAMPLE
from service.api.searches import KEY_REUSED, IdempotencyKey, check_webhook
from service.api.views import PageView, View

router = versioned_router("/watches", tag="watches")
losses = versioned_router("/lost-nodes", tag="watches")
MAX_LOST_NODES = 10_000
EXAMPLE = {
    "name": "pretrain",
    "query": {name: part for name, part in SEARCH_EXAMPLE.items() if name != "search"},
}
LOSS_EXAMPLE = {
    "kind": "training",
    "model": "llama-3-8b",
    "cluster": {"gpu": "h100-sxm-80gb", "num_gpus": 16},
    "training": {"sequence_length": 8192, "global_batch_size": 64},
    "parallel": {"tensor_parallel_size": 2, "micro_batch_size": 1},
}
STEPS_EXAMPLE = {"source": "f00d", "rank": 0, "reports": [{"seq": 1, "step": 10, "step_s": 1.25}]}


@dataclass(frozen=True, slots=True, kw_only=True)
class NewWatch(Strict):
    """A job to watch."""

    name: Name = ""
    """Display name."""
    query: Query | None = None
    """Query with one configuration. Without it, the job is compared only with its own past."""
    webhook: Annotated[str, Parameter(max_length=2000)] | None = None
    """https URL that receives a signed message when the job slows down and when it recovers."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WatchView(View):
    """One watched job."""

    id: str
    name: str
    owner: str | None
    query: dict[str, Any] | None
    status: str
    verdict: Verdict | None
    """None in lists."""
    event: int
    """Number of changes reported so far."""
    webhook_state: WebhookState | None
    last_error: str | None
    """Error of the last delivery attempt."""
    measurement_id: str | None
    """ID of the measurement stored from the job's steady pace."""
    teaching: str | None
    """Why no measurement was stored."""
    created_at: datetime
    updated_at: datetime


@dataclass(frozen=True, slots=True, kw_only=True)
class StepsView:
    """Result of storing a batch of steps."""

    acknowledged: int
    """Reports of this source up to this `seq` are stored, so the sender may discard them."""
    status: str


def _view(record: WatchRecord, sources: Iterable[WatchSource] | None = None) -> WatchView:
    return WatchView.of(record, verdict=None if sources is None else verdict_of(record, sources))


@router.post(
    "",
    status_code=status.HTTP_201_CREATED,
    openapi_extra=openapi.body(NewWatch, example=EXAMPLE),
    responses=openapi.conflict(KEY_REUSED),
)
def begin(
    new: Annotated[NewWatch, json_body(NewWatch)],
    response: Response,
    store: WatchStoreDep,
    find: FindDep,
    settings: SettingsDep,
    calibrations: CalibrationsDep,
    idempotency_key: IdempotencyKey = None,
) -> WatchView:
    """Create a watch.

    The job's processes report to `/v1/watches/{id}/steps`. The prediction is made now and does not
    change later.
    """
    check_webhook(new.webhook, settings=settings)
    query: JsonObject | None = None
    expected: JsonObject | None = None
    if new.query is not None:
        # Also validates rules that involve several fields.
        resolved = schema.parse_query(schema.to_dict(resolve_names(new.query, find=find)))
        query, expected = (
            schema.query_mapping(resolved),
            schema.to_dict(expected_pace(resolved, calibrations=calibrations)),
        )
    record = store.create_watch(
        name=new.name,
        query=query,
        expected=expected,
        webhook=new.webhook,
        idempotency_key=idempotency_key,
    )
    response.headers["Location"] = f"/v1/watches/{record.id}"
    return _view(record)


@router.get("")
def list_watches(
    store: WatchStoreDep,
    paging: PagingDep,
    owner: Annotated[
        str | None,
        Parameter(max_length=200, description="Owner (administrators; others see their own)"),
    ] = None,
    limit: Annotated[int, Parameter(ge=1, le=200)] = 50,
) -> PageView[WatchView]:
    """List watched jobs, newest first, without verdicts."""
    return PageView.of(store.list_watches(owner=owner, limit=limit, **paging), _view)


@losses.post("", response_model=AfterLoss, openapi_extra=openapi.body(Query, example=LOSS_EXAMPLE))
def lost_nodes(
    query: QueryBody,
    calibrations: CalibrationsDep,
    _turn: RankingTurn,
    lost_nodes: Annotated[
        int, Parameter(ge=1, le=MAX_LOST_NODES, description="Lost nodes of the query's cluster")
    ] = 1,
) -> Response:
    """Find the best configuration for a training that lost nodes.

    Also returns how long waiting for the nodes is worthwhile. Equivalent to
    `hp-tool watch --lost-nodes`.
    """
    return json_response(after_loss(query, lost_nodes=lost_nodes, calibrations=calibrations))


@router.get("/{watch_id}")
def get_watch(watch_id: str, store: WatchStoreDep) -> WatchView:
    """Return a watched job with its current verdict."""
    record = store.get_watch(watch_id=watch_id)
    return _view(record, store.watch_sources(watch_id=watch_id))


@router.post("/{watch_id}/steps", openapi_extra=openapi.body(StepBatch, example=STEPS_EXAMPLE))
def report_steps(
    watch_id: str,
    batch: Annotated[StepBatch, json_body(StepBatch)],
    store: WatchStoreDep,
    measurements: StoreDep,
    find: FindDep,
) -> StepsView:
    """Store the newest steps of one process.

    Reports already stored, by `seq`, are ignored, so resend everything not yet acknowledged. Rank 0
    sets the job's pace; other ranks help to find a slow one.
    """
    receipt = take_steps(batch, store=store, watch_id=watch_id)
    store_pace(
        receipt.record,
        watches=store,
        store=measurements,
        resolve=functools.partial(resolve_names, find=find),
    )
    return StepsView(acknowledged=receipt.acknowledged, status=receipt.record.status)


@router.delete("/{watch_id}", status_code=status.HTTP_204_NO_CONTENT)
def delete_watch(watch_id: str, store: WatchStoreDep) -> Response:
    """Delete a watch and its steps; a measurement stored from it remains."""
    store.delete_watch(watch_id=watch_id)
    return Response(status_code=status.HTTP_204_NO_CONTENT)
