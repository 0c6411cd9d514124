"""Base class of the store: transactions, the database's clock, leases, events, idempotency."""

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import fields
from datetime import UTC, datetime, timedelta
from enum import StrEnum
from functools import lru_cache
from typing import Any, TypeVar

import sqlalchemy as sa
from sqlalchemy.dialects import postgresql, sqlite

from hp_tool.domain.records import EventRecord, JsonObject, Label, Lease, SearchRecord
from hp_tool.domain.states import RunState, SearchState
from hp_tool.errors import ConflictError, InputError, NotFoundError, StoreError
from hp_tool.store import tables
from hp_tool.store.columns import row_dict
from hp_tool.store.engine import DURABLE, WRITES

SEARCH = tables.searches
# Statements on hot paths are built only once. Building one takes three times as long as SQLite
# takes to execute it.
ID: sa.BindParameter[str] = sa.bindparam("its_id")
ONE_SEARCH = sa.select(SEARCH).where(SEARCH.c.id == ID)
LOCKED = ONE_SEARCH.with_for_update()
CHANGED = sa.update(SEARCH).where(SEARCH.c.id == ID)
STILL_LEASED = (
    SEARCH.c.state == SearchState.RUNNING,
    SEARCH.c.lease_token == sa.bindparam("token"),
    SEARCH.c.lease_holder == sa.bindparam("holder"),
)
"""Condition that a lease is still valid. It compares the holder as well as the token, because a
database restored from a backup issues the same tokens again.
"""
LEASED = CHANGED.where(*STILL_LEASED).returning(SEARCH)
NEXT_EVENT = CHANGED.values(last_event=SEARCH.c.last_event + 1).returning(SEARCH.c.last_event)
NEW_EVENT = sa.insert(tables.events)
CLOCK_SLACK = timedelta(seconds=5)
"""Tolerated backward change of the clock: stored times may be this far in the future."""
OPEN, ENDED = (
    tuple(state for state in SearchState if state.ended is ended) for ended in (False, True)
)
OPEN_RUN = tuple(state for state in RunState if not state.ended)
SEARCH_FIELDS = {field.name for field in fields(SearchRecord)}
GPU_SECONDS = sa.func.coalesce(sa.func.sum(tables.runs.c.gpu_seconds), 0.0)
SPENT = sa.select(GPU_SECONDS).where(tables.runs.c.search_id == ID)
READ_ONLY_FIX = "give this user write access to the file and its folder, or use the primary server"
DISK_FULL_FIX = "free space on the database's disk"
LOCKED_FIX = "another client, such as a dump, locks the table: retry when it has finished"
FIXES = {
    **dict.fromkeys(("readonly database", "read-only transaction"), READ_ONLY_FIX),
    **dict.fromkeys(("disk is full", "No space left"), DISK_FULL_FIX),
    "lock timeout": LOCKED_FIX,
}
"""Suggested fix by a phrase in the database driver's error message."""
States = TypeVar("States", bound=StrEnum)


class StoreBase:
    """A database engine and its transactions."""

    def __init__(self, *, engine: sa.Engine) -> None:
        self._engine = engine

    def _reading(self) -> AbstractContextManager[sa.Connection]:
        return transaction(self._engine)

    def _writing(self, *, durable: bool = True) -> AbstractContextManager[sa.Connection]:
        return write_transaction(self._engine, durable=durable)


@contextmanager
def transaction(engine: sa.Engine) -> Iterator[sa.Connection]:
    """Begin a transaction, read-only by default. Convert driver errors to StoreError."""
    with translated_errors(engine), engine.begin() as connection:
        yield connection


def write_transaction(
    engine: sa.Engine, *, durable: bool = True
) -> AbstractContextManager[sa.Connection]:
    """Begin a transaction that may write.

    Args:
        engine: Engine of the database.
        durable: Make commits survive a power failure. On PostgreSQL they always do.
    """
    return transaction(engine.execution_options(**{WRITES: True, DURABLE: durable}))


@contextmanager
def translated_errors(engine: sa.Engine) -> Iterator[None]:
    """Convert driver errors to a StoreError.

    Its message has neither the password nor the statement's parameters.
    """
    try:
        yield
    except sa.exc.IntegrityError:
        raise  # a bug of hp-tool, not a failure of the database
    except (sa.exc.DBAPIError, sa.exc.TimeoutError) as error:
        cause = getattr(error, "orig", None) or error
        first_line = (str(cause).splitlines() or [type(cause).__name__])[0]
        fix = next((f"; {fix}" for sign, fix in FIXES.items() if sign in first_line), "")
        raise StoreError(
            f"database {engine.url.render_as_string(hide_password=True)}: {first_line}{fix}"
        ) from error


CONNECTION_LOST = "8s2b"
"""SQLAlchemy's error code for a transaction that lost its connection. Transactions broken by other
errors have another code.
"""


def is_driver_error(error: BaseException | None) -> bool:
    """Return True if a database driver's error caused `error`.

    `error` itself may come from other code, such as Optuna. Using a transaction whose connection
    was lost also counts.
    """
    while error is not None and not isinstance(error, sa.exc.DBAPIError | sa.exc.TimeoutError):
        if isinstance(error, sa.exc.PendingRollbackError) and error.code == CONNECTION_LOST:
            return True
        error = error.__cause__
    return error is not None


def now(connection: sa.Connection) -> datetime:
    """Return the database's time, which determines when leases expire.

    SQLite has no server, so this is the clock of this host.
    """
    if connection.dialect.name == "sqlite":
        return datetime.now(UTC)
    instant: datetime = connection.execute(sa.select(sa.func.clock_timestamp())).scalar_one()
    return instant.astimezone(UTC)


def row_by_id(
    connection: sa.Connection, query: sa.Select[Any], identifier: str, *, kind: str
) -> sa.Row[Any]:
    """Return the row selected by a query with the parameter `ID`.

    Raise NotFoundError if there is none.
    """
    row = connection.execute(query, {ID.key: identifier}).one_or_none()
    if row is None:
        raise NotFoundError(f"No {kind} {identifier!r}.", field=f"{kind}_id")
    return row


def count_by_state(
    connection: sa.Connection, column: sa.Column[Any], states: type[States]
) -> dict[States, int]:
    """Return the number of rows in each state; 0 for states without rows."""
    rows = connection.execute(sa.select(column, sa.func.count()).group_by(column))
    counted: dict[str, int] = dict(map(tuple, rows))
    return {state: counted.get(state, 0) for state in states}


def locked_search(connection: sa.Connection, search_id: str) -> sa.Row[Any]:
    """Return a search's row, locked until the transaction ends.

    SQLite needs no lock: it has one writer.
    """
    return row_by_id(connection, LOCKED, search_id, kind="search")


def leased_search(connection: sa.Connection, lease: Lease) -> sa.Row[Any]:
    """Return the locked row of the search that `lease` coordinates.

    Raises:
        ConflictError: The lease is no longer valid (`lease_lost`).
    """
    row = locked_search(connection, lease.search_id)
    if row.state != SearchState.RUNNING or (row.lease_token, row.lease_holder) != (
        lease.token,
        lease.holder,
    ):
        raise ConflictError(
            f"{lease.holder} no longer coordinates search {lease.search_id}: its token is "
            f"{lease.token}, the search is {row.state} with token {row.lease_token}.",
            code="lease_lost",
        )
    return row


def update_leased(connection: sa.Connection, lease: Lease, **values: Any) -> sa.Row[Any]:
    """Update the search that `lease` coordinates, in one statement and without an event.

    Returns:
        The updated row.

    Raises:
        ConflictError: The lease is no longer valid (`lease_lost`).
    """
    changes = {ID.key: lease.search_id, "token": lease.token, "holder": lease.holder, **values}
    row = connection.execute(LEASED, changes).one_or_none()
    return leased_search(connection, lease) if row is None else row  # raises ConflictError


def add_event(
    connection: sa.Connection,
    *,
    search_id: str,
    kind: str,
    payload: JsonObject,
    at: datetime,
    **values: Any,
) -> EventRecord:
    """Append an event to a search's log, and set `values` in the search's row.

    The event counter is in that row, which is locked, so `seq` has no gaps and follows the commit
    order.
    """
    changes = {ID.key: search_id, "updated_at": at, **values}
    seq = connection.execute(NEXT_EVENT, changes).scalar_one()
    event = EventRecord(search_id=search_id, seq=seq, kind=kind, payload=payload, at=at)
    connection.execute(
        NEW_EVENT, {field.name: getattr(event, field.name) for field in fields(EventRecord)}
    )
    return event


def storable_values(table: sa.Table, values: dict[str, Any]) -> dict[str, Any]:
    """Return `values`. Raise InputError for text that a column cannot store.

    SQLite would accept such text, but PostgreSQL would fail.
    """
    for name, value in values.items():
        if not isinstance(value, str):
            continue
        length = getattr(table.c[name].type, "length", None)
        if length is not None and len(value) > length:
            raise InputError(
                f"{name} has {len(value)} characters. The limit is {length}.", field=name
            )
        if "\0" in value:
            raise InputError(f"{name} contains a NUL character. Remove it.", field=name)
    return values


def insert_if_new(connection: sa.Connection, table: sa.Table, values: dict[str, Any]) -> bool:
    """Insert a row unless its unique key exists. Return True if it was inserted.

    The call waits for concurrent inserts of the same key.
    """
    statement = _insert_if_new(connection.dialect.name, table)
    return connection.execute(statement, storable_values(table, values)).first() is not None


@lru_cache(maxsize=64)
def _insert_if_new(dialect: str, table: sa.Table) -> sa.Executable:
    insert = postgresql.insert if dialect == "postgresql" else sqlite.insert
    return insert(table).on_conflict_do_nothing().returning(sa.literal(1))


def first_resource_id(
    connection: sa.Connection,
    *,
    scope: str,
    owner: str | None,
    key: str | None,
    fingerprint: str,
    resource_id: str,
    at: datetime,
) -> str:
    """Return the id of the resource that was created first with an idempotency key.

    Without a key, or when it is new, this is `resource_id`.

    Raises:
        ConflictError: The key was used for a different request.
    """
    if key is None:
        return resource_id
    table = tables.idempotency_keys
    same_key = {"scope": scope, "owner": owner or "", "key": key}
    new = {**same_key, "fingerprint": fingerprint, "resource_id": resource_id, "created_at": at}
    if insert_if_new(connection, table, new):
        return resource_id
    first = earlier_resource_id(
        connection, scope=scope, owner=owner, key=key, fingerprint=fingerprint
    )
    assert first is not None
    return first


def earlier_resource_id(
    connection: sa.Connection, *, scope: str, owner: str | None, key: str, fingerprint: str
) -> str | None:
    """Return the id of the resource created with an idempotency key; None if the key is new.

    Raises:
        ConflictError: The key was used for a different request.
    """
    table = tables.idempotency_keys
    first = connection.execute(
        sa.select(table).filter_by(scope=scope, owner=owner or "", key=key)
    ).one_or_none()
    if first is None:
        return None
    if first.fingerprint != fingerprint:
        raise ConflictError(
            "This idempotency key was used for a different request. Use a new key.",
            field="Idempotency-Key",
            code="idempotency_key_reused",
        )
    return str(first.resource_id)


def search_record(row: sa.Row[Any]) -> SearchRecord:
    """Convert a row of hp_searches to a record. The result column is optional."""
    values = {name: value for name, value in row_dict(row).items() if name in SEARCH_FIELDS}
    lease = None
    if row.state == SearchState.RUNNING:
        lease = Lease(
            search_id=row.id,
            holder=row.lease_holder,
            token=row.lease_token,
            expires_at=row.lease_expires_at,
            heartbeat_at=row.heartbeat_at,
        )
    label = Label(**row.label | {"tags": tuple(row.label["tags"])}) if row.label else Label()
    return SearchRecord(
        **values | {"state": SearchState(row.state), "lease": lease, "label": label}
    )


def read_search(connection: sa.Connection, search_id: str) -> SearchRecord:
    """Return a search. Raise NotFoundError if it does not exist."""
    return search_record(row_by_id(connection, ONE_SEARCH, search_id, kind="search"))


def gpu_seconds_of(connection: sa.Connection, search_id: str) -> float:
    """Return the GPU-seconds used by a search's runs."""
    return float(connection.execute(SPENT, {ID.key: search_id}).scalar_one())


def update_search(
    connection: sa.Connection, search_id: str, *, at: datetime, **values: Any
) -> None:
    """Update a locked search. Append an event if its state or requested action changes.

    When a search ends, its progress is set to the GPU-seconds that its runs used.
    """
    if values.get("state") in ENDED and "progress" not in values:
        progress = connection.execute(
            sa.select(SEARCH.c.progress).where(SEARCH.c.id == search_id)
        ).scalar_one()
        if (spent := gpu_seconds_of(connection, search_id)) != progress.get("gpu_seconds", 0.0):
            values["progress"] = {**progress, "gpu_seconds": spent}
    values = storable_values(SEARCH, values)
    payload = {
        key: values[key]
        for key in ("state", "requested", "stopped_because")
        if values.get(key) is not None
    }
    if payload:
        add_event(connection, search_id=search_id, kind="state", payload=payload, at=at, **values)
    else:
        connection.execute(CHANGED, {ID.key: search_id, "updated_at": at, **values})


def count_open_runs(connection: sa.Connection, search_id: str) -> int:
    """Return the number of a search's runs whose job may still exist on the cluster."""
    table = tables.runs
    unfinished = table.c.search_id == search_id, table.c.state.in_(OPEN_RUN)
    return connection.execute(sa.select(sa.func.count()).where(*unfinished)).scalar_one()
