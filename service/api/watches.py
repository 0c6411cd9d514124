"""Watched jobs: begin to watch one, take its steps, and say whether it is slower than it was or
than it should be.
"""

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
from hp_tool.errors import InputError
from hp_tool.questions import schema
from hp_tool.watch import expected_of
from hp_tool.watch.loss import AfterLoss, after_loss
from hp_tool.watch.reports import take_steps, teach, verdict_of
from service.api import openapi
from service.api.bodies import QueryBody, json_body, json_response, resolve
from service.api.dependencies import (
    CalibrationsDep,
    FindDep,
    PagingDep,
    RankingTurn,
    SettingsDep,
    StoreDep,
    WatchStoreDep,
    versioned,
)
from service.api.searches import EXAMPLE as SEARCH_EXAMPLE
from service.api.searches import KEY_REUSED, IdempotencyKey
from service.api.views import PageView, View
from service.settings import Settings

router = versioned("/watches", tag="watches")
losses = versioned("/lost-nodes", tag="watches")
MOST_LOST = 10_000
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
    """For people."""
    query: Query | None = None
    """Its one configuration; left out, it is held against itself alone."""
    webhook: Annotated[str, Parameter(max_length=2000)] | None = None
    """https URL that gets a signed message when the job becomes slower, and when it is as it was
    again.
    """


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
    """Changes that were told so far."""
    webhook_state: WebhookState | None
    last_error: str | None
    """Why the last attempt to tell failed."""
    measurement_id: str | None
    """The measurement that its steady pace became."""
    teaching: str | None
    """Why it became none."""
    created_at: datetime
    updated_at: datetime


@dataclass(frozen=True, slots=True, kw_only=True)
class StepsView:
    """What became of a batch of steps."""

    acknowledged: int
    """All reports of the source up to this number are stored; it may forget them."""
    status: str


def _view(record: WatchRecord, sources: Iterable[WatchSource] | None = None) -> WatchView:
    return WatchView.of(record, verdict=None if sources is None else verdict_of(record, sources))


def _check_webhook(url: str | None, settings: Settings) -> None:
    if url is not None:
        if settings.webhooks is None:
            fix = "its operator sets HP_WEBHOOK_SECRET for the API and its workers"
            raise InputError(
                f"this service sends no webhooks; {fix}", field="webhook", code="webhooks_disabled"
            )
        settings.webhooks.check(url)


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
    """Begin to watch a job. Its processes report to `/v1/watches/{id}/steps`; what is expected of
    it is fixed here.
    """
    _check_webhook(new.webhook, settings)
    query: JsonObject | None = None
    expected: JsonObject | None = None
    if new.query is not None:
        resolved = schema.parse_query(
            schema.to_dict(resolve(new.query, find=find))
        )  # checks what spans several fields
        query, expected = (
            schema.query_mapping(resolved),
            schema.to_dict(expected_of(resolved, calibrations=calibrations)),
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
    """Watched jobs, newest first, without their verdicts."""
    return PageView.of(store.list_watches(owner=owner, limit=limit, **paging), _view)


@losses.post("", response_model=AfterLoss, openapi_extra=openapi.body(Query, example=LOSS_EXAMPLE))
def lost_nodes(
    query: QueryBody,
    calibrations: CalibrationsDep,
    _turn: RankingTurn,
    lost_nodes: Annotated[
        int, Parameter(ge=1, le=MOST_LOST, description="Nodes of the query's cluster that are gone")
    ] = 1,
) -> Response:
    """The best configuration of what lost nodes leave of a query's training, and how long it pays
    to wait for them: what `hp-tool watch --lost-nodes` says.
    """
    return json_response(after_loss(query, lost_nodes=lost_nodes, calibrations=calibrations))


@router.get("/{watch_id}")
def get_watch(watch_id: str, store: WatchStoreDep) -> WatchView:
    """One watched job, with what is to be said of it now."""
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
    """Take the newest steps of one process. A report that was taken before, by its `seq`, is passed
    over: send what is not yet acknowledged as often as need be. Rank 0 stands for the job; others
    tell one slow rank from all.
    """
    taken = take_steps(batch, store=store, watch_id=watch_id)
    teach(
        taken.record,
        watches=store,
        store=measurements,
        resolve=functools.partial(resolve, find=find),
    )
    return StepsView(acknowledged=taken.acknowledged, status=taken.record.status)


@router.delete("/{watch_id}", status_code=status.HTTP_204_NO_CONTENT)
def delete_watch(watch_id: str, store: WatchStoreDep) -> Response:
    """Forget a watched job and its steps; the measurement that it became stays."""
    store.delete_watch(watch_id=watch_id)
    return Response(status_code=status.HTTP_204_NO_CONTENT)
