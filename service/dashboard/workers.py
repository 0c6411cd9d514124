"""Page /workers: workers, their devices, and the searches that wait for them."""

from collections import Counter
from dataclasses import dataclass
from datetime import datetime

from fastapi import APIRouter

from hp_tool.domain.ports import Store
from hp_tool.domain.records import SearchRecord
from hp_tool.domain.states import SearchState
from service.api.dependencies import StoreDep
from service.api.workers import WorkerView, searches_in, workers
from service.dashboard.health import Health, cluster_health
from service.dashboard.page import Page, Tone, page_at
from service.dashboard.search import is_stalled

MAX_SEARCHES = 5
"""Maximum number of searches per cluster whose runs are considered."""
UNKNOWN = "unknown"

router = APIRouter(tags=["dashboard"])


@dataclass(frozen=True, slots=True, kw_only=True)
class RunningSearch:
    """A running search, and its worker."""

    id: str
    cluster: str
    holder: str
    """Host and process ID of a worker, or of an `hp-tool tune` that shares the database."""
    seen_at: datetime
    stalled: bool
    """Whether the holder no longer responds. A suitable worker then takes over."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ClusterLoad:
    """Load of a launcher with a cluster or GPU."""

    name: str
    running: int
    """Number of running searches that are not stalled."""
    stalled: int
    queued: int
    workers: int
    """Number of live workers with this launcher."""
    health: str
    tone: Tone
    runs: Health
    """Health, from the newest runs of its running searches."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkersPage(Page):
    """Workers and the clusters that open searches need."""

    workers: tuple[WorkerView, ...]
    clusters: tuple[ClusterLoad, ...]
    running: tuple[RunningSearch, ...]


@page_at(router, "/workers", template="workers.html", section="Workers")
def workers_context(store: StoreDep) -> WorkersPage:
    """List workers, the clusters that open searches need, and running searches."""
    records, queued = (
        searches_in(store, state) for state in (SearchState.RUNNING, SearchState.QUEUED)
    )
    live = workers(store, running=records)
    busy = [_running(record) for record in records]
    waiting = Counter(record.cluster or UNKNOWN for record in queued)
    names = sorted({*waiting, *(each.cluster for each in busy)})
    loads = (
        _load(
            store,
            name,
            busy=[each for each in busy if each.cluster == name],
            queued=waiting[name],
            live=live,
        )
        for name in names
    )
    return WorkersPage(
        title="Workers",
        json_href="/workers.json",
        workers=tuple(live),
        clusters=tuple(loads),
        running=tuple(busy),
    )


def _running(record: SearchRecord) -> RunningSearch:
    lease = record.lease
    return RunningSearch(
        id=record.id,
        cluster=record.cluster or UNKNOWN,
        holder="" if lease is None else lease.holder,
        seen_at=record.updated_at if lease is None else lease.heartbeat_at,
        stalled=is_stalled(record),
    )


def _load(
    store: Store, name: str, *, busy: list[RunningSearch], queued: int, live: list[WorkerView]
) -> ClusterLoad:
    launcher = name.partition(":")[0]
    able = sum(any(offer.launcher == launcher for offer in worker.offers) for worker in live)
    silent = sum(each.stalled for each in busy)
    running = len(busy) - silent
    state: str
    tone: Tone
    if not able and (queued or silent):
        state, tone = (
            f"{'searches wait' if queued else 'stalled'}: no live worker has launcher {launcher}",
            "bad",
        )
    elif running:
        state, tone = "working", "good"
    else:
        state, tone = "next in the queue", "busy"
    return ClusterLoad(
        name=name,
        running=running,
        stalled=silent,
        queued=queued,
        workers=able,
        health=state,
        tone=tone,
        runs=cluster_health(store, search_ids=[each.id for each in busy][:MAX_SEARCHES]),
    )
