"""The lease on a search: who may claim which one next, and what its coordinator writes about the
search as a whole.

Searches are claimed by priority, then owner by owner in turn, with a limit of searches per cluster.
"""

from collections import Counter
from datetime import UTC, datetime, timedelta
from typing import Any

import sqlalchemy as sa

from hp_tool.domain.records import EventRecord, JsonObject, Lease, SearchRecord, SearchState
from hp_tool.errors import OLDER_EDITION, ConflictError, InputError, StoreError
from hp_tool.store import schema, tables
from hp_tool.store.base import (
    CLOCK_SLACK,
    ID,
    OPEN_RUN,
    StoreBase,
    add_event,
    leased_search,
    now,
    open_runs,
    read_search,
    search_record,
    update_leased,
    update_search,
)
from hp_tool.store.columns import UtcDateTime, encode

SEARCH, RUN = tables.searches, tables.runs
MOST_LOST_CLAIMS = 5
"""Workers in a row that fall silent over a search, while no run of it moves on, until it is given
up. One or two may be killed by chance (their host restarts, another program takes its memory); a
search that kills every worker would end them all.
"""
NO_LEASE = {"lease_holder": None, "lease_expires_at": None, "heartbeat_at": None}
GIVEN_BACK_LATELY = timedelta(minutes=5)
HERE = "local:"
"""Of the clusters that are each worker's own host, and so as many as there are hosts."""
NEVER = datetime.min.replace(tzinfo=UTC)
AT, TOO_LATE, LATELY = (
    sa.bindparam(name, type_=UtcDateTime()) for name in ("at", "too_late", "lately")
)
IS_ABANDONED = sa.and_(
    SEARCH.c.state == SearchState.RUNNING,
    sa.or_(SEARCH.c.lease_expires_at < AT, SEARCH.c.heartbeat_at > TOO_LATE),
)
"""A running search whose lease has expired. A heartbeat from the future means that the clock was
set back, which would prolong the lease by as much. A holder that is alive loses the search to the
next claim, as with any expired lease.
"""
OCCUPIED = sa.select(SEARCH.c.owner, SEARCH.c.cluster, SEARCH.c.lease_holder).where(
    SEARCH.c.state == SearchState.RUNNING, sa.not_(IS_ABANDONED)
)


def _heads() -> sa.Select[Any]:
    """The first waiting search of each owner; `fresh` is 0 of one that has a run under way."""
    busy = SEARCH.c.cluster.in_(sa.bindparam("busy", expanding=True))
    waiting = (
        sa.or_(SEARCH.c.state == SearchState.QUEUED, IS_ABANDONED),
        sa.or_(SEARCH.c.cluster.is_(None), sa.not_(busy)),
    )
    under_way = sa.exists().where(RUN.c.search_id == SEARCH.c.id, RUN.c.state.in_(OPEN_RUN))
    # A time after now is one from before the clock was set back.
    given_back = sa.and_(
        SEARCH.c.state == SearchState.QUEUED, SEARCH.c.updated_at.between(LATELY, TOO_LATE)
    )
    left_alone = sa.and_(SEARCH.c.started_at.is_not(None), under_way, sa.not_(given_back))
    fresh = sa.case((left_alone, 0), else_=1).label("fresh")
    order = (fresh, SEARCH.c.priority.desc(), SEARCH.c.created_at, SEARCH.c.id)
    place = sa.func.row_number().over(partition_by=SEARCH.c.owner, order_by=order).label("place")
    lines = sa.select(
        SEARCH.c.id, SEARCH.c.owner, SEARCH.c.priority, SEARCH.c.created_at, fresh, place
    ).where(*waiting)
    of_owners = lines.subquery()
    return sa.select(of_owners).where(of_owners.c.place == 1)


HEADS = _heads()
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
                wanted = in_turn(connection, at=at, holder=holder, per_cluster=per_cluster)
                states: tuple[SearchState, ...] = (SearchState.QUEUED,)
            else:
                wanted, states = [search_id], (SearchState.QUEUED, SearchState.PAUSED)
            claimed = CLAIMED.with_for_update(skip_locked=search_id is None)
            for each in wanted:
                # Rows that another claimant is just taking are passed over instead of waited for.
                row = connection.execute(
                    claimed, {**_times(at), ID.key: each, "states": states}
                ).one_or_none()
                if row is None:
                    continue
                _check_edition(row.id, stored_by=row.edition, edition=edition)
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
        with self._writing(lasting=False) as connection:
            at = now(connection)
            times = {
                "updated_at": at,
                "heartbeat_at": at,
                "lease_expires_at": at + _positive(lease_s),
            }
            return search_record(update_leased(connection, lease, **times))

    def release_search(self, *, lease: Lease, paused: bool = False) -> SearchRecord:
        with self._writing() as connection:
            row = leased_search(connection, lease)
            # A requested cancel still has to be carried out, so the search waits for its next
            # coordinator.
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
                f"a search ends as succeeded, failed or cancelled, not {state}", field="state"
            )
        with self._writing() as connection:
            row = leased_search(connection, lease)
            unfinished = open_runs(connection, lease.search_id)
            if (
                row.requested == "cancel"
            ):  # accepted, and kept where no engine answers: the sweep ends the runs
                state, stopped_because, error = SearchState.CANCELLED, "cancelled", None
                if result is not None:
                    ended = {"state": state, "stopped_because": stopped_because}
                    result = {**result, "search": {**result.get("search", {}), **ended}}
            elif state is not SearchState.FAILED and unfinished:
                raise ConflictError(
                    f"search {lease.search_id} still has {unfinished} open runs: finish or abandon "
                    "them first"
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
        with self._writing(lasting=False) as connection:
            update_leased(connection, lease, updated_at=now(connection), progress=progress)

    def append_event(self, *, lease: Lease, kind: str, payload: JsonObject) -> EventRecord:
        payload = encode(payload, field="payload")
        with self._writing(lasting=False) as connection:
            leased_search(connection, lease)
            return add_event(
                connection,
                search_id=lease.search_id,
                kind=kind,
                payload=payload,
                at=now(connection),
            )


def _check_edition(search_id: str, *, stored_by: int | None, edition: int | None) -> None:
    """Raise StoreError `older_edition` where a newer hp-tool than that of the claimant stored the
    search.
    """
    if edition is not None and stored_by is not None and stored_by > edition:
        raise StoreError(
            f"search {search_id} was stored by a newer hp-tool (edition {stored_by}, this one is "
            f"{edition}): {schema.INSTALL}",
            code=OLDER_EDITION,
        )


def _give_up(connection: sa.Connection, search_id: str, *, lost: int, at: datetime) -> None:
    """Fail a search over which worker after worker was lost. Its open runs stay for a resume or a
    cancel.
    """
    code = "worker_lost_repeatedly"
    message = (
        f"{lost} workers in a row were lost while they worked on this search, and no run of it "
        "moved on: see why their logs "
        "end (out of memory?), fix that, and resume the search"
    )
    values = {
        "stopped_because": code,
        "error": {"code": code, "message": message, "field": None},
        "requested": None,
    }
    update_search(
        connection, search_id, at=at, state=SearchState.FAILED, finished_at=at, **values, **NO_LEASE
    )


def _positive(lease_s: float) -> timedelta:
    if lease_s <= 0:
        raise InputError(
            f"lease_s is {lease_s}; a lease lasts longer than nothing", field="lease_s"
        )
    return timedelta(seconds=lease_s)


def cluster_of(query: JsonObject) -> str:
    """What a search keeps busy: its launcher and the name of its cluster, or of the GPU of one
    without a name.
    """
    cluster: Any = query.get("cluster")
    while isinstance(cluster, dict):
        cluster = cluster.get("name") or cluster.get("gpu")
    launcher = (query.get("search") or {}).get("launcher") or "local"
    return f"{launcher}:{cluster}"[:200].replace("\0", "")


def in_turn(
    connection: sa.Connection, *, at: datetime, holder: str, per_cluster: int | None
) -> list[str]:
    """The searches that `holder` may claim: the first of each owner, in the order of turns.

    Before all others go those with a run under way: it takes devices, which others may wait for,
    until somebody books its end. One that was given back lately waits its turn as others do. Then
    the higher priority; then the owner with the fewest running searches; then the one whose last
    search was started the longest ago. `per_cluster`: searches that run on one cluster at most.
    """
    running = connection.execute(OCCUPIED, _times(at)).all()
    of_owner = Counter(row.owner for row in running)
    busy = _busy(
        [(row.cluster, row.lease_holder) for row in running], holder=holder, per_cluster=per_cluster
    )
    heads = connection.execute(HEADS, {**_times(at), "busy": busy}).all()
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


def _times(at: datetime) -> dict[str, datetime]:
    """What the parameters of statements about leases are at this instant."""
    return {"at": at, "too_late": at + CLOCK_SLACK, "lately": at - GIVEN_BACK_LATELY}


def _busy(
    running: list[tuple[str | None, str]], *, holder: str, per_cluster: int | None
) -> list[str]:
    """Clusters that carry as many searches as they may."""
    if per_cluster is None:
        return []
    host = holder.rpartition(":")[0]
    counted = Counter(
        cluster
        for cluster, holding in running
        if cluster is not None
        and not (cluster.startswith(HERE) and holding.rpartition(":")[0] != host)
    )
    return [cluster for cluster, count in counted.items() if count >= per_cluster]


def _last_start(connection: sa.Connection, owner: str | None) -> datetime:
    of_owner = SEARCH.c.owner.is_(None) if owner is None else SEARCH.c.owner == owner
    started: datetime | None = connection.execute(
        sa.select(sa.func.max(SEARCH.c.started_at)).where(of_owner)
    ).scalar_one()
    return started or NEVER
