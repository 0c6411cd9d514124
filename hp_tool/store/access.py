"""API keys, the audit log, and limits on daily GPU-seconds and on open runs per cluster."""

from collections.abc import Sequence
from dataclasses import asdict
from datetime import datetime, timedelta
from typing import Any, Unpack

import sqlalchemy as sa

from hp_tool.domain.access import AuditRecord, KeyRecord, NewAudit, NewKey, Scope, Usage
from hp_tool.domain.records import ANY_KEY, GpuSecondsLimit, JsonObject, OpenRunsLimit, Page, Paging
from hp_tool.domain.states import RunState, SearchState
from hp_tool.domain.webhooks import WebhookState
from hp_tool.errors import InputError, LimitError
from hp_tool.store import tables
from hp_tool.store.base import (
    GPU_SECONDS,
    ID,
    OPEN,
    OPEN_RUN,
    StoreBase,
    count_by_state,
    now,
    row_by_id,
    storable_values,
)
from hp_tool.store.columns import new_id, row_dict, storable
from hp_tool.store.paging import RowList
from hp_tool.store.webhooks import HOOK, pending_webhooks

KEY, AUDIT = tables.api_keys, tables.audit
SEARCH, RUN = tables.searches, tables.runs
ADMISSION_LOCK = 0x68705F61646D6974
"""PostgreSQL advisory lock for admitting searches, so that two searches cannot reserve the same
remaining quota. SQLite has a single writer and needs no lock.
"""
RUNS_LOCK = 0x6870_7275
"""First half of the PostgreSQL advisory lock for a cluster's runs. The second half is a hash of the
cluster name.
"""
BUDGET_FIELD = "search.budget_gpu_seconds"
CLUSTER_FULL_RETRY_S = 1.0
MAX_KEY_LIFETIME_S = 100 * 365.25 * 86_400.0


class Access(StoreBase):
    """API keys, the audit log and usage."""

    def add_key(self, *, key: NewKey, lifetime_s: float | None = None) -> KeyRecord:
        values = asdict(key)
        amounts = {
            "lifetime_s": lifetime_s,
            **{name: values[name] for name in ("requests_per_second", "gpu_seconds_per_day")},
        }
        for name, amount in amounts.items():
            if amount is not None and not 0 < amount <= MAX_KEY_LIFETIME_S:
                raise InputError(
                    f"{name} is {amount}. Use a value above 0 and at most {MAX_KEY_LIFETIME_S:g}.",
                    field=name,
                )
        if not key.owner.strip():
            raise InputError("Missing `owner`: a key needs an owner.", field="owner")
        with self._writing() as connection:
            at = now(connection)
            expires_at = None if lifetime_s is None else at + timedelta(seconds=lifetime_s)
            values |= {"scope": int(key.scope), "created_at": at, "expires_at": expires_at}
            connection.execute(sa.insert(KEY).values(storable_values(KEY, values)))
            return _read_key(connection, key.id)

    def get_key(self, *, key_id: str) -> KeyRecord:
        with self._reading() as connection:
            return _read_key(connection, key_id)

    def list_keys(self, *, limit: int = 50, **paging: Unpack[Paging]) -> Page[KeyRecord]:
        with self._reading() as connection:
            return RowList(table=KEY, paging=paging).page(
                connection, limit=limit, record=_key_record
            )

    def revoke_key(self, *, key_id: str) -> KeyRecord:
        with self._writing() as connection:
            valid = KEY.c.id == key_id, KEY.c.revoked_at.is_(None)
            connection.execute(sa.update(KEY).where(*valid).values(revoked_at=now(connection)))
            return _read_key(connection, key_id)

    def gpu_seconds_today(self, *, api_key_id: str | None = ANY_KEY) -> float:
        with self._reading() as connection:
            used = used_today(connection, at=now(connection), api_key_id=api_key_id)
            return used + reserved_by_open_searches(connection, api_key_id=api_key_id)

    def usage(self) -> Usage:
        with self._reading() as connection:
            at = now(connection)
            next_in_line = sa.select(SEARCH.c.updated_at).where(
                SEARCH.c.state == SearchState.QUEUED
            )
            oldest = connection.execute(
                next_in_line.order_by(SEARCH.c.updated_at).limit(1)
            ).scalar_one_or_none()
            expired = SEARCH.c.state == SearchState.RUNNING, SEARCH.c.lease_expires_at < at
            webhooks = count_by_state(connection, HOOK.c.state, WebhookState)
            webhooks[WebhookState.PENDING] = connection.execute(
                pending_webhooks(sa.func.count())
            ).scalar_one()
            by_state = sa.select(
                RUN.c.state, sa.func.count(), sa.func.sum(RUN.c.gpu_seconds)
            ).group_by(RUN.c.state)
            runs = connection.execute(by_state).all()
            counted = {state: number for state, number, _ in runs}
            return Usage(
                searches=count_by_state(connection, SEARCH.c.state, SearchState),
                runs={state: counted.get(state, 0) for state in RunState},
                gpu_seconds=float(sum(gpu_seconds or 0.0 for _, _, gpu_seconds in runs)),
                oldest_queued_s=0.0 if oldest is None else max((at - oldest).total_seconds(), 0.0),
                expired_leases=connection.execute(
                    sa.select(sa.func.count()).where(*expired)
                ).scalar_one(),
                webhooks=webhooks,
            )

    def add_audit(self, **entry: Unpack[NewAudit]) -> None:
        resource = storable(entry["resource"][:500])  # untrusted input
        shortened = {**entry, "action": entry["action"][:200], "resource": resource}
        with self._writing(durable=False) as connection:
            connection.execute(
                sa.insert(AUDIT).values(id=new_id(), created_at=now(connection), **shortened)
            )

    def audit(
        self, *, owner: str | None = None, limit: int = 50, **paging: Unpack[Paging]
    ) -> Page[AuditRecord]:
        with self._reading() as connection:
            listing = RowList(table=AUDIT, filters={AUDIT.c.owner: owner}, paging=paging)
            return listing.page(
                connection, limit=limit, record=lambda row: AuditRecord(**row_dict(row))
            )


def _read_key(connection: sa.Connection, key_id: str) -> KeyRecord:
    return _key_record(
        row_by_id(connection, sa.select(KEY).where(KEY.c.id == ID), key_id, kind="key")
    )


def _key_record(row: sa.Row[Any]) -> KeyRecord:
    return KeyRecord(**row_dict(row) | {"scope": Scope(row.scope)})


def admit(
    connection: sa.Connection,
    limits: Sequence[GpuSecondsLimit],
    *,
    query: JsonObject,
    at: datetime,
    spent: float = 0.0,
) -> None:
    """Raise LimitError if the remaining budget of `query` exceeds a limit.

    The lock is held until the transaction ends, so searches are admitted one at a time.

    Args:
        connection: Connection in a write transaction.
        limits: Limits to check.
        query: The search's stored query.
        at: Current time (UTC).
        spent: GPU-seconds that the search has already used.
    """
    if not limits:
        return
    if connection.dialect.name == "postgresql":
        connection.execute(sa.select(sa.func.pg_advisory_xact_lock(ADMISSION_LOCK)))
    requested = max(gpu_seconds_budget(query) - spent, 0.0)
    for limit in limits:
        used = used_today(connection, at=at, api_key_id=limit.api_key_id, cluster=limit.cluster)
        reserved = reserved_by_open_searches(
            connection, api_key_id=limit.api_key_id, cluster=limit.cluster
        )
        remaining = limit.per_day - used - reserved
        if remaining <= 0 or requested > remaining:
            holder = "this service" if limit.api_key_id is ANY_KEY else "this key"
            holder = holder if limit.cluster is None else f"cluster {limit.cluster}"
            raise LimitError(
                f"This search may use {requested:g} GPU-seconds, but {holder} has "
                f"{max(remaining, 0.0):g} of {limit.per_day:g} left today ({used:g} used, "
                f"{reserved:g} reserved by other searches). Lower the budget, cancel a search, or "
                "wait until midnight UTC.",
                field=BUDGET_FIELD,
                code="quota_exhausted",
                retry_after_s=(_midnight(at) + timedelta(days=1) - at).total_seconds(),
            )


def admit_run(connection: sa.Connection, limit: OpenRunsLimit) -> None:
    """Raise LimitError `cluster_full` if the cluster already has its maximum number of open runs.

    The lock is held until the transaction ends, so runs are admitted one at a time.
    """
    if connection.dialect.name == "postgresql":
        connection.execute(
            sa.select(sa.func.pg_advisory_xact_lock(RUNS_LOCK, sa.func.hashtext(limit.cluster)))
        )
    if count_open_runs_on(connection, limit.cluster) >= limit.runs:
        raise LimitError(
            f"Cluster {limit.cluster} already has {limit.runs} open runs, its limit.",
            field="cluster",
            code="cluster_full",
            retry_after_s=CLUSTER_FULL_RETRY_S,
        )


def count_open_runs_on(connection: sa.Connection, cluster: str) -> int:
    """Return the number of open runs on a cluster, counting only unfinished searches.

    A failed search may leave open runs behind, which do not count.
    """
    return int(connection.execute(OPEN_RUNS_ON, {"cluster": cluster}).scalar_one())


def used_today(
    connection: sa.Connection, *, at: datetime, api_key_id: str | None, cluster: str | None = None
) -> float:
    """Return the GPU-seconds used by runs that ended since midnight UTC."""
    query = sa.select(GPU_SECONDS).where(RUN.c.finished_at >= _midnight(at))
    if api_key_id is not ANY_KEY or cluster is not None:
        query = query.join_from(RUN, SEARCH, SEARCH.c.id == RUN.c.search_id)
    if api_key_id is not ANY_KEY:
        query = query.where(SEARCH.c.api_key_id == api_key_id)
    if cluster is not None:
        query = query.where(names_cluster(cluster))
    return float(connection.execute(query).scalar_one())


def names_cluster(name: str | sa.BindParameter[str]) -> sa.ColumnElement[bool]:
    """Return the condition that a query names this cluster, directly or as a node type."""
    cluster = SEARCH.c.query["cluster"]
    return sa.or_(
        cluster.as_string() == name, SEARCH.c.query[("cluster", "node_type")].as_string() == name
    )


OPEN_RUNS_ON = (
    sa.select(sa.func.count())
    .select_from(RUN)
    .join(SEARCH, SEARCH.c.id == RUN.c.search_id)
    .where(
        RUN.c.state.in_(OPEN_RUN),
        SEARCH.c.state.in_(OPEN),
        names_cluster(sa.bindparam("cluster", type_=sa.String)),
    )
)


def reserved_by_open_searches(
    connection: sa.Connection, *, api_key_id: str | None, cluster: str | None = None
) -> float:
    """Return the GPU-seconds that unfinished searches may still use.

    Searches without a budget, such as those started on the command line, reserve nothing.
    """
    of_runs = sa.select(GPU_SECONDS).where(RUN.c.search_id == SEARCH.c.id)
    query = sa.select(SEARCH.c.query, of_runs.scalar_subquery()).where(SEARCH.c.state.in_(OPEN))
    if api_key_id is not ANY_KEY:
        query = query.where(SEARCH.c.api_key_id == api_key_id)
    if cluster is not None:
        query = query.where(names_cluster(cluster))
    remaining = (
        gpu_seconds_budget(stored) - float(spent) for stored, spent in connection.execute(query)
    )
    return sum(max(seconds, 0.0) for seconds in remaining)


def gpu_seconds_budget(query: JsonObject) -> float:
    """Return the GPU-second budget of a stored query; 0 if it has none."""
    return float((query.get("search") or {}).get("budget_gpu_seconds") or 0.0)


def _midnight(at: datetime) -> datetime:
    return at.replace(hour=0, minute=0, second=0, microsecond=0)
