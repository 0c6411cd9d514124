"""Searches: submit, list, look, steer, and the result."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import partial
from typing import Annotated, Any

import anyio
from fastapi import APIRouter, Depends, Header, Query, Request, Response, status
from starlette.concurrency import run_in_threadpool

from hp_tool.domain.fields import Amount, Strict
from hp_tool.domain.measurement import MeasurementStatus
from hp_tool.domain.query import Kind, Repetitions
from hp_tool.domain.records import RunState, SearchRecord, SearchState
from hp_tool.errors import InputError
from hp_tool.queries import schema
from hp_tool.tuning import resolve_search
from service.api import examples, openapi, steering
from service.api.answers import search_answer
from service.api.bodies import read_body
from service.api.dependencies import PagingDep, SettingsDep, StoreDep, TrialPagingDep
from service.api.queries import QueryBody
from service.api.steering import Action, steer
from service.api.trials import trials_of
from service.api.views import PageView, SearchView, TrialsView, WebhookView
from service.webhooks.policy import LONGEST_URL

router = APIRouter(prefix="/searches", tags=["searches"])

IdempotencyKey = Annotated[
    str | None,
    Header(min_length=1, max_length=200, description="The same key and body again answer what the first did"),
]

KEY_REUSED = "The Idempotency-Key came with another request before"


@router.post(
    "",
    status_code=status.HTTP_202_ACCEPTED,
    openapi_extra=openapi.body("Query", example=examples.SEARCH),
    responses=openapi.conflict(KEY_REUSED),
)
def submit(
    query: QueryBody,
    store: StoreDep,
    settings: SettingsDep,
    response: Response,
    idempotency_key: IdempotencyKey = None,
    priority: Annotated[int, Query(ge=-100, le=100, description="Higher goes first; above 0 for administrators")] = 0,
    webhook: Annotated[
        str | None, Query(max_length=LONGEST_URL, description="https URL that is told, signed, when the search ends")
    ] = None,
) -> SearchView:
    """Queue a search; a worker runs it. `Location` is where to look."""
    if webhook is not None:
        if settings.webhooks is None:
            mend = "its operator sets HP_WEBHOOK_SECRET for the API and its workers"
            raise InputError(f"this service sends no webhooks; {mend}", field="webhook", code="webhooks_disabled")
        settings.webhooks.check(webhook)
    resolve_search(query)  # unknown names and what is not modelled or run are told now, while the sender listens
    record = store.create_search(
        query=schema.to_dict(query), priority=priority, idempotency_key=idempotency_key, webhook=webhook
    )
    return _accepted(record, response)


@router.get("")
def list_searches(
    store: StoreDep,
    paging: PagingDep,
    state: SearchState | None = None,
    owner: Annotated[str | None, Query(max_length=200, description="Whose (administrators; others see their own)")] = None,
    kind: Annotated[Kind | None, Query(description="What they search for a way to do")] = None,
    model: Annotated[str | None, Query(max_length=200, description="Of this model, as the query names it")] = None,
    limit: Annotated[int, Query(ge=1, le=200)] = 50,
) -> PageView[SearchView]:
    """Every filter given must hold."""
    page = store.list_searches(state=state, owner=owner, kind=kind, model=model, limit=limit, **asdict(paging))
    return PageView(items=[SearchView.of(record) for record in page.items], next_cursor=page.next_cursor)


@router.get("/{search_id}")
def get_search(search_id: str, store: StoreDep) -> SearchView:
    """Where one search stands."""
    return SearchView.of(store.get_search(search_id=search_id))


@dataclass(frozen=True, slots=True, kw_only=True)
class BudgetChange(Strict):
    """What a search may spend from now on; what is left out stays as it is."""

    budget_runs: Repetitions | None = None
    """Maximum number of profile runs, finished ones included."""
    budget_gpu_seconds: Amount | None = None
    """Maximum device seconds of profile runs, spent ones included."""


async def _budget(request: Request) -> BudgetChange:
    change: BudgetChange = await read_body(request, partial(schema.parse, BudgetChange))
    return change


@router.patch(
    "/{search_id}",
    openapi_extra=openapi.body("BudgetChange", example=examples.BUDGET),
    responses=openapi.conflict("It succeeded or was cancelled; a clone takes another budget"),
)
def change_budget(search_id: str, change: Annotated[BudgetChange, Depends(_budget)], store: StoreDep) -> SearchView:
    """Let a search spend more or less. Its worker follows within seconds; a run that is under way ends as it will."""
    return SearchView.of(steering.change_budget(store, search_id=search_id, **asdict(change)))


@router.get("/{search_id}/trials")
def get_trials(
    search_id: str,
    store: StoreDep,
    paging: TrialPagingDep,
    state: RunState | None = None,
    status: Annotated[MeasurementStatus | None, Query(description="Of what was measured")] = None,
    limit: Annotated[int, Query(ge=1, le=1000)] = 1000,
) -> TrialsView:
    """Its profile runs: predicted before, predicted after calibration, measured. Every filter given must hold."""
    record = store.get_search(search_id=search_id)
    page = store.list_runs(search_id=search_id, state=state, status=status, limit=limit, **asdict(paging))
    return TrialsView(
        search_id=search_id, state=record.state, trials=trials_of(record, page.items), next_cursor=page.next_cursor
    )


@router.get("/{search_id}/webhook")
def get_webhook(search_id: str, store: StoreDep) -> WebhookView:
    """Whether its end was told to the URL that it was submitted with; 404 where it was submitted with none."""
    return WebhookView.of(store.get_webhook(search_id=search_id))


@router.get("/{search_id}/result", responses={202: {"model": SearchView, "description": "Not ended yet"}})
async def get_result(
    search_id: str,
    store: StoreDep,
    settings: SettingsDep,
    response: Response,
    wait_s: Annotated[float, Query(ge=0, description="Hold the request until the search ends, this long at most")] = 0.0,
) -> Any:
    """{id, status, recommendations, space, rejections, search}, or status error; 202 with the search while it has not ended."""
    deadline = time.monotonic() + min(wait_s, settings.max_wait_s)
    while True:
        record = await run_in_threadpool(store.get_search, search_id=search_id)
        if record.state.ended:
            return search_answer(record)
        left = deadline - time.monotonic()
        if left <= 0:
            response.status_code = status.HTTP_202_ACCEPTED
            response.headers["Retry-After"] = "1"
            return SearchView.of(record)
        await anyio.sleep(min(settings.poll_s, left))


@router.post(
    "/{search_id}/clone",
    status_code=status.HTTP_202_ACCEPTED,
    description=Action.CLONE.meaning,
    responses=openapi.conflict(KEY_REUSED),
)
def clone(search_id: str, store: StoreDep, response: Response, idempotency_key: IdempotencyKey = None) -> SearchView:
    record = steer(store, search_id=search_id, action=Action.CLONE, idempotency_key=idempotency_key)
    return _accepted(record, response)


def _route(action: Action) -> Callable[..., SearchView]:
    def act(search_id: str, store: StoreDep) -> SearchView:
        return SearchView.of(steer(store, search_id=search_id, action=action))

    return act


for _action in (Action.CANCEL, Action.PAUSE, Action.RESUME):  # done twice they do as much as once, so they take no key
    router.add_api_route(
        f"/{{search_id}}/{_action}",
        _route(_action),
        methods=["POST"],
        name=str(_action),
        description=_action.meaning,
        responses=openapi.conflict("The search's state does not allow it"),
    )


def _accepted(record: SearchRecord, response: Response) -> SearchView:
    response.status_code = status.HTTP_202_ACCEPTED
    response.headers["Location"] = f"/v1/searches/{record.id}"
    return SearchView.of(record)
