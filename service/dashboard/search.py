"""Page /searches/ID: one search with its trials, logs, exports and control buttons."""

import json
import re
from collections.abc import Callable
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from typing import Any, Literal

from fastapi import APIRouter, Response
from fastapi.responses import PlainTextResponse, RedirectResponse

from hp_tool.domain.ports import Store
from hp_tool.domain.query import Kind, SearchSettings
from hp_tool.domain.records import JsonObject, Label, SearchRecord
from hp_tool.domain.states import SearchState
from hp_tool.errors import InputError
from hp_tool.questions import schema
from hp_tool.questions.anatomy import Schedule, schedule_of
from hp_tool.wording.answer import stop_reason
from hp_tool.wording.rankings import Table
from service.api.bodies import json_response
from service.api.dependencies import FindDep, StoreDep
from service.api.searches import (
    ACTION_DESCRIPTIONS,
    Action,
    BudgetChange,
    apply_action,
    prepare_search,
    update_budget,
)
from service.api.views import SearchView, View
from service.dashboard import trials
from service.dashboard.best import AxisEffect, Best, best_of_search, list_axis_effects
from service.dashboard.formats import device_of, subject
from service.dashboard.health import Health, cluster_health
from service.dashboard.live import Running, get_log_tail, list_running, step_counts
from service.dashboard.page import (
    Form,
    Page,
    Tone,
    configuration_href,
    done,
    page_at,
    stored_configuration,
)
from service.dashboard.ranking import run_href
from service.dashboard.verdict import failure_words, runs_verdict

START_UP_S = 20.0
"""Assumed seconds before a run's first step, to choose a sufficient time limit."""
LIMITS_S = (60, 120, 300, 600, 1200, 1800, 3600, 7200, 4 * 3600, 24 * 3600)

router = APIRouter(tags=["dashboard"])


@dataclass(frozen=True, slots=True, kw_only=True)
class Button:
    """A button that sends a POST request."""

    label: str
    href: str
    tone: Literal["primary", "danger", ""] = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class SearchPage(Page, View):
    """One search. Its trials, which can be many, have a separate address."""

    id: str
    kind: Kind
    subject: str
    """Model and cluster."""
    device: str
    """Name for one device: GPU, or device for a CPU process."""
    quantity: trials.Quantity
    trials_href: str
    """URL of its `TrialTable` as JSON."""
    logs_href: str
    """Prefix of log URLs, to be followed by a run ID."""
    export_href: str | None
    """URL of the best configuration for another tool, given as ?format=; None without one."""
    run_href: str | None
    """URL of the page with launch commands for the recommended configuration."""
    best_href: str | None
    """URL of the best configuration's page."""
    events_href: str | None
    """URL of the event stream; None once the search has ended."""
    state: SearchState
    label: Label
    tone: Tone
    ended: bool
    requested: str | None
    actions: tuple[Button, ...]
    error: dict[str, Any] | None
    longer_s: int | None
    """Suggested time limit per run in seconds for another search, if this one failed because of its
    limit.
    """
    limit_s: float | None
    """Time limit of the failed search in seconds."""
    slowest_step_s: float | None
    """Longest expected step of the failed runs, in seconds."""
    best: Best | None
    failed_so_far: str | None
    """Description of all its runs, if all failed and more runs are left."""
    axes: tuple[AxisEffect, ...]
    """Effect of each setting, largest first; empty until the search has ended."""
    schedule: Schedule | None
    """Pipeline schedule of the answer; None for other searches, and until the search has ended."""
    bubble_fraction: float | None
    """Bubble's fraction of the whole step."""
    health: Health
    running: tuple[Running, ...]
    """Active runs."""
    ahead: int | None
    """Number of queued searches before this one, among those visible to the caller."""
    targets: dict[str, float]
    """Targets for mean latencies of a serving search, in seconds by name."""
    profile_runs: int
    budget_runs: int
    seconds_left: float | None
    """Upper bound on the seconds until a budget is used up at the current rate."""
    gpu_seconds: float
    grid_gpu_seconds: float | None
    """GPU-seconds to run every feasible configuration."""
    saved_gpu_seconds: float | None
    """`grid_gpu_seconds` minus the GPU-seconds of the search; None if unknown."""
    expected_gain_fraction: float | None
    """Expected relative gain from four further runs."""
    queue_s: float
    """Seconds for which its jobs waited for devices."""
    pending: str | None
    """Why a job waits for devices, and when it is expected to start; None if no job waits."""
    waiting_for: str | None
    """Problem with the runs folder that prevents runs from starting."""
    stopped_because: str | None
    worker: str | None
    stalled: bool
    """Whether the search is running, but its worker no longer responds."""
    no_worker: bool
    """Whether the search is queued and there is no live worker."""
    created_at: datetime
    finished_at: datetime | None
    query_text: str


@page_at(router, "/searches/{search_id}", template="search.html", section="Searches")
def search_context(search_id: str, store: StoreDep) -> SearchPage:
    """Return one search without its runs."""
    return search_page(store.get_search(search_id=search_id), store=store)


@router.get("/searches/{search_id}/trials.json", response_model=trials.TrialTable)
def trials_json(search_id: str, store: StoreDep) -> Response:
    """Return a search's profile runs as columnar data for its charts and table."""
    record = store.get_search(search_id=search_id)
    return json_response(
        trials.trial_table(record=record, runs=store.run_figures(search_id=search_id))
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class RunsPage(Page):
    """The runs of a search as a table that needs no scripts."""

    search_href: str
    runs: trials.TrialTable
    name: str
    """Search name."""
    verdict: str
    """The best run and the number of failed ones; empty before the first run has ended."""
    order: tuple[int, ...]
    """Row indices, fastest run first."""

    @property
    def table(self) -> Table:
        """The runs with their columns."""
        return self.runs.listed


@page_at(router, "/searches/{search_id}/runs", template="runs.html", section="Searches", csv=True)
def runs_context(search_id: str, store: StoreDep) -> RunsPage:
    """Return all runs of a search in columns."""
    record = store.get_search(search_id=search_id)
    table = trials.trial_table(record=record, runs=store.run_figures(search_id=search_id))
    return RunsPage(
        title=f"Runs of {record.label.name or subject(record.query)}",
        name=record.label.name or subject(record.query),
        verdict=runs_verdict(table),
        json_href=f"/searches/{record.id}/runs.json",
        search_href=f"/searches/{record.id}",
        runs=table,
        order=table.order,
    )


@router.get("/searches/{search_id}/logs/{run_id}", response_class=PlainTextResponse)
def log_text(search_id: str, run_id: str, store: StoreDep) -> PlainTextResponse:
    """Return the end of a profile run's log."""
    record = store.get_search(search_id=search_id)
    log = get_log_tail(record, store.get_run(search_id=search_id, run_id=run_id))
    return PlainTextResponse(log or "No log was stored for this run.")


@router.post("/searches/{search_id}/budget", include_in_schema=False)
def change_budget(search_id: str, values: Form, store: StoreDep) -> RedirectResponse:
    """Change a search's maximum number of profile runs."""
    budget_runs = parse_integer(values.get("budget_runs", ""), field="budget_runs")
    update_budget(store, search_id=search_id, change=BudgetChange(budget_runs=budget_runs))
    return done(f"/searches/{search_id}", "changed")


@router.post("/searches/{search_id}/longer", include_in_schema=False)
def run_longer(search_id: str, values: Form, store: StoreDep, find: FindDep) -> RedirectResponse:
    """Start the search again with a longer time limit per run."""
    sent = dict(store.get_search(search_id=search_id).query)
    sent["search"] = (sent.get("search") or {}) | {
        "run_timeout_s": parse_integer(values.get("run_timeout_s", ""), field="run_timeout_s")
    }
    record = store.create_search(
        **prepare_search(schema.parse_query(sent), sent=sent, find=find), request=sent
    )
    return RedirectResponse(f"/searches/{record.id}", status_code=303)


def _longer_limit(view: SearchView, store: Store) -> tuple[int, float, float] | None:
    """Return a sufficient time limit per run, the current limit, and the longest expected step.

    All are in seconds. Return None unless the search failed because all runs exceeded the limit.
    """
    settings = view.query.get("search") or {}
    limit = settings.get("run_timeout_s", "auto")
    if view.state is not SearchState.FAILED or not isinstance(limit, int | float):
        return None
    runs = store.run_figures(search_id=view.id)
    if not runs or any(run.status != "timeout" for run in runs):
        return None
    steps = sum(step_counts(view.query))
    slowest_s = max(run.expected_step_s or run.predicted_step_s or 0.0 for run in runs)
    needed_s = max(2.0 * (START_UP_S + steps * slowest_s), 2.0 * limit)
    return (
        next(each for each in LIMITS_S if each >= needed_s or each == LIMITS_S[-1]),
        limit,
        slowest_s,
    )


def _handler(action: Action) -> Callable[..., RedirectResponse]:
    def handle(search_id: str, store: StoreDep) -> RedirectResponse:
        return RedirectResponse(
            f"/searches/{apply_action(store, search_id=search_id, action=action).id}",
            status_code=303,
        )

    return handle


for _action in ACTION_DESCRIPTIONS:  # The request came from a page of this service.
    router.add_api_route(
        f"/searches/{{search_id}}/{_action}",
        _handler(_action),
        methods=["POST"],
        include_in_schema=False,
    )


def search_page(record: SearchRecord, *, store: Store) -> SearchPage:
    """Return the context of a search's page."""
    view = SearchView.of(record)
    account = get_account(view)
    best = best_of_search(record, store)
    configuration = best and stored_configuration(
        view.query, replace(best, parallel=best.recommended or best.parallel)
    )
    left = budget_runs_of(view.query) - account.get("profile_runs", 0)
    longer_s, limit_s, slowest_step_s = _longer_limit(view, store) or (None, None, None)
    schedule, bubble_fraction = (
        schedule_of(configuration) if configuration and view.state.ended else (None, None)
    )
    return SearchPage.of(
        view,
        kind="inference" if trials.is_serving(view.query) else "training",
        quantity=trials.compared_quantity(view.query),
        title=view.label.name or subject(view.query),
        subject=subject(view.query),
        device=device_of(view.query),
        json_href=f"/searches/{view.id}.json",
        trials_href=f"/searches/{view.id}/trials.json",
        logs_href=f"/searches/{view.id}/logs/",
        export_href=f"/searches/{view.id}/export" if best else None,
        run_href=configuration and run_href(configuration),
        best_href=configuration and configuration_href(configuration, search_id=view.id),
        events_href=None if view.state.ended else f"/v1/searches/{view.id}/events",
        tone=view.state.tone,
        ended=view.state.ended,
        actions=_action_buttons(view),
        longer_s=longer_s,
        limit_s=limit_s,
        slowest_step_s=slowest_step_s,
        best=best,
        failed_so_far=None
        if best or view.state.ended
        else failure_words(store.run_figures(search_id=view.id), left=left),
        axes=list_axis_effects(record),
        schedule=schedule,
        bubble_fraction=bubble_fraction,
        health=cluster_health(store, search_ids=[view.id]),
        running=() if view.state.ended else list_running(store, record),
        ahead=_count_ahead(record, store),
        targets=trials.targets_of(view.query),
        profile_runs=account.get("profile_runs", 0),
        budget_runs=budget_runs_of(view.query),
        seconds_left=seconds_left(view),
        gpu_seconds=account.get("gpu_seconds", 0.0),
        grid_gpu_seconds=account.get("grid_gpu_seconds"),
        saved_gpu_seconds=saved_gpu_seconds(account),
        expected_gain_fraction=account.get("expected_gain_fraction"),
        queue_s=account.get("queue_s", 0.0),
        pending=None
        if view.state.ended or "pending" not in account
        else _pending_words(account["pending"]),
        waiting_for=None if view.state.ended else account.get("waiting_for"),
        stopped_because=view.stopped_because
        and stop_reason(view.stopped_because, best.verdict if best else None),
        stalled=is_stalled(record),
        no_worker=view.state is SearchState.QUEUED and not store.live_workers(),
        query_text=json.dumps(view.query, indent=2, ensure_ascii=False),
    )


def get_account(view: SearchView) -> JsonObject:
    """Return the cost of a search, from its result or else from its progress."""
    return view.progress | (view.summary or {})


def saved_gpu_seconds(account: JsonObject) -> float | None:
    """Return the GPU-seconds saved over running every feasible configuration; None if unknown."""
    grid, spent = account.get("grid_gpu_seconds"), account.get("gpu_seconds")
    return max(0.0, grid - spent) if grid and spent is not None else None


def is_stalled(record: SearchRecord) -> bool:
    """Return whether a running search's worker no longer responds; another may then take over."""
    return (
        record.state is SearchState.RUNNING
        and record.lease is not None
        and record.lease.expires_at < datetime.now(UTC)
    )


def parse_integer(text: str, *, field: str) -> int:
    """Parse an integer in a form field.

    Raises:
        InputError: The text is not an integer.
    """
    if not re.fullmatch(r"[0-9]{1,9}", text):
        raise InputError(f"Expected a whole number, got {text[:40]!r}.", field=field)
    return int(text)


def _count_ahead(record: SearchRecord, store: Store) -> int | None:
    if record.state is not SearchState.QUEUED:
        return None
    queued = store.list_searches(state=SearchState.QUEUED, limit=200, oldest_first=True).items
    return sum(
        (-each.priority, each.created_at) < (-record.priority, record.created_at) for each in queued
    )


def seconds_left(view: SearchView, *, now: datetime | None = None) -> float | None:
    """Return an upper bound on the seconds until the first budget is used up at the current rate.

    Return None if it is unknown.
    """
    done, spent = view.progress.get("profile_runs", 0), view.progress.get("gpu_seconds", 0.0)
    if view.state is not SearchState.RUNNING or view.started_at is None or not done:
        return None
    settings = view.query.get("search") or {}
    used: float = done / max(done, budget_runs_of(view.query))
    if settings.get("budget_gpu_seconds"):
        used = max(used, min(1.0, spent / settings["budget_gpu_seconds"]))
    elapsed = ((now or datetime.now(UTC)) - view.started_at).total_seconds()
    return elapsed * (1 - used) / used


def _pending_words(pending: JsonObject) -> str:
    """Return `2 runs: Resources, expected to start at 2026-11-22T10:00:00`."""
    runs = "1 run" if pending.get("runs", 1) == 1 else f"{pending['runs']} runs"
    starts_at = pending.get("starts_at")
    reason = pending.get("reason") or "the engine gives no reason"
    return f"{runs}: {reason}" + (f", expected to start at {starts_at}" if starts_at else "")


def _action_buttons(view: SearchView) -> tuple[Button, ...]:
    cancel = Button(label="Cancel", href=f"/searches/{view.id}/cancel", tone="danger")
    pause = Button(label="Pause", href=f"/searches/{view.id}/pause")
    resume = Button(label="Resume", href=f"/searches/{view.id}/resume", tone="primary")
    again = Button(label="Run again", href=f"/searches/{view.id}/clone")
    match view.state:
        case SearchState.QUEUED | SearchState.RUNNING:
            return (resume if view.requested == "pause" else pause, cancel)
        case SearchState.PAUSED:
            return (resume, cancel)
        case SearchState.FAILED:
            return (resume, again)
        case _:
            return (again,)


def budget_runs_of(query: JsonObject) -> int:
    """Return the maximum number of profile runs in a search's query."""
    return int((query.get("search") or {}).get("budget_runs") or SearchSettings().budget_runs)
