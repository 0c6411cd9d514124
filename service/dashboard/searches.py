"""The searches' routes: gather views, make the context, render it."""

from __future__ import annotations

from typing import Annotated

from fastapi import APIRouter, Depends, Query, Request
from fastapi.responses import HTMLResponse, RedirectResponse

from hp_tool.domain.records import SearchState
from hp_tool.errors import InputError
from service.api.dependencies import StoreDep
from service.api.steering import Action, steer
from service.api.trials import recommended, trials_of
from service.api.views import PageView, SearchView
from service.dashboard.building import search_page, searches_page
from service.dashboard.contexts import SearchesPage, SearchPage
from service.dashboard.rendering import render

ROWS_A_PAGE = 50

router = APIRouter(tags=["dashboard"])


def state_filter(
    state: Annotated[str, Query(description="One of the states of a search; empty for any")] = "",
) -> SearchState | None:
    """The filter of the list. A form sends `state=` where nothing is chosen."""
    try:
        return SearchState(state) if state else None
    except ValueError:
        raise InputError(f"{state!r} is not a state; use one of {', '.join(SearchState)}", field="state") from None


def searches_context(
    request: Request,
    store: StoreDep,
    state: Annotated[SearchState | None, Depends(state_filter)],
    cursor: Annotated[str | None, Query(max_length=200)] = None,
) -> SearchesPage:
    page = store.list_searches(state=state, limit=ROWS_A_PAGE, cursor=cursor)
    views = PageView(items=[SearchView.of(record) for record in page.items], next_cursor=page.next_cursor)
    return searches_page(page=views, state=state, server=str(request.base_url).rstrip("/"))


def search_context(search_id: str, store: StoreDep) -> SearchPage:
    record = store.get_search(search_id=search_id)
    trials = trials_of(record, store.runs(search_id=search_id))
    return search_page(view=SearchView.of(record), trials=trials, recommended=recommended(record))


SearchesContext = Annotated[SearchesPage, Depends(searches_context)]
SearchContext = Annotated[SearchPage, Depends(search_context)]


@router.get("/searches.json")
def searches_json(page: SearchesContext) -> SearchesPage:
    """The list of searches as its page shows it."""
    return page


@router.get("/searches/{search_id}.json")
def search_json(page: SearchContext) -> SearchPage:
    """One search as its page shows it."""
    return page


@router.get("/", response_class=HTMLResponse, include_in_schema=False)
@router.get("/searches", response_class=HTMLResponse, include_in_schema=False)
def searches_html(page: SearchesContext) -> HTMLResponse:
    return render("searches.html", page=page, section="Searches")


@router.get("/searches/{search_id}", response_class=HTMLResponse, include_in_schema=False)
def search_html(page: SearchContext) -> HTMLResponse:
    return render("search.html", page=page, section="Searches")


@router.post("/searches/{search_id}/{action}", include_in_schema=False)
def act(search_id: str, action: Action, store: StoreDep) -> RedirectResponse:
    """A button was pressed. That it was pressed on our own page, the gate has checked (Origin)."""
    return RedirectResponse(f"/searches/{steer(store, search_id=search_id, action=action).id}", status_code=303)
