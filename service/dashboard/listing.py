"""The list of searches: what it is narrowed to, which its address keeps, and its rows."""

from __future__ import annotations

from datetime import UTC, date, datetime, time
from typing import Annotated, get_args
from urllib.parse import urlencode

from fastapi import Depends, Query, Request

from hp_tool.domain.access import Scope
from hp_tool.domain.query import Kind
from hp_tool.domain.records import SearchState
from hp_tool.errors import InputError
from hp_tool.store.columns import decode_configuration
from hp_tool.store.searches import model_of
from service.api.dependencies import Cursor, PrincipalDep, StoreDep
from service.api.views import SearchView
from service.dashboard.building import SEARCH_TONES, budget_runs_of, subject
from service.dashboard.contexts import SearchesPage, SearchFilters, SearchRow
from service.dashboard.serving_runs import serves, words

ROWS_A_PAGE = 50
KINDS: tuple[Kind, ...] = get_args(Kind)

Word = Annotated[str, Query(max_length=200)]


def filters_of(
    state: Annotated[str, Query(description="One of the states of a search")] = "",
    kind: Annotated[str, Query(description="training or inference")] = "",
    model: Word = "",
    owner: Word = "",
    since: Annotated[str, Query(max_length=10, description="Created on this day (UTC) or later, as 2026-01-31")] = "",
) -> SearchFilters:
    """A form sends `state=` and the like where nothing is chosen: what is empty, anything passes. Raises InputError."""
    if state and state not in tuple(SearchState):
        raise InputError(f"{state!r} is not a state; use one of {', '.join(SearchState)}", field="state")
    if kind and kind not in KINDS:
        raise InputError(f"{kind!r} is not a kind of search; use one of {', '.join(KINDS)}", field="kind")
    try:
        day = date.fromisoformat(since) if since else None
    except ValueError:
        raise InputError(f"{since!r} is not a day such as 2026-01-31", field="since") from None
    return SearchFilters(
        state=SearchState(state) if state else None,
        kind=next((known for known in KINDS if known == kind), None),
        model=model.strip() or None,
        owner=owner.strip() or None,
        since=day,
    )


def searches_context(
    request: Request,
    store: StoreDep,
    principal: PrincipalDep,
    filters: Annotated[SearchFilters, Depends(filters_of)],
    cursor: Cursor = None,
) -> SearchesPage:
    """The list of searches as its page shows it."""
    page = store.list_searches(
        state=filters.state,
        kind=filters.kind,
        model=filters.model,
        owner=filters.owner,
        since=datetime.combine(filters.since, time(), UTC) if filters.since else None,
        limit=ROWS_A_PAGE,
        cursor=cursor,
    )
    rows = tuple(_row(SearchView.of(record)) for record in page.items)
    kept = {name: str(value) for name in SearchFilters.__slots__ if (value := getattr(filters, name)) is not None}
    return SearchesPage(
        title="Searches",
        json_href=_link("/searches.json", kept),
        server=str(request.base_url).rstrip("/"),
        states=tuple(SearchState),
        kinds=KINDS,
        filters=filters,
        filtered=bool(kept),
        sees_others=principal.scope >= Scope.ADMIN,
        gpu_seconds=sum(row.gpu_seconds for row in rows),
        saved_gpu_seconds=sum(row.saved_gpu_seconds or 0.0 for row in rows),
        live=any(not record.state.ended for record in page.items),
        rows=rows,
        next_href=_link("/", {**kept, "cursor": page.next_cursor}) if page.next_cursor else None,
    )


def _row(view: SearchView) -> SearchRow:
    best, grid, spent = (view.progress.get(name) for name in ("best_parallel", "grid_gpu_seconds", "gpu_seconds"))
    return SearchRow(
        short_id=view.id[:8],
        href=f"/searches/{view.id}",
        state=view.state,
        tone=SEARCH_TONES[view.state],
        kind="inference" if serves(view.query) else "training",
        subject=subject(view.query),
        model=model_of(view.query),
        owner=view.owner,
        best=words(decode_configuration(best))[0] if best else None,
        best_step_s=view.progress.get("best_step_s"),
        profile_runs=view.progress.get("profile_runs", 0),
        budget_runs=budget_runs_of(view.query),
        gpu_seconds=spent or 0.0,
        saved_gpu_seconds=max(0.0, grid - spent) if grid and spent is not None else None,
        created_at=view.created_at,
    )


def _link(path: str, parameters: dict[str, str]) -> str:
    return f"{path}?{urlencode(parameters)}" if parameters else path
