"""Search leases: which search a worker may claim next, and what its coordinator may write.

Searches are claimed by priority, then round-robin by owner, up to a maximum number of running
searches per cluster.
"""

from collections import Counter
from datetime import UTC, datetime, timedelta
from typing import Any

import sqlalchemy as sa

from hp_tool.domain.records import EventRecord, JsonObject, Lease, SearchRecord
from hp_tool.domain.states import SearchState
from hp_tool.errors import OLDER_EDITION, ConflictError, InputError, StoreError
from hp_tool.store import schema, tables
from hp_tool.store.base import (
    CLOCK_SLACK,
    ID,
    OPEN_RUN,
    StoreBase,
    add_event,
    count_open_runs,
    leased_search,
    now,
    read_search,
    search_record,
    update_leased,
    update_search,
)
from hp_tool.store.columns import UtcDateTime, encode

SEARCH, RUN = tables.searches, tables.runs
MAX_LOST_CLAIMS = 5
"""A search fails when this many workers in a row were lost without any progress of its runs. One or
two workers may die by chance, for example when a host restarts. A search that kills every worker
would otherwise stop all of them.
"""
NO_LEASE = {"lease_holder": None, "lease_expires_at": None, "heartbeat_at": None}
RECENT_RELEASE = timedelta(minutes=5)
LOCAL_PREFIX = "local:"
"""Prefix in the names of local clusters. Each worker's host is a separate local cluster."""
NEVER = datetime.min.replace(tzinfo=UTC)
AT, FUTURE, RECENTLY = (
    sa.bindparam(name, type_=UtcDateTime()) for name in ("at", "too_late", "lately")
)
IS_ABANDONED = sa.and_(
    SEARCH.c.state == SearchState.RUNNING,
    sa.or_(SEARCH.c.lease_expires_at < AT, SEARCH.c.heartbeat_at > FUTURE),
)
"""Condition that a search is running but its lease has expired. If a heartbeat is in the future,
the clock was set back, which would prolong the lease. Such a lease therefore counts as expired,
and a live holder loses the search to the next claim.
"""
OCCUPIED = sa.select(SEARCH.c.owner, SEARCH.c.cluster, SEARCH.c.lease_holder).where(
    SEARCH.c.state == SearchState.RUNNING, sa.not_(IS_ABANDONED)
)


def _first_waiting_searches() -> sa.Select[Any]:
    """Select the first waiting search of each owner.

    `fresh` is 0 if that search has an open run without a coordinator, otherwise 1.
    """
    busy = SEARCH.c.cluster.in_(sa.bindparam("busy", expanding=True))
    waiting = (
        sa.or_(SEARCH.c.state == SearchState.QUEUED, IS_ABANDONED),
        sa.or_(SEARCH.c.cluster.is_(None), sa.not_(busy)),
    )
    has_open_run = sa.exists().where(RUN.c.search_id == SEARCH.c.id, RUN.c.state.in_(OPEN_RUN))
    # A time in the future was stored before the clock was set back.
    released = sa.and_(
        SEARCH.c.state == SearchState.QUEUED, SEARCH.c.updated_at.between(RECENTLY, FUTURE)
    )
    left_alone = sa.and_(SEARCH.c.started_at.is_not(None), has_open_run, sa.not_(released))
    fresh = sa.case((left_alone, 0), else_=1).label("fresh")
    order = (fresh, SEARCH.c.priority.desc(), SEARCH.c.created_at, SEARCH.c.id)
    place = sa.func.row_number().over(partition_by=SEARCH.c.owner, order_by=order).label("place")
    lines = sa.select(
        SEARCH.c.id, SEARCH.c.owner, SEARCH.c.priority, SEARCH.c.created_at, fresh, place
    ).where(*waiting)
    of_owners = lines.subquery()
    return sa.select(of_owners).where(of_owners.c.place == 1)


HEADS = _first_waiting_searches()
CLAIMED = sa.select(
    SEARCH.c.id,
    SEARCH.c.state,
    SEARCH.c.edition,
    SEARCH.c.started_at,
    SEARCH.c.lease_token,
    SEARCH.c.lost_claims,
).where(
    SEARCH.c.id == ID,
    sa.or_(SEARCH.c.state.in_(sa.bindparam("states", expanding=True)), IS_ABANDONED),
)


class Coordination(StoreBase):
    """Leases, and writes by their holders."""

    def claim_search(
        self,
        *,
        holder: str,
        lease_s: float,
        search_id: str | None = None,
        per_cluster: int | None = None,
        edition: int | None = None,
    ) -> tuple[SearchRecord, Lease] | None:
        with self._writing() as connection:
            at = now(connection)
            if search_id is None:
                schema.check_known(connection)
                candidates = claim_order(connection, at=at, holder=holder, per_cluster=per_cluster)
                states: tuple[SearchState, ...] = (SearchState.QUEUED,)
            else:
                candidates, states = [search_id], (SearchState.QUEUED, SearchState.PAUSED)
            claimed = CLAIMED.with_for_update(skip_locked=search_id is None)
            for candidate in candidates:
                # Skip rows that another worker is claiming.
                row = connection.execute(
                    claimed, {**_time_parameters(at), ID.key: candidate, "states": states}
                ).one_or_none()
                if row is None:
                    continue
                _check_edition(row.id, stored_by=row.edition, edition=edition)
                # A claim by id ignores the number of lost workers.
                is_lost = row.state == SearchState.RUNNING and search_id is None
                lost_claims = row.lost_claims + is_lost
                if not is_lost or lost_claims < MAX_LOST_CLAIMS:
                    break
                _fail_lost_search(connection, candidate, lost=lost_claims, at=at)
            else:
                return None
            update_search(
                connection,
                row.id,
                at=at,
                state=SearchState.RUNNING,
                lease_holder=holder,
                lease_token=row.lease_token + 1,
                lost_claims=lost_claims,
                lease_expires_at=at + _lease_duration(lease_s),
                heartbeat_at=at,
                started_at=row.started_at or at,
            )
            record = read_search(connection, row.id)
            assert record.lease is not None
            return record, record.lease

    def renew_lease(self, *, lease: Lease, lease_s: float) -> SearchRecord:
        with self._writing(durable=False) as connection:
            at = now(connection)
            times = {
                "updated_at": at,
                "heartbeat_at": at,
                "lease_expires_at": at + _lease_duration(lease_s),
            }
            return search_record(update_leased(connection, lease, **times))

    def release_search(self, *, lease: Lease, paused: bool = False) -> SearchRecord:
        with self._writing() as connection:
            row = leased_search(connection, lease)
            # A cancel request is still pending, so the search waits for its next coordinator.
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
            raise InputError(
                f"state is {state}. Use succeeded, failed or cancelled.", field="state"
            )
        with self._writing() as connection:
            row = leased_search(connection, lease)
            unfinished = count_open_runs(connection, lease.search_id)
            if row.requested == "cancel":
                # Cancel even if the launcher does not respond: stray-job cleanup ends open runs
                # later.
                state, stopped_because, error = SearchState.CANCELLED, "cancelled", None
                if result is not None:
                    outcome = {"state": state, "stopped_because": stopped_because}
                    result = {**result, "search": {**result.get("search", {}), **outcome}}
            elif state is not SearchState.FAILED and unfinished:
                raise ConflictError(
                    f"Search {lease.search_id} still has {unfinished} open runs. Finish or abandon "
                    "them first."
                )
            values = {
                "stopped_because": stopped_because,
                "result": None if result is None else encode(result, field="result"),
                "error": None if error is None else encode(error, field="error"),
            }
            at = now(connection)
            update_search(
                connection,
                lease.search_id,
                at=at,
                state=state,
                finished_at=at,
                requested=None,
                **values,
                **NO_LEASE,
            )
            return read_search(connection, lease.search_id)

    def set_progress(self, *, lease: Lease, progress: JsonObject) -> None:
        progress = encode(progress, field="progress")
        with self._writing(durable=False) as connection:
            update_leased(connection, lease, updated_at=now(connection), progress=progress)

    def append_event(self, *, lease: Lease, kind: str, payload: JsonObject) -> EventRecord:
        payload = encode(payload, field="payload")
        with self._writing(durable=False) as connection:
            leased_search(connection, lease)
            return add_event(
                connection,
                search_id=lease.search_id,
                kind=kind,
                payload=payload,
                at=now(connection),
            )


def _check_edition(search_id: str, *, stored_by: int | None, edition: int | None) -> None:
    if edition is not None and stored_by is not None and stored_by > edition:
        raise StoreError(
            f"Search {search_id} was stored by a newer hp-tool (edition {stored_by}; this one is "
            f"{edition}): {schema.INSTALL}",
            code=OLDER_EDITION,
        )


def _fail_lost_search(
    connection: sa.Connection, search_id: str, *, lost: int, at: datetime
) -> None:
    """Fail a search whose workers were lost several times in a row. Its open runs remain."""
    code = "worker_lost_repeatedly"
    message = (
        f"{lost} workers in a row died during this search without progress. Check why their logs "
        "end (out of memory?), fix the cause, and resume the search."
    )
    values = {
        "stopped_because": code,
        "error": {"code": code, "message": message, "field": None},
        "requested": None,
    }
    update_search(
        connection, search_id, at=at, state=SearchState.FAILED, finished_at=at, **values, **NO_LEASE
    )


def _lease_duration(lease_s: float) -> timedelta:
    if lease_s <= 0:
        raise InputError(f"lease_s is {lease_s}. Use a value above 0.", field="lease_s")
    return timedelta(seconds=lease_s)


def cluster_of(query: JsonObject) -> str:
    """Return the cluster that a search uses: its launcher, and the cluster's name or GPU."""
    cluster: Any = query.get("cluster")
    while isinstance(cluster, dict):
        cluster = cluster.get("name") or cluster.get("gpu")
    launcher = (query.get("search") or {}).get("launcher") or "local"
    return f"{launcher}:{cluster}"[:200].replace("\0", "")


def claim_order(
    connection: sa.Connection, *, at: datetime, holder: str, per_cluster: int | None
) -> list[str]:
    """Return the ids of the searches that `holder` may claim, one per owner, next one first.

    Searches with an open run come first, because that run occupies devices until a coordinator
    handles its end. This does not apply to searches that were released recently. The remaining
    order is by priority (highest first), then by the owner with the fewest running searches, then
    by the owner whose last search started earliest.

    Args:
        connection: Connection in a transaction.
        at: Current time (UTC).
        holder: Worker that claims.
        per_cluster: Maximum number of running searches per cluster; None for no limit.
    """
    running = connection.execute(OCCUPIED, _time_parameters(at)).all()
    of_owner = Counter(row.owner for row in running)
    busy = _full_clusters(
        [(row.cluster, row.lease_holder) for row in running], holder=holder, per_cluster=per_cluster
    )
    heads = connection.execute(HEADS, {**_time_parameters(at), "busy": busy}).all()
    last = (
        {head.owner: _last_start(connection, head.owner) for head in heads}
        if len(heads) > 1
        else {}
    )
    turns = sorted(
        heads,
        key=lambda r: (
            r.fresh,
            -r.priority,
            of_owner[r.owner],
            last.get(r.owner, NEVER),
            r.created_at,
            r.id,
        ),
    )
    return [row.id for row in turns]


def _time_parameters(at: datetime) -> dict[str, datetime]:
    return {"at": at, "too_late": at + CLOCK_SLACK, "lately": at - RECENT_RELEASE}


def _full_clusters(
    running: list[tuple[str | None, str]], *, holder: str, per_cluster: int | None
) -> list[str]:
    if per_cluster is None:
        return []
    host = holder.rpartition(":")[0]
    counted = Counter(
        cluster
        for cluster, lease_holder in running
        if cluster is not None
        and not (cluster.startswith(LOCAL_PREFIX) and lease_holder.rpartition(":")[0] != host)
    )
    return [cluster for cluster, count in counted.items() if count >= per_cluster]


def _last_start(connection: sa.Connection, owner: str | None) -> datetime:
    of_owner = SEARCH.c.owner.is_(None) if owner is None else SEARCH.c.owner == owner
    started: datetime | None = connection.execute(
        sa.select(sa.func.max(SEARCH.c.started_at)).where(of_owner)
    ).scalar_one()
    return started or NEVER
