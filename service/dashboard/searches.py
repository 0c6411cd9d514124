"""The searches' routes: gather views, make the context, render it."""

from __future__ import annotations

import re
from collections.abc import Callable

from fastapi import APIRouter, Response
from fastapi.responses import PlainTextResponse, RedirectResponse

from hp_tool.errors import InputError, NotFoundError
from hp_tool.exchange.exports import export
from service.api import search_actions
from service.api.bodies import json_response
from service.api.dependencies import StoreDep
from service.api.search_actions import Action, apply_action
from service.dashboard.building import stored_search_page
from service.dashboard.contexts import SearchPage, TrialTable
from service.dashboard.forms import Form
from service.dashboard.links import configuration_href
from service.dashboard.listing import searches_context
from service.dashboard.trials import trial_table
from service.dashboard.twins import page_at

router = APIRouter(tags=["dashboard"])


page_at(router, "/searches", template="searches.html", section="Searches", home=True)(searches_context)


@page_at(router, "/searches/{search_id}", template="search.html", section="Searches")
def search_context(search_id: str, store: StoreDep) -> SearchPage:
    """One search as its page shows it."""
    return stored_search_page(record=store.get_search(search_id=search_id), store=store)


@router.get("/searches/{search_id}/trials.json", response_model=TrialTable)
def trials_json(search_id: str, store: StoreDep) -> Response:
    """All profile runs of a search, column by column, as its charts and its table show them."""
    record = store.get_search(search_id=search_id)
    return json_response(trial_table(record=record, runs=store.run_figures(search_id=search_id)))


@router.get("/searches/{search_id}/logs/{run_id}", response_class=PlainTextResponse)
def log_text(search_id: str, run_id: str, store: StoreDep) -> PlainTextResponse:
    """The end of a profile run's log."""
    run = store.get_run(search_id=search_id, run_id=run_id)
    return PlainTextResponse((run.measurement and run.measurement.log_tail) or "No log was kept of this run.")


@router.get("/searches/{search_id}/runs/{run_id}", include_in_schema=False)
def run_html(search_id: str, run_id: str, store: StoreDep) -> RedirectResponse:
    """Look closer at the configuration of a run."""
    query = store.get_search(search_id=search_id).query
    run = store.get_run(search_id=search_id, run_id=run_id)
    return RedirectResponse(configuration_href(query, parallel=run.parallel), status_code=303)


@router.get("/searches/{search_id}/export", response_class=PlainTextResponse)
def export_text(search_id: str, store: StoreDep, format: str, download: bool = False) -> PlainTextResponse:
    """The best configuration so far in another tool's words."""
    record = store.get_search(search_id=search_id)
    rows = (record.result or {}).get("recommendations") or ()
    parallel = rows[0]["parallel"] if rows else record.progress.get("best_parallel")
    if parallel is None:
        raise NotFoundError("the search has no best configuration yet", field="search_id")
    text = export(result={"query": record.query, "recommendations": [{"parallel": parallel}]}, format=format)
    headers = {"Content-Disposition": f'attachment; filename="{record.id}-{format}.txt"'} if download else {}
    return PlainTextResponse(text, headers=headers)


@router.post("/searches/{search_id}/budget", include_in_schema=False)
def change_budget(search_id: str, values: Form, store: StoreDep) -> RedirectResponse:
    """Let the search run more or less."""
    text = values.get("budget_runs", "")
    if not re.fullmatch(r"[0-9]{1,9}", text):
        raise InputError(f"{text[:40]!r} is no number of runs", field="budget_runs")
    search_actions.change_budget(store, search_id=search_id, budget_runs=int(text))
    return RedirectResponse(f"/searches/{search_id}", status_code=303)


def _button(action: Action) -> Callable[..., RedirectResponse]:
    def press(search_id: str, store: StoreDep) -> RedirectResponse:
        return RedirectResponse(f"/searches/{apply_action(store, search_id=search_id, action=action).id}", status_code=303)

    return press


for _action in Action:  # that a button was pressed on our own page, the gate has checked (Origin)
    router.add_api_route(f"/searches/{{search_id}}/{_action}", _button(_action), methods=["POST"], include_in_schema=False)
