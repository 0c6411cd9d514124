"""Which search is claimed next: by priority, then owner by owner in turn, with a limit of searches per cluster."""

from __future__ import annotations

from collections import Counter
from datetime import UTC, datetime, timedelta
from typing import Any

import sqlalchemy as sa

from hp_tool.domain.records import JsonObject, SearchState
from hp_tool.store import tables

SEARCH = tables.searches
CLOCK_SLACK = timedelta(seconds=5)
"""How far a clock may be set back, as time services do all day, without a lease being taken for one of the future."""
HERE = "local:"
"""Of the clusters that are each worker's own host, and so as many as there are hosts."""
NEVER = datetime.min.replace(tzinfo=UTC)


def cluster_of(query: JsonObject) -> str:
    """What a search keeps busy: its launcher and the name of its cluster, or of the GPU of one without a name."""
    cluster: Any = query.get("cluster")
    while isinstance(cluster, dict):
        cluster = cluster.get("name") or cluster.get("gpu")
    launcher = (query.get("search") or {}).get("launcher") or "local"
    return f"{launcher}:{cluster}"[:200].replace("\0", "")


def is_abandoned(at: datetime) -> sa.ColumnElement[bool]:
    """Condition: a running search whose lease has expired.

    A heartbeat from the future means that the clock was set back, which would prolong the lease by as much. A holder that is
    alive loses the search to the next claim, as with any expired lease.
    """
    over = sa.or_(SEARCH.c.lease_expires_at < at, SEARCH.c.heartbeat_at > at + CLOCK_SLACK)
    return sa.and_(SEARCH.c.state == SearchState.RUNNING, over)


def in_turn(connection: sa.Connection, *, at: datetime, holder: str, per_cluster: int | None) -> list[str]:
    """The searches that `holder` may claim: the first of each owner, in the order of turns.

    Before all others goes the higher priority; then the owner with the fewest running searches; then the one whose last
    search was started the longest ago. `per_cluster`: searches that run on one cluster at most.
    """
    occupied = sa.and_(SEARCH.c.state == SearchState.RUNNING, sa.not_(is_abandoned(at)))
    running = connection.execute(sa.select(SEARCH.c.owner, SEARCH.c.cluster, SEARCH.c.lease_holder).where(occupied)).all()
    of_owner = Counter(row.owner for row in running)
    waiting = sa.or_(SEARCH.c.state == SearchState.QUEUED, is_abandoned(at))
    if busy := _busy([(row.cluster, row.lease_holder) for row in running], holder=holder, per_cluster=per_cluster):
        waiting = sa.and_(waiting, sa.or_(SEARCH.c.cluster.is_(None), SEARCH.c.cluster.not_in(busy)))
    order = (SEARCH.c.priority.desc(), SEARCH.c.created_at, SEARCH.c.id)
    place = sa.func.row_number().over(partition_by=SEARCH.c.owner, order_by=order).label("place")
    lines = sa.select(SEARCH.c.id, SEARCH.c.owner, SEARCH.c.priority, SEARCH.c.created_at, place).where(waiting).subquery()
    heads = connection.execute(sa.select(lines).where(lines.c.place == 1)).all()
    last = {head.owner: _last_start(connection, head.owner) for head in heads} if len(heads) > 1 else {}
    turns = sorted(
        heads, key=lambda row: (-row.priority, of_owner[row.owner], last.get(row.owner, NEVER), row.created_at, row.id)
    )
    return [row.id for row in turns]


def _busy(running: list[tuple[str | None, str]], *, holder: str, per_cluster: int | None) -> list[str]:
    """Clusters that carry as many searches as they may."""
    if per_cluster is None:
        return []
    host = holder.rpartition(":")[0]
    counted = Counter(
        cluster
        for cluster, holding in running
        if cluster is not None and not (cluster.startswith(HERE) and holding.rpartition(":")[0] != host)
    )
    return [cluster for cluster, count in counted.items() if count >= per_cluster]


def _last_start(connection: sa.Connection, owner: str | None) -> datetime:
    of_owner = SEARCH.c.owner.is_(None) if owner is None else SEARCH.c.owner == owner
    started: datetime | None = connection.execute(sa.select(sa.func.max(SEARCH.c.started_at)).where(of_owner)).scalar_one()
    return started or NEVER
