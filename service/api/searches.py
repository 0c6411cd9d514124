"""Searches: submit, list, inspect and act on; the pages of the dashboard use it too."""

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
from hp_tool.domain.records import (
    EventRecord,
    Head,
    JsonObject,
    Label,
    RunState,
    SearchRecord,
    SearchState,
)
from hp_tool.errors import HpToolError, InputError, StoreError
from hp_tool.loop.tuning import resolve_search
from hp_tool.loop.tuning.plan import bill
from hp_tool.questions import schema
from hp_tool.questions.edition import edition
from hp_tool.questions.registered import Find, as_asked
from service.api import openapi
from service.api.bodies import QueryBody, SentBody, json_body, json_response, resolve
from service.api.catalog import MODEL_EXAMPLE
from service.api.dependencies import (
    FindDep,
    PagingDep,
    RankingTurn,
    SettingsDep,
    StoreDep,
    TrialPagingDep,
    versioned,
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
from service.webhooks.policy import LONGEST_URL

router = versioned("/searches", tag="searches")
plans = versioned(tag="searches")

IdempotencyKey = Annotated[
    str | None,
    Header(
        min_length=1,
        max_length=200,
        description="The same key and body again answer what the first did",
    ),
]

EXAMPLE: dict[str, Any] = {
    "kind": "training",
    "model": MODEL_EXAMPLE["spec"],
    "cluster": {"gpu": "cpu", "num_gpus": 2},
    "training": {"sequence_length": 128, "global_batch_size": 8, "precision": "fp32"},
    "search": {"budget_runs": 4, "run_timeout_s": 120.0},
}
LARGEST_SEQ = 2**31 - 1
"""The largest value of the database's column."""
STILL_ALLOWED_S = 2.0
"""How often an event stream asks whether its key is still valid."""
KEY_REUSED = "The Idempotency-Key came with another request before"
Action = Literal["cancel", "pause", "resume", "clone"]
"""Each the last word of a POST route."""
MEANING: dict[Action, str] = {
    "cancel": "A waiting or failed search ends at once, a running one or one with open runs as "
    "soon as a worker sees it.",
    "pause": "Nobody works on it until it is resumed; what was measured stays.",
    "resume": "Queue a paused or failed search again; its finished runs are not repeated.",
    "clone": "A new search with the same query; it runs again, informed by what is known by now.",
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
        int, Query(ge=-100, le=100, description="Higher goes first; above 0 for administrators")
    ] = 0,
    webhook: Annotated[
        str | None,
        Query(
            max_length=LONGEST_URL,
            description="https URL that gets a signed message when the search ends",
        ),
    ] = None,
) -> SearchView:
    """Queue a search; a worker runs it. `Location` is its address."""
    if webhook is not None:
        if settings.webhooks is None:
            fix = "its operator sets HP_WEBHOOK_SECRET for the API and its workers"
            raise InputError(
                f"this service sends no webhooks; {fix}", field="webhook", code="webhooks_disabled"
            )
        settings.webhooks.check(webhook)
    sent: dict[str, Any] = {
        "request": body.mapping,
        "priority": priority,
        "idempotency_key": idempotency_key,
        "webhook": webhook,
    }
    if idempotency_key is not None:
        earlier = store.earlier_search(expanded=schema.to_dict(body.query), **sent)
        if earlier is not None:
            return _accepted(
                earlier, response
            )  # whatever its names mean by now, and whoever could run it
    return _accepted(
        store.create_search(**searched(body.query, sent=body.mapping, find=find), **sent), response
    )


def searched(query: domain.Query, *, sent: JsonObject, find: Find) -> dict[str, Any]:
    """Return what is stored of a search for a query: what was sent with registered names looked up,
    and this edition.

    Refuses unknown names and what is not modelled, rather than in a worker later: InputError,
    NotFoundError, UnsupportedError.
    """
    resolved = resolve(query, find=find)
    resolve_search(resolved)
    return {"query": as_asked(sent, query=query, resolved=resolved), "edition": edition()}


@plans.post(
    "/plans", response_model=PlanAnswer, openapi_extra=openapi.body(domain.Query, example=EXAMPLE)
)
def plan(query: QueryBody, store: StoreDep, _turn: RankingTurn) -> Response:
    """What a search would cost at its whole budget, before anything runs: its first run, the
    confirmation, GPU-hours and money.

    As if one job could have all of the cluster; nothing is queued.
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
        str | None, Query(max_length=200, description="Model, as the query names it")
    ] = None,
    words: Annotated[
        str | None,
        Query(max_length=200, description="Words of its name, tags or note; all of them"),
    ] = None,
    limit: Annotated[int, Query(ge=1, le=200)] = 50,
) -> PageView[SearchView]:
    """Searches that match all filters, newest first."""
    page = store.list_searches(
        state=state, owner=owner, kind=kind, model=model, words=words, limit=limit, **paging
    )
    return PageView.of(page, SearchView.of)


@router.get("/{search_id}")
def get_search(search_id: str, store: StoreDep) -> SearchView:
    """One search and its state."""
    return SearchView.of(store.get_search(search_id=search_id))


@dataclass(frozen=True, slots=True, kw_only=True)
class BudgetChange(Strict):
    """New budget of a search; a field that is left out stays as it is."""

    budget_runs: domain.Repetitions | None = None
    """Maximum profile runs, those already done included."""
    budget_gpu_seconds: Amount | None = None
    """Maximum device seconds of profile runs, those already spent included."""


@router.patch(
    "/{search_id}",
    openapi_extra=openapi.body(BudgetChange, example={"budget_runs": 8}),
    responses=openapi.conflict("It succeeded or was cancelled; a clone takes another budget"),
)
def change_budget(
    search_id: str, change: Annotated[BudgetChange, json_body(BudgetChange)], store: StoreDep
) -> SearchView:
    """Change what a search may spend. Its worker follows within seconds; a run in progress is not
    interrupted.
    """
    return SearchView.of(changed_budget(store, search_id=search_id, change=change))


@router.put(
    "/{search_id}/label",
    openapi_extra=openapi.body(Label, example={"name": "baseline", "tags": ["h100"]}),
)
def label_search(
    search_id: str, label: Annotated[Label, json_body(Label)], store: StoreDep
) -> SearchView:
    """Name, tag and annotate a search, in place of what it was called; lists find it by `words`."""
    return SearchView.of(store.label_search(search_id=search_id, label=label))


@router.get("/{search_id}/trials")
def get_trials(
    search_id: str,
    store: StoreDep,
    paging: TrialPagingDep,
    state: RunState | None = None,
    status: Annotated[MeasurementStatus | None, Query(description="Of what was measured")] = None,
    limit: Annotated[int, Query(ge=1, le=1000)] = 1000,
) -> TrialsView:
    """A search's profile runs that match all filters: predicted before, predicted after
    calibration, measured.
    """
    record = store.get_search(search_id=search_id)
    page = store.list_runs(search_id=search_id, state=state, status=status, limit=limit, **paging)
    calibrated = calibrated_predictions(
        record
    )  # the result's, so they appear when the search has ended
    trials = [TrialView.of(run, calibrated=calibrated.get(run.parallel)) for run in page.items]
    return TrialsView(
        search_id=search_id, state=record.state, trials=trials, next_cursor=page.next_cursor
    )


@router.get("/{search_id}/webhook")
def get_webhook(search_id: str, store: StoreDep) -> WebhookView:
    """State of the search's webhook; 404 where it was submitted without one."""
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
        float, Query(ge=0, description="Hold the request until the search ends, at most this long")
    ] = 0.0,
) -> Any:
    """{id, status, recommendations, space, rejections, search}, or status error; 202 with the
    search while it has not ended.
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
        await watch.news(search_id, seen=Head(record.state, LARGEST_SEQ), limit_s=left_s)


def start_of(
    store: StoreDep,
    search_id: str,
    last_event_id: Annotated[str | None, Header()] = None,
    after: Annotated[
        int,
        Query(ge=0, le=LARGEST_SEQ, description="Events with a greater seq; Last-Event-ID wins"),
    ] = 0,
) -> int:
    """The seq after which the stream begins; checked before it does, while an error can still be
    answered as one.
    """
    store.get_search(search_id=search_id)
    if last_event_id is None:
        return after
    if not re.fullmatch(r"[0-9]{1,10}", last_event_id) or int(last_event_id) > LARGEST_SEQ:
        raise InputError(
            f"Last-Event-ID {last_event_id[:100]!r} is not an id of this stream",
            field="Last-Event-ID",
        )
    return int(last_event_id)


@router.get("/{search_id}/events", response_class=EventSourceResponse)
async def events(
    request: Request, search_id: str, store: StoreDep, start: Annotated[int, Depends(start_of)]
) -> AsyncIterator[ServerSentEvent]:
    """Every event from the beginning or after Last-Event-ID, then live until the search ends. The
    id is the event's seq.
    """
    watch: Watch = request.app.state.watch
    seen = start
    with contextlib.suppress(
        StoreError
    ):  # it is too late for an answer; who connects again is told
        while await _is_still_allowed(request):
            state, records = await run_in_threadpool(_state_and_events, store, search_id, seen)
            for record in records:
                seen = record.seq
                # No event name: a browser delivers named events only to those who know every name;
                # the kind is in the data.
                yield ServerSentEvent(id=str(record.seq), data=EventView.of(record))
            if records:
                continue
            if state.ended:
                yield ServerSentEvent(event=STREAM_END, data={"state": state})
                return
            await watch.news(search_id, seen=Head(state, seen), limit_s=STILL_ALLOWED_S)


async def _is_still_allowed(request: Request) -> bool:
    """Whether the key that opened the stream is still valid. If not, the stream is closed, and a
    new one is refused.
    """
    keyring: Keyring = request.app.state.keyring
    try:
        await keyring.principal(request.headers)
    except HpToolError:
        return False
    return True


def _state_and_events(
    store: Store, search_id: str, after: int
) -> tuple[SearchState, list[EventRecord]]:
    # State first: events that were committed with the end are then surely in the list.
    state = store.get_search(search_id=search_id).state
    return state, store.events(search_id=search_id, after=after)


@router.post(
    "/{search_id}/clone",
    status_code=status.HTTP_202_ACCEPTED,
    description=MEANING["clone"],
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


for _action, _meaning in MEANING.items():
    if _action != "clone":  # done twice, the others do as much as once, so they take no key
        router.add_api_route(
            f"/{{search_id}}/{_action}",
            _route(_action),
            methods=["POST"],
            name=_action,
            description=_meaning,
            responses=openapi.conflict("The search's state does not allow it"),
        )


def _accepted(record: SearchRecord, response: Response) -> SearchView:
    response.headers["Location"] = f"/v1/searches/{record.id}"
    return SearchView.of(record)


def changed_budget(store: Store, *, search_id: str, change: BudgetChange) -> SearchRecord:
    """The search with another budget.

    Raises:
        InputError: a number out of range, or nothing to change.
        NotFoundError: no such search.
        ConflictError: it has ended.
    """
    if change == BudgetChange():
        raise InputError(
            "nothing to change: give budget_runs, budget_gpu_seconds or both", field="budget_runs"
        )
    check_bounds(domain.SearchSettings, asdict(change))
    return store.change_budget(search_id=search_id, **asdict(change))


def apply_action(
    store: Store, *, search_id: str, action: Action, idempotency_key: str | None = None
) -> SearchRecord:
    """The search after the action. A clone is the new search, or the one made earlier with the same
    key.

    Raises:
        NotFoundError: no such search.
        ConflictError: its state does not allow the action.
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
            # The digest keeps the key apart from those of submissions and of other searches'
            # clones.
            key = None if idempotency_key is None else json_digest([search_id, idempotency_key])
            if (
                key is not None
                and (earlier := store.earlier_search(request=query, idempotency_key=key))
                is not None
            ):
                return earlier
            newest = max(record.edition or 0, edition())
            return store.create_search(
                query=query, request=query, idempotency_key=key, edition=newest
            )
