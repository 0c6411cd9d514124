"""Routes to submit, list, show and control searches. The dashboard also uses these functions."""

import contextlib
import re
import time
from collections.abc import AsyncIterator, Callable
from dataclasses import asdict, dataclass
from typing import Annotated, Any, Literal

from fastapi import Depends, Header, Query, Request, Response, status
from fastapi.sse import EventSourceResponse, ServerSentEvent
from starlette.concurrency import run_in_threadpool

from hp_tool.domain import query as domain
from hp_tool.domain.digests import json_digest
from hp_tool.domain.fields import Amount, Strict, check_bounds
from hp_tool.domain.measurement import MeasurementStatus
from hp_tool.domain.plan import PlanAnswer
from hp_tool.domain.ports import Store
from hp_tool.domain.records import EventRecord, Head, JsonObject, Label, SearchRecord
from hp_tool.domain.states import RunState, SearchState
from hp_tool.errors import HpToolError, InputError, StoreError
from hp_tool.loop.tuning import resolve_search
from hp_tool.loop.tuning.plan import bill
from hp_tool.questions import schema
from hp_tool.questions.edition import count_query_terms
from hp_tool.questions.registered import Find, restore_sent_query
from service.api import openapi
from service.api.bodies import QueryBody, SentBody, json_body, json_response, resolve_names
from service.api.catalog import MODEL_EXAMPLE
from service.api.dependencies import (
    FindDep,
    PagingDep,
    RankingTurn,
    SettingsDep,
    StoreDep,
    TrialPagingDep,
    versioned_router,
)
from service.api.search_results import calibrated_predictions, search_answer
from service.api.views import (
    STREAM_END,
    EventView,
    PageView,
    SearchView,
    TrialsView,
    TrialView,
    WebhookView,
)
from service.api.watch import Watch
from service.keys import Keyring
from service.settings import Settings
from service.webhooks.policy import MAX_URL_LENGTH

router = versioned_router("/searches", tag="searches")
plans = versioned_router(tag="searches")

IdempotencyKey = Annotated[
    str | None,
    Header(
        min_length=1,
        max_length=200,
        description="Repeating a request with the same key returns the first response",
    ),
]

EXAMPLE: dict[str, Any] = {
    "kind": "training",
    "model": MODEL_EXAMPLE["spec"],
    "cluster": {"gpu": "cpu", "num_gpus": 2},
    "training": {"sequence_length": 128, "global_batch_size": 8, "precision": "fp32"},
    "search": {"budget_runs": 4, "run_timeout_s": 120.0},
}
MAX_SEQ = 2**31 - 1
"""Maximum event number: the largest value of the database column."""
KEY_CHECK_INTERVAL_S = 2.0
"""Seconds between checks that the key of an event stream is still valid."""
KEY_REUSED = "The Idempotency-Key was used for a different request"
Action = Literal["cancel", "pause", "resume", "clone"]
"""Actions on a search. Each one is the last segment of a POST route."""
ACTION_DESCRIPTIONS: dict[Action, str] = {
    "cancel": "Cancel a search. A waiting or failed search ends at once; a running one, or one "
    "with open runs, as soon as a worker reads the request.",
    "pause": "Pause a search until it is resumed. Its measurements are kept.",
    "resume": "Queue a paused or failed search again. Finished runs are not repeated.",
    "clone": "Create a search with the same query. It runs again, using current calibrations.",
}


@router.post(
    "",
    status_code=status.HTTP_202_ACCEPTED,
    openapi_extra=openapi.body(domain.Query, example=EXAMPLE),
    responses=openapi.conflict(KEY_REUSED),
)
def submit(
    body: SentBody,
    store: StoreDep,
    find: FindDep,
    settings: SettingsDep,
    response: Response,
    idempotency_key: IdempotencyKey = None,
    priority: Annotated[
        int, Query(ge=-100, le=100, description="Higher runs first; above 0 for administrators")
    ] = 0,
    webhook: Annotated[
        str | None,
        Query(
            max_length=MAX_URL_LENGTH,
            description="https URL that receives a signed message when the search ends",
        ),
    ] = None,
) -> SearchView:
    """Queue a search, which a worker runs. `Location` is its URL."""
    check_webhook(webhook, settings=settings)
    sent: dict[str, Any] = {
        "request": body.mapping,
        "priority": priority,
        "idempotency_key": idempotency_key,
        "webhook": webhook,
    }
    if idempotency_key is not None:
        earlier = store.earlier_search(**sent)
        if earlier is not None:
            # Returned even if its names have a new meaning by now, or if no worker can run the
            # search.
            return _accepted(earlier, response)
    return _accepted(
        store.create_search(**prepare_search(body.query, sent=body.mapping, find=find), **sent),
        response,
    )


def check_webhook(url: str | None, *, settings: Settings) -> None:
    """Validate the URL of a webhook, if there is one.

    Raises:
        InputError: The service sends no webhooks (`webhooks_disabled`), or not to this URL.
    """
    if url is None:
        return
    if settings.webhooks is None:
        raise InputError(
            "Webhooks are not enabled on this service. Ask the operator to set HP_WEBHOOK_SECRET "
            "for the API and its workers.",
            field="webhook",
            code="webhooks_disabled",
        )
    settings.webhooks.check(url)


def prepare_search(query: domain.Query, *, sent: JsonObject, find: Find) -> dict[str, Any]:
    """Return a search's query as stored, with resolved names and the edition of hp_tool.

    Raises:
        InputError, NotFoundError, UnsupportedError: The query cannot be run. Without this check,
            only the worker would report it.
    """
    resolved = resolve_names(query, find=find)
    resolve_search(resolved)
    return {
        "query": restore_sent_query(sent, query=query, resolved=resolved),
        "edition": count_query_terms(),
    }


@plans.post(
    "/plans", response_model=PlanAnswer, openapi_extra=openapi.body(domain.Query, example=EXAMPLE)
)
def plan(query: QueryBody, store: StoreDep, _turn: RankingTurn) -> Response:
    """Estimate the cost of a search at its full budget before anything runs.

    Returns its first run, the confirmation run, GPU-hours and money. Assumes that one job can use
    the whole cluster. Nothing is queued.
    """
    return json_response(bill(query, store=store))


@router.get("")
def list_searches(
    store: StoreDep,
    paging: PagingDep,
    state: SearchState | None = None,
    owner: Annotated[
        str | None,
        Query(max_length=200, description="Owner (administrators; others see their own)"),
    ] = None,
    kind: Annotated[domain.Kind | None, Query(description="Kind of query")] = None,
    model: Annotated[
        str | None, Query(max_length=200, description="Model name as in the query")
    ] = None,
    words: Annotated[
        str | None,
        Query(max_length=200, description="Words in the name, tags or note; all must match"),
    ] = None,
    limit: Annotated[int, Query(ge=1, le=200)] = 50,
) -> PageView[SearchView]:
    """List searches that match all filters, newest first."""
    page = store.list_searches(
        state=state, owner=owner, kind=kind, model=model, words=words, limit=limit, **paging
    )
    return PageView.of(page, SearchView.of)


@router.get("/{search_id}")
def get_search(search_id: str, store: StoreDep) -> SearchView:
    """Return a search and its state."""
    return SearchView.of(store.get_search(search_id=search_id))


@dataclass(frozen=True, slots=True, kw_only=True)
class BudgetChange(Strict):
    """New budget of a search; omitted fields do not change."""

    budget_runs: domain.Repetitions | None = None
    """Maximum number of profile runs, including finished ones."""
    budget_gpu_seconds: Amount | None = None
    """Maximum GPU-seconds of profile runs, including those already used."""


@router.patch(
    "/{search_id}",
    openapi_extra=openapi.body(BudgetChange, example={"budget_runs": 8}),
    responses=openapi.conflict("The search succeeded or was cancelled; clone it instead"),
)
def change_budget(
    search_id: str, change: Annotated[BudgetChange, json_body(BudgetChange)], store: StoreDep
) -> SearchView:
    """Change the budget of a search.

    Its worker applies it within seconds and does not interrupt a run in progress.
    """
    return SearchView.of(update_budget(store, search_id=search_id, change=change))


@router.put(
    "/{search_id}/label",
    openapi_extra=openapi.body(Label, example={"name": "baseline", "tags": ["h100"]}),
)
def label_search(
    search_id: str, label: Annotated[Label, json_body(Label)], store: StoreDep
) -> SearchView:
    """Replace a search's name, tags and note, which lists can filter by `words`."""
    return SearchView.of(store.label_search(search_id=search_id, label=label))


@router.get("/{search_id}/trials")
def get_trials(
    search_id: str,
    store: StoreDep,
    paging: TrialPagingDep,
    state: RunState | None = None,
    status: Annotated[MeasurementStatus | None, Query(description="Measurement status")] = None,
    limit: Annotated[int, Query(ge=1, le=1000)] = 1000,
) -> TrialsView:
    """List a search's profile runs that match all filters.

    Each has its predictions before and after calibration, and its measurement.
    """
    record = store.get_search(search_id=search_id)
    page = store.list_runs(search_id=search_id, state=state, status=status, limit=limit, **paging)
    # The estimates are part of the result, so they exist only after the search has ended.
    calibrated = calibrated_predictions(record)
    trials = [TrialView.of(run, calibrated=calibrated.get(run.parallel)) for run in page.items]
    return TrialsView(
        search_id=search_id, state=record.state, trials=trials, next_cursor=page.next_cursor
    )


@router.get("/{search_id}/webhook")
def get_webhook(search_id: str, store: StoreDep) -> WebhookView:
    """Return the state of a search's webhook; 404 if it has none."""
    return WebhookView.of(store.get_webhook(search_id=search_id))


@router.get(
    "/{search_id}/result", responses={202: {"model": SearchView, "description": "Not ended yet"}}
)
async def get_result(
    request: Request,
    search_id: str,
    store: StoreDep,
    settings: SettingsDep,
    response: Response,
    wait_s: Annotated[
        float, Query(ge=0, description="Maximum seconds to wait for the search to end")
    ] = 0.0,
) -> Any:
    """Return {id, status, recommendations, space, rejections, search}, or `status: error`.

    While the search has not ended, 202 with the search.
    """
    watch: Watch = request.app.state.watch
    deadline = time.monotonic() + min(wait_s, settings.max_wait_s)
    while True:
        record = await run_in_threadpool(store.get_search, search_id=search_id)
        if record.state.ended:
            return search_answer(record)
        left_s = deadline - time.monotonic()
        if left_s <= 0:
            response.status_code = status.HTTP_202_ACCEPTED
            response.headers["Retry-After"] = "1"
            return SearchView.of(record)
        await watch.news(search_id, seen=Head(record.state, MAX_SEQ), limit_s=left_s)


def stream_start(
    store: StoreDep,
    search_id: str,
    last_event_id: Annotated[str | None, Header()] = None,
    after: Annotated[
        int,
        Query(ge=0, le=MAX_SEQ, description="Return events after this seq; Last-Event-ID wins"),
    ] = 0,
) -> int:
    """Return the number of the last event that a stream omits.

    It is validated before the stream starts, because a stream cannot return an error status.
    """
    store.get_search(search_id=search_id)
    if last_event_id is None:
        return after
    if not re.fullmatch(r"[0-9]{1,10}", last_event_id) or int(last_event_id) > MAX_SEQ:
        raise InputError(
            f"Last-Event-ID {last_event_id[:100]!r} is not an event id of this stream.",
            field="Last-Event-ID",
        )
    return int(last_event_id)


@router.get("/{search_id}/events", response_class=EventSourceResponse)
async def events(
    request: Request, search_id: str, store: StoreDep, start: Annotated[int, Depends(stream_start)]
) -> AsyncIterator[ServerSentEvent]:
    """Stream all events, or those after Last-Event-ID, until the search ends.

    The event id is its seq.
    """
    watch: Watch = request.app.state.watch
    last_seq = start
    # A stream that has started cannot report an error. A client that reconnects receives it.
    with contextlib.suppress(StoreError):
        while await _is_still_allowed(request):
            state, records = await run_in_threadpool(_state_and_events, store, search_id, last_seq)
            for record in records:
                last_seq = record.seq
                # Events are unnamed, because browsers deliver named events only to listeners for
                # that name.
                yield ServerSentEvent(id=str(record.seq), data=EventView.of(record))
            if records:
                continue
            if state.ended:
                yield ServerSentEvent(event=STREAM_END, data={"state": state})
                return
            await watch.news(search_id, seen=Head(state, last_seq), limit_s=KEY_CHECK_INTERVAL_S)


async def _is_still_allowed(request: Request) -> bool:
    keyring: Keyring = request.app.state.keyring
    try:
        await keyring.principal(request.headers)
    except HpToolError:
        return False
    return True


def _state_and_events(
    store: Store, search_id: str, after: int
) -> tuple[SearchState, list[EventRecord]]:
    # Read the state first. If the search has ended by then, the list contains all its events.
    state = store.get_search(search_id=search_id).state
    return state, store.events(search_id=search_id, after=after)


@router.post(
    "/{search_id}/clone",
    status_code=status.HTTP_202_ACCEPTED,
    description=ACTION_DESCRIPTIONS["clone"],
    responses=openapi.conflict(KEY_REUSED),
)
def clone(
    search_id: str, store: StoreDep, response: Response, idempotency_key: IdempotencyKey = None
) -> SearchView:
    record = apply_action(
        store, search_id=search_id, action="clone", idempotency_key=idempotency_key
    )
    return _accepted(record, response)


def _route(action: Action) -> Callable[..., SearchView]:
    def act(search_id: str, store: StoreDep) -> SearchView:
        return SearchView.of(apply_action(store, search_id=search_id, action=action))

    return act


for _action, _meaning in ACTION_DESCRIPTIONS.items():
    if _action != "clone":  # All other actions are idempotent and need no key.
        router.add_api_route(
            f"/{{search_id}}/{_action}",
            _route(_action),
            methods=["POST"],
            name=_action,
            description=_meaning,
            responses=openapi.conflict("The search's state does not allow this action"),
        )


def _accepted(record: SearchRecord, response: Response) -> SearchView:
    response.headers["Location"] = f"/v1/searches/{record.id}"
    return SearchView.of(record)


def update_budget(store: Store, *, search_id: str, change: BudgetChange) -> SearchRecord:
    """Change the budget of a search.

    Raises:
        InputError: A value is out of range, or both are missing.
        NotFoundError: There is no such search.
        ConflictError: The search has ended.
    """
    if change == BudgetChange():
        raise InputError(
            "Nothing to change. Pass budget_runs, budget_gpu_seconds or both.", field="budget_runs"
        )
    check_bounds(domain.SearchSettings, asdict(change))
    return store.change_budget(search_id=search_id, **asdict(change))


def apply_action(
    store: Store, *, search_id: str, action: Action, idempotency_key: str | None = None
) -> SearchRecord:
    """Apply an action and return the search.

    A clone returns the new search, or the existing one that was created with the same key.

    Raises:
        NotFoundError: There is no such search.
        ConflictError: The search's state does not allow the action.
        UnsupportedError: Runs do not support the query to clone.
    """
    match action:
        case "cancel":
            return store.request_cancel(search_id=search_id)
        case "pause":
            return store.request_pause(search_id=search_id)
        case "resume":
            return store.resume_search(search_id=search_id)
        case "clone":
            record = store.get_search(search_id=search_id)
            query = record.query
            # The digest separates keys of clones from keys of submissions and of other searches'
            # clones.
            key = None if idempotency_key is None else json_digest([search_id, idempotency_key])
            if (
                key is not None
                and (earlier := store.earlier_search(request=query, idempotency_key=key))
                is not None
            ):
                return earlier
            edition = count_query_terms()
            # Only newer workers can validate a query of a newer edition.
            if (record.edition or 0) <= edition:
                resolve_search(schema.parse_query(query))
            return store.create_search(
                query=query,
                request=query,
                idempotency_key=key,
                edition=max(record.edition or 0, edition),
            )
