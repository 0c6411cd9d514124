"""Live workers: what they can run, and what they run."""

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime

from hp_tool.domain.ports import Store
from hp_tool.domain.records import Offer, SearchRecord, SearchState
from service.api.dependencies import StoreDep, versioned
from service.api.views import PageView, View

router = versioned("/workers", tag="searches")
MOST = 200
"""Searches looked at, of each state."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerView(View):
    """A worker that announced itself within the last half minute."""

    holder: str
    """Host and process id."""
    offers: tuple[Offer, ...]
    """Devices on which it can run a search."""
    searches: tuple[str, ...]
    """The caller's searches that this worker runs."""
    started_at: datetime
    seen_at: datetime


@router.get("")
def list_workers(store: StoreDep) -> PageView[WorkerView]:
    """Live workers, the longest running first. While any is alive, a search that none of them could
    run is refused.
    """
    return PageView(
        items=workers(store, running=searches_in(store, SearchState.RUNNING)), next_cursor=None
    )


def searches_in(store: Store, state: SearchState) -> Sequence[SearchRecord]:
    """The newest searches in this state that the caller may see."""
    return store.list_searches(state=state, limit=MOST).items


def workers(store: Store, *, running: Sequence[SearchRecord]) -> list[WorkerView]:
    """Live workers, and which of the `running` searches each has."""
    leases = [(record.lease.holder, record.id) for record in running if record.lease is not None]
    return [
        WorkerView.of(
            worker, searches=tuple(each for holder, each in leases if holder == worker.holder)
        )
        for worker in store.live_workers()
    ]
