"""The lease on a search, and what its coordinator writes about the search as a whole."""

from __future__ import annotations

from datetime import datetime, timedelta

import sqlalchemy as sa

from hp_tool.domain.records import EventRecord, JsonObject, Lease, SearchRecord, SearchState
from hp_tool.errors import ConflictError, InputError
from hp_tool.store import tables
from hp_tool.store.base import StoreBase, add_event, leased_search, now, open_runs, read_search, update_search
from hp_tool.store.columns import encode
from hp_tool.store.scheduling import in_turn, is_abandoned

SEARCH = tables.searches
MOST_LOST_CLAIMS = 5
"""Workers in a row that fall silent over a search, while no run of it moves on, until it is given up. One or two may be killed
by chance (their host restarts, another program takes its memory); a search that kills every worker would end them all."""
NO_LEASE = {"lease_holder": None, "lease_expires_at": None, "heartbeat_at": None}


class Coordination(StoreBase):
    """The part of `Store` that claims a search and writes under its lease."""

    def claim_search(
        self, *, holder: str, lease_s: float, search_id: str | None = None, per_cluster: int | None = None
    ) -> tuple[SearchRecord, Lease] | None:
        with self._writing() as connection:
            at = now(connection)
            if search_id is None:
                wanted = in_turn(connection, at=at, holder=holder, per_cluster=per_cluster)
                states: tuple[SearchState, ...] = (SearchState.QUEUED,)
            else:
                wanted, states = [search_id], (SearchState.QUEUED, SearchState.PAUSED)
            free = sa.or_(SEARCH.c.state.in_(states), is_abandoned(at))
            columns = (SEARCH.c.id, SEARCH.c.state, SEARCH.c.started_at, SEARCH.c.lease_token, SEARCH.c.lost_claims)
            for each in wanted:
                # Rows that another claimant is just taking are passed over instead of waited for.
                mine = sa.select(*columns).where(SEARCH.c.id == each, free)
                row = connection.execute(mine.with_for_update(skip_locked=search_id is None)).one_or_none()
                if row is None:
                    continue
                # A search claimed by its id is wanted, however many workers were lost over it.
                is_lost = row.state == SearchState.RUNNING and search_id is None
                lost = row.lost_claims + is_lost
                if not is_lost or lost < MOST_LOST_CLAIMS:
                    break
                _give_up(connection, each, lost=lost, at=at)
            else:
                return None
            update_search(
                connection,
                row.id,
                at=at,
                state=SearchState.RUNNING,
                lease_holder=holder,
                lease_token=row.lease_token + 1,
                lost_claims=lost,
                lease_expires_at=at + _positive(lease_s),
                heartbeat_at=at,
                started_at=row.started_at or at,
            )
            record = read_search(connection, row.id)
            assert record.lease is not None  # running searches have one
            return record, record.lease

    def renew_lease(self, *, lease: Lease, lease_s: float) -> SearchRecord:
        with self._writing() as connection:
            leased_search(connection, lease)
            at = now(connection)
            update_search(connection, lease.search_id, at=at, lease_expires_at=at + _positive(lease_s), heartbeat_at=at)
            return read_search(connection, lease.search_id)

    def release_search(self, *, lease: Lease, paused: bool = False) -> SearchRecord:
        with self._writing() as connection:
            row = leased_search(connection, lease)
            # A requested cancel still has to be carried out, so the search waits for its next coordinator.
            cancelling = row.requested == "cancel"
            pausing = not cancelling and (paused or row.requested == "pause")
            state = SearchState.PAUSED if pausing else SearchState.QUEUED
            requested = row.requested if cancelling else None
            values = {"state": state, "requested": requested, "lost_claims": 0, **NO_LEASE}
            update_search(connection, lease.search_id, at=now(connection), **values)
            return read_search(connection, lease.search_id)

    def finish_search(
        self,
        *,
        lease: Lease,
        state: SearchState,
        stopped_because: str | None = None,
        result: JsonObject | None = None,
        error: JsonObject | None = None,
    ) -> SearchRecord:
        if not state.ended:
            raise InputError(f"a search ends as succeeded, failed or cancelled, not {state}", field="state")
        values = {
            "stopped_because": stopped_because,
            "result": None if result is None else encode(result, field="result"),
            "error": None if error is None else encode(error, field="error"),
        }
        with self._writing() as connection:
            leased_search(connection, lease)
            if state is not SearchState.FAILED and (unfinished := open_runs(connection, lease.search_id)):
                raise ConflictError(f"search {lease.search_id} still has {unfinished} open runs: finish or abandon them first")
            at = now(connection)
            update_search(connection, lease.search_id, at=at, state=state, finished_at=at, requested=None, **values, **NO_LEASE)
            return read_search(connection, lease.search_id)

    def set_progress(self, *, lease: Lease, progress: JsonObject) -> None:
        progress = encode(progress, field="progress")
        with self._writing() as connection:
            leased_search(connection, lease)
            update_search(connection, lease.search_id, at=now(connection), progress=progress)

    def append_event(self, *, lease: Lease, kind: str, payload: JsonObject) -> EventRecord:
        payload = encode(payload, field="payload")
        with self._writing() as connection:
            leased_search(connection, lease)
            return add_event(connection, search_id=lease.search_id, kind=kind, payload=payload, at=now(connection))


def _give_up(connection: sa.Connection, search_id: str, *, lost: int, at: datetime) -> None:
    """Fail a search over which worker after worker was lost. Its open runs stay for a resume or a cancel."""
    code = "worker_lost_repeatedly"
    message = (
        f"{lost} workers in a row were lost while they worked on this search, and no run of it moved on: see why their logs "
        "end (out of memory?), fix that, and resume the search"
    )
    values = {"stopped_because": code, "error": {"code": code, "message": message, "field": None}, "requested": None}
    update_search(connection, search_id, at=at, state=SearchState.FAILED, finished_at=at, **values, **NO_LEASE)


def _positive(lease_s: float) -> timedelta:
    if lease_s <= 0:
        raise InputError(f"lease_s is {lease_s}; a lease lasts longer than nothing", field="lease_s")
    return timedelta(seconds=lease_s)
