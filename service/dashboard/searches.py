"""Page /searches: the list of searches. Its filters are part of the URL."""

from dataclasses import asdict, dataclass
from datetime import UTC, date, datetime, time
from typing import Annotated, get_args

from fastapi import APIRouter, Depends, Query, Request
from pydantic import BeforeValidator

from hp_tool.domain.access import Scope
from hp_tool.domain.ports import Store
from hp_tool.domain.query import Kind
from hp_tool.domain.records import JsonObject, Label, SearchRecord
from hp_tool.domain.states import SearchState
from hp_tool.store.columns import decode_configuration
from hp_tool.store.searches import model_of
from hp_tool.wording.rankings import SEARCHES, Table
from service.api.dependencies import Cursor, PrincipalDep, StoreDep, reject_number
from service.api.views import SearchView, View
from service.dashboard.formats import device_of, subject
from service.dashboard.page import BLANK_IS_NONE, Page, Tone, address, next_href, page_at
from service.dashboard.search import budget_runs_of, is_stalled, saved_gpu_seconds
from service.dashboard.trials import configuration_words, is_serving

MAX_ROWS = 50
KINDS: tuple[Kind, ...] = get_args(Kind)

Name = Annotated[str | None, Query(max_length=200), BLANK_IS_NONE]
Day = Annotated[date, BeforeValidator(reject_number)]

router = APIRouter(tags=["dashboard"])


@dataclass(frozen=True, slots=True, kw_only=True)
class SearchRow(View):
    """A search in the list."""

    short_id: str
    href: str
    state: SearchState
    tone: Tone
    worker: str | None
    """Host and process ID of its worker."""
    stalled: bool
    """Whether the search is running, but its worker no longer responds."""
    kind: Kind
    subject: str
    """Model and cluster."""
    device: str
    """Name for one device: GPU, or device for a CPU process."""
    label: Label
    model: str | None
    owner: str | None
    best: str | None
    best_step_s: float | None
    """Step time (serving: request latency) of the best configuration, as on the search's page;
    measured if it ran.
    """
    known: str
    """Basis of `best_step_s`: measured, calibrated or predicted."""
    failure: str
    """Why the search failed; empty otherwise."""
    profile_runs: int
    budget_runs: int
    gpu_seconds: float
    saved_gpu_seconds: float | None
    """GPU-seconds saved against running every feasible configuration; None if unknown."""
    created_at: datetime


@dataclass(frozen=True, slots=True, kw_only=True)
class SearchFilters:
    """Filters of the list; a search must match every one that is set."""

    state: Annotated[SearchState | None, BLANK_IS_NONE] = None
    kind: Annotated[Kind | None, BLANK_IS_NONE] = None
    model: Name = None
    """Full model name. Matching parts of names would have to read every row."""
    words: Name = None
    """Words in a search's name, tags or note. All words must match."""
    owner: Name = None
    """Only for callers who can see other owners' searches."""
    since: Annotated[
        Day | None,
        Query(description="Created on this day (UTC) or later, as 2026-01-31"),
        BLANK_IS_NONE,
    ] = None


@dataclass(frozen=True, slots=True, kw_only=True)
class SearchesPage(Page):
    """The list of searches, newest first."""

    server: str
    """URL of this service, for instructions on how to start a search."""
    states: tuple[SearchState, ...]
    kinds: tuple[Kind, ...]
    filters: SearchFilters
    """The active filters."""
    filtered: bool
    """Whether a filter is set."""
    sees_others: bool
    """Whether the caller can see other owners' searches."""
    gpu_seconds: float
    """GPU-seconds used by the searches on this page."""
    saved_gpu_seconds: float
    """GPU-seconds saved by the searches on this page."""
    live: bool
    """Whether a search on this page has not ended."""
    no_worker: bool
    """Whether searches are queued and there is no live worker."""
    rows: tuple[SearchRow, ...]
    next_href: str | None

    @property
    def table(self) -> Table:
        """The searches with their columns."""
        return Table(columns=SEARCHES, rows=self.rows)


@page_at(router, "/searches", template="searches.html", section="Searches", csv=True)
def searches_context(
    request: Request,
    store: StoreDep,
    principal: PrincipalDep,
    filters: Annotated[SearchFilters, Depends()],
    cursor: Cursor = None,
) -> SearchesPage:
    """List searches that match the filters, newest first."""
    page = store.list_searches(
        state=filters.state,
        kind=filters.kind,
        model=filters.model,
        words=filters.words,
        owner=filters.owner,
        since=datetime.combine(filters.since, time(), UTC) if filters.since else None,
        limit=MAX_ROWS,
        cursor=cursor,
    )
    rows = tuple(_row(record) for record in page.items)
    parameters = asdict(filters)
    return SearchesPage(
        title="Searches",
        json_href=address("/searches.json", parameters),
        server=str(request.base_url).rstrip("/"),
        states=tuple(SearchState),
        kinds=KINDS,
        filters=filters,
        filtered=filters != SearchFilters(),
        sees_others=principal.scope >= Scope.ADMIN,
        gpu_seconds=sum(row.gpu_seconds for row in rows),
        saved_gpu_seconds=sum(row.saved_gpu_seconds or 0.0 for row in rows),
        live=any(not record.state.ended for record in page.items),
        no_worker=any(record.state is SearchState.QUEUED for record in page.items)
        and not store.live_workers(),
        rows=rows,
        next_href=next_href("/searches", page, parameters),
    )


def list_newest(store: Store, *, most: int = 5) -> tuple[SearchRow, ...]:
    """Return the rows of the newest searches that are visible to the caller."""
    return tuple(_row(record) for record in store.list_searches(limit=most).items)


def _row(record: SearchRecord) -> SearchRow:
    view = SearchView.of(record)
    progress = view.progress
    parallel, step_s, known = (None, None, "") if view.state.failed else _best(progress)
    return SearchRow.of(
        view,
        short_id=view.id[:8],
        href=f"/searches/{view.id}",
        tone=view.state.tone,
        kind="inference" if is_serving(view.query) else "training",
        stalled=is_stalled(record),
        subject=subject(view.query),
        device=device_of(view.query),
        model=model_of(view.query),
        best=configuration_words(decode_configuration(parallel), view.query)[0]
        if parallel
        else None,
        best_step_s=step_s,
        known=known if parallel else "",
        profile_runs=view.progress.get("profile_runs", 0),
        budget_runs=budget_runs_of(view.query),
        failure=str((record.error or {}).get("message") or "").partition("\n")[0][:160],
        gpu_seconds=progress.get("gpu_seconds") or 0.0,
        saved_gpu_seconds=saved_gpu_seconds(progress),
    )


def _best(progress: JsonObject) -> tuple[JsonObject | None, float | None, str]:
    """Return (configuration, seconds, basis) of the answer; before the answer, of the best run."""
    best_parallel = progress.get("best_parallel")
    run_s = progress.get("best_measured_s") or progress.get("best_step_s")
    answer: JsonObject | None = progress.get("answer")
    if answer is None:
        return best_parallel, run_s, "measured"
    if answer["measured_s"]:
        return answer["parallel"], answer["measured_s"], "measured"
    return (
        answer["parallel"],
        answer["step_s"],
        "calibrated" if answer["source"] == "measured" else answer["source"],
    )
