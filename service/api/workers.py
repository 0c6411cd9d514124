"""Routes for live workers, their devices and their searches."""

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime

from hp_tool.domain.ports import Store
from hp_tool.domain.records import Offer, SearchRecord
from hp_tool.domain.states import SearchState
from service.api.dependencies import StoreDep, versioned_router
from service.api.views import PageView, View

router = versioned_router("/workers", tag="searches")
MAX_SEARCHES_PER_STATE = 200


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerView(View):
    """A worker seen within the last 30 seconds."""

    holder: str
    """Host and process ID."""
    offers: tuple[Offer, ...]
    """Devices on which it can run searches."""
    searches: tuple[str, ...]
    """The caller's searches that this worker runs."""
    started_at: datetime
    seen_at: datetime


@router.get("")
def list_workers(store: StoreDep) -> PageView[WorkerView]:
    """List live workers, longest running first.

    While any worker is live, searches that none of them can run are rejected.
    """
    return PageView(
        items=workers(store, running=searches_in(store, SearchState.RUNNING)), next_cursor=None
    )


def searches_in(store: Store, state: SearchState) -> Sequence[SearchRecord]:
    """Return the newest searches in this state that are visible to the caller."""
    return store.list_searches(state=state, limit=MAX_SEARCHES_PER_STATE).items


def workers(store: Store, *, running: Sequence[SearchRecord]) -> list[WorkerView]:
    """Return the live workers, each with its searches out of `running`."""
    leases = [(record.lease.holder, record.id) for record in running if record.lease is not None]
    return [
        WorkerView.of(
            worker,
            searches=tuple(search_id for holder, search_id in leases if holder == worker.holder),
        )
        for worker in store.live_workers()
    ]
