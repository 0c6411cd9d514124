"""/workers: who runs searches, on which devices, and what waits for them."""

from collections import Counter
from dataclasses import dataclass

from fastapi import APIRouter

from hp_tool.domain.records import SearchState
from service.api.dependencies import StoreDep
from service.api.workers import WorkerView, searches_in, workers
from service.dashboard.health import Health, health
from service.dashboard.page import Page, Tone, page_at

MOST_SEARCHES = 5
"""Searches of a cluster whose runs are looked at."""

router = APIRouter(tags=["dashboard"])


@dataclass(frozen=True, slots=True, kw_only=True)
class ClusterLoad:
    """What searches keep busy: a launcher with a cluster or GPU."""

    name: str
    running: int
    queued: int
    workers: int
    """Live workers that have this launcher."""
    health: str
    tone: Tone
    runs: Health
    """What the newest runs of its running searches say."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkersPage(Page):
    """Workers and the clusters that open searches want."""

    workers: tuple[WorkerView, ...]
    clusters: tuple[ClusterLoad, ...]


@page_at(router, "/workers", template="workers.html", section="Workers")
def workers_context(store: StoreDep) -> WorkersPage:
    """Workers and clusters, as shown on their page."""
    records = {state: searches_in(store, state) for state in (SearchState.RUNNING, SearchState.QUEUED)}
    busy = records[SearchState.RUNNING]
    live = workers(store, running=busy)
    running, queued = (Counter(record.cluster or "unknown" for record in each) for each in records.values())
    return WorkersPage(
        title="Workers",
        json_href="/workers.json",
        workers=tuple(live),
        clusters=tuple(
            _load(
                name,
                running=running[name],
                queued=queued[name],
                live=live,
                runs=health(
                    store, search_ids=[each.id for each in busy if (each.cluster or "unknown") == name][:MOST_SEARCHES]
                ),
            )
            for name in sorted({*running, *queued})
        ),
    )


def _load(name: str, *, running: int, queued: int, live: list[WorkerView], runs: Health) -> ClusterLoad:
    launcher = name.partition(":")[0]
    able = sum(any(offer.launcher == launcher for offer in worker.offers) for worker in live)
    state: str
    tone: Tone
    state, tone = ("working", "good") if running else ("next in line", "busy")
    if not able:
        state, tone = f"no live worker has launcher {launcher}", "bad"
    return ClusterLoad(name=name, running=running, queued=queued, workers=able, health=state, tone=tone, runs=runs)
