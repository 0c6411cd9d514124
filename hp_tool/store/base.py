"""What every part of the store stands on: transactions, the clock, searches under their lease,
events, idempotency keys.
"""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import fields
from datetime import UTC, datetime, timedelta
from enum import StrEnum
from functools import lru_cache
from typing import Any, TypeVar

import sqlalchemy as sa
from sqlalchemy.dialects import postgresql, sqlite

from hp_tool.domain.records import (
    EventRecord,
    JsonObject,
    Label,
    Lease,
    RunState,
    SearchRecord,
    SearchState,
)
from hp_tool.errors import ConflictError, InputError, NotFoundError, StoreError
from hp_tool.store import tables
from hp_tool.store.columns import row_dict
from hp_tool.store.engine import LASTING, WRITES

SEARCH = tables.searches
# What is asked again and again is built once: building a statement takes three times as long as
# SQLite takes over it.
ID: sa.BindParameter[str] = sa.bindparam("its_id")
ONE_SEARCH = sa.select(SEARCH).where(SEARCH.c.id == ID)
LOCKED = ONE_SEARCH.with_for_update()
CHANGED = sa.update(SEARCH).where(SEARCH.c.id == ID)
STILL_LEASED = (
    SEARCH.c.state == SearchState.RUNNING,
    SEARCH.c.lease_token == sa.bindparam("token"),
    SEARCH.c.lease_holder == sa.bindparam("holder"),
)
"""The holder too: a database that was restored from a backup hands out the same tokens again."""
LEASED = CHANGED.where(*STILL_LEASED).returning(SEARCH)
NEXT_EVENT = CHANGED.values(last_event=SEARCH.c.last_event + 1).returning(SEARCH.c.last_event)
NEW_EVENT = sa.insert(tables.events)
CLOCK_SLACK = timedelta(seconds=5)
"""How far a clock may be set back, as time services do all day, without a lease being taken for one
of the future.
"""
OPEN, ENDED = (
    tuple(state for state in SearchState if state.ended is ended) for ended in (False, True)
)
OPEN_RUN = tuple(state for state in RunState if not state.ended)
SEARCH_FIELDS = {field.name for field in fields(SearchRecord)}
GPU_SECONDS = sa.func.coalesce(sa.func.sum(tables.runs.c.gpu_seconds), 0.0)
SPENT = sa.select(GPU_SECONDS).where(tables.runs.c.search_id == ID)
READ_ONLY = "give this user the right to write the file and its folder, or use the primary server"
FULL = "make room on the database's disk"
BUSY = "something uses the table for long, such as a dump: wait for its end, then do it again"
FIXES = {
    **dict.fromkeys(("readonly database", "read-only transaction"), READ_ONLY),
    **dict.fromkeys(("disk is full", "No space left"), FULL),
    "lock timeout": BUSY,
}
"""What to do about an error of the driver, by words of it."""
States = TypeVar("States", bound=StrEnum)


class StoreBase:
    """An engine and the transactions on it."""

    def __init__(self, *, engine: sa.Engine) -> None:
        self._engine = engine

    def _reading(self) -> AbstractContextManager[sa.Connection]:
        return transaction(self._engine)

    def _writing(self, *, lasting: bool = True) -> AbstractContextManager[sa.Connection]:
        return writing(self._engine, lasting=lasting)


@contextmanager
def transaction(engine: sa.Engine) -> Iterator[sa.Connection]:
    """A transaction, by default for reading; the driver's errors come out as StoreError."""
    with translated_errors(engine), engine.begin() as connection:
        yield connection


def writing(engine: sa.Engine, *, lasting: bool = True) -> AbstractContextManager[sa.Connection]:
    """A transaction that may write; `lasting`: what was committed survives a power cut (on
    PostgreSQL all does).
    """
    return transaction(engine.execution_options(**{WRITES: True, LASTING: lasting}))


@contextmanager
def translated_errors(engine: sa.Engine) -> Iterator[None]:
    """Turn the driver's errors into a StoreError that names the database without its password and
    repeats no parameters.
    """
    try:
        yield
    except sa.exc.IntegrityError:
        raise  # the database works; we broke one of its rules
    except (sa.exc.DBAPIError, sa.exc.TimeoutError) as error:
        cause = getattr(error, "orig", None) or error
        first_line = (str(cause).splitlines() or [type(cause).__name__])[0]
        fix = next((f"; {fix}" for sign, fix in FIXES.items() if sign in first_line), "")
        raise StoreError(
            f"database {engine.url.render_as_string(hide_password=True)}: {first_line}{fix}"
        ) from error


CONNECTION_LOST = "8s2b"
"""SQLAlchemy's code of a transaction that lost its connection; one that an error of ours broke has
another.
"""


def is_the_drivers(error: BaseException | None) -> bool:
    """Whether an error of other code on the same database, such as Optuna's, was caused by the
    driver's, or by going on with a transaction whose connection was lost.
    """
    while error is not None and not isinstance(error, sa.exc.DBAPIError | sa.exc.TimeoutError):
        if isinstance(error, sa.exc.PendingRollbackError) and error.code == CONNECTION_LOST:
            return True
        error = error.__cause__
    return error is not None


def now(connection: sa.Connection) -> datetime:
    """The database's clock, which judges leases. SQLite runs inside its users, all on one host, so
    its clock is ours.
    """
    if connection.dialect.name == "sqlite":
        return datetime.now(UTC)
    instant: datetime = connection.execute(sa.select(sa.func.clock_timestamp())).scalar_one()
    return instant.astimezone(UTC)


def row_by_id(
    connection: sa.Connection, query: sa.Select[Any], identifier: str, *, kind: str
) -> sa.Row[Any]:
    """The one row of `query`, which asks for what has the id `ID`; NotFoundError says that there is
    none of its kind.
    """
    row = connection.execute(query, {ID.key: identifier}).one_or_none()
    if row is None:
        raise NotFoundError(f"no {kind} {identifier!r}", field=f"{kind}_id")
    return row


def counts(
    connection: sa.Connection, column: sa.Column[Any], states: type[States]
) -> dict[States, int]:
    """How many rows have each of the states, zeros included."""
    rows = connection.execute(sa.select(column, sa.func.count()).group_by(column))
    counted: dict[str, int] = dict(map(tuple, rows))
    return {state: counted.get(state, 0) for state in states}


def locked_search(connection: sa.Connection, search_id: str) -> sa.Row[Any]:
    """A search's row, locked until this transaction ends (on SQLite, one transaction writes at a
    time).
    """
    return row_by_id(connection, LOCKED, search_id, kind="search")


def leased_search(connection: sa.Connection, lease: Lease) -> sa.Row[Any]:
    """The locked row of a search that `lease` still coordinates. Raises ConflictError `lease_lost`
    for an outdated lease.
    """
    row = locked_search(connection, lease.search_id)
    if row.state != SearchState.RUNNING or (row.lease_token, row.lease_holder) != (
        lease.token,
        lease.holder,
    ):
        raise ConflictError(
            f"search {lease.search_id} is no longer coordinated by {lease.holder} (token "
            f"{lease.token}): "
            f"it is {row.state}, token {row.lease_token}",
            code="lease_lost",
        )
    return row


def update_leased(connection: sa.Connection, lease: Lease, **values: Any) -> sa.Row[Any]:
    """Change a search that `lease` still coordinates, in one statement, without an event; its row
    as it is now. Raises ConflictError as `leased_search`.
    """
    changes = {ID.key: lease.search_id, "token": lease.token, "holder": lease.holder, **values}
    row = connection.execute(LEASED, changes).one_or_none()
    return leased_search(connection, lease) if row is None else row  # which raises


def add_event(
    connection: sa.Connection,
    *,
    search_id: str,
    kind: str,
    payload: JsonObject,
    at: datetime,
    **values: Any,
) -> EventRecord:
    """Append to a search's log, and change `values` of the search. The counter in the search's
    locked row keeps `seq` without gaps and in commit order.
    """
    changes = {ID.key: search_id, "updated_at": at, **values}
    seq = connection.execute(NEXT_EVENT, changes).scalar_one()
    event = EventRecord(search_id=search_id, seq=seq, kind=kind, payload=payload, at=at)
    connection.execute(
        NEW_EVENT, {field.name: getattr(event, field.name) for field in fields(EventRecord)}
    )
    return event


def checked(table: sa.Table, values: dict[str, Any]) -> dict[str, Any]:
    """`values`. Raises InputError for text that a column cannot hold (SQLite would accept it,
    PostgreSQL would fail).
    """
    for name, value in values.items():
        if not isinstance(value, str):
            continue
        length = getattr(table.c[name].type, "length", None)
        if length is not None and len(value) > length:
            raise InputError(
                f"{name} has {len(value)} characters; it may have {length}", field=name
            )
        if "\0" in value:
            raise InputError(f"{name} holds a NUL character", field=name)
    return values


def insert_if_new(connection: sa.Connection, table: sa.Table, values: dict[str, Any]) -> bool:
    """Insert unless a unique key forbids it; a concurrent insert of the same key is waited for.
    True: inserted.
    """
    statement = _insert_if_new(connection.dialect.name, table)
    return connection.execute(statement, checked(table, values)).first() is not None


@lru_cache(maxsize=64)
def _insert_if_new(dialect: str, table: sa.Table) -> sa.Executable:
    insert = postgresql.insert if dialect == "postgresql" else sqlite.insert
    return insert(table).on_conflict_do_nothing().returning(sa.literal(1))


def first_use(
    connection: sa.Connection,
    *,
    scope: str,
    owner: str | None,
    key: str | None,
    fingerprint: str,
    resource_id: str,
    at: datetime,
) -> str:
    """The resource id of an idempotency key: `resource_id` at its first use, and the first one's id
    at later uses.

    Raises ConflictError if the key was used with another request.
    """
    if key is None:
        return resource_id
    table = tables.idempotency_keys
    same_key = {"scope": scope, "owner": owner or "", "key": key}
    new = {**same_key, "fingerprint": fingerprint, "resource_id": resource_id, "created_at": at}
    if insert_if_new(connection, table, new):
        return resource_id
    first = earlier_use(
        connection, scope=scope, owner=owner, key=key, is_its=lambda used, _: used == fingerprint
    )
    assert first is not None
    return first


def earlier_use(
    connection: sa.Connection,
    *,
    scope: str,
    owner: str | None,
    key: str,
    is_its: Callable[[str, str], bool],
) -> str | None:
    """The resource id of an idempotency key that was used; None of a new one.

    `is_its`: whether a fingerprint, with the id of the resource made then, is this request's.
    Raises ConflictError if the key was used with another request.
    """
    table = tables.idempotency_keys
    first = connection.execute(
        sa.select(table).filter_by(scope=scope, owner=owner or "", key=key)
    ).one_or_none()
    if first is None:
        return None
    if not is_its(first.fingerprint, first.resource_id):
        raise ConflictError(
            "this idempotency key was used with another request",
            field="Idempotency-Key",
            code="idempotency_key_reused",
        )
    return str(first.resource_id)


def as_earlier_editions(expanded: Any, *, request: Any, stored: Any) -> list[Any]:
    """Return a request as earlier editions may have expanded, and so fingerprinted, it.

    They knew the fields that are in `stored`, at every depth. A field that the request does not
    state had the value that was stored; or today's default, if the stored value was changed later.

    Args:
        expanded: The request with today's defaults.
        request: The request as it was sent.
        stored: What was made of the request with this key.
    """
    return [
        _as_stored(expanded, request=request, stored=stored, keep_stored=keep)
        for keep in (True, False)
    ]


def _as_stored(expanded: Any, *, request: Any, stored: Any, keep_stored: bool) -> Any:
    if isinstance(expanded, dict) and isinstance(stored, dict):
        sent = request if isinstance(request, dict) else {}
        filled = {}
        for name, value in expanded.items():
            if name in sent or (name in stored and not keep_stored):
                kept = stored.get(name)
                filled[name] = _as_stored(
                    value, request=sent.get(name), stored=kept, keep_stored=keep_stored
                )
            elif name in stored:
                filled[name] = stored[name]
        return filled
    if isinstance(expanded, list) and isinstance(stored, list) and len(expanded) == len(stored):
        whole = isinstance(request, list) and len(request) == len(stored)
        triples = zip(expanded, request if whole else [None] * len(stored), stored, strict=True)
        return [
            _as_stored(value, request=each, stored=kept, keep_stored=keep_stored)
            for value, each, kept in triples
        ]
    return expanded


def search_record(row: sa.Row[Any]) -> SearchRecord:
    """A row of hp_searches, perhaps without its result, as a record."""
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
    """One search, or NotFoundError."""
    return search_record(row_by_id(connection, ONE_SEARCH, search_id, kind="search"))


def gpu_seconds_of(connection: sa.Connection, search_id: str) -> float:
    """What a search's runs have taken."""
    return float(connection.execute(SPENT, {ID.key: search_id}).scalar_one())


def update_search(
    connection: sa.Connection, search_id: str, *, at: datetime, **values: Any
) -> None:
    """Change a locked search, and append an event for a new state or request. One that ends shows
    what its runs took, whoever ends it.
    """
    if values.get("state") in ENDED and "progress" not in values:
        progress = connection.execute(
            sa.select(SEARCH.c.progress).where(SEARCH.c.id == search_id)
        ).scalar_one()
        if (spent := gpu_seconds_of(connection, search_id)) != progress.get("gpu_seconds", 0.0):
            values["progress"] = {**progress, "gpu_seconds": spent}
    values = checked(SEARCH, values)
    payload = {
        key: values[key]
        for key in ("state", "requested", "stopped_because")
        if values.get(key) is not None
    }
    if payload:
        add_event(connection, search_id=search_id, kind="state", payload=payload, at=at, **values)
    else:
        connection.execute(CHANGED, {ID.key: search_id, "updated_at": at, **values})


def open_runs(connection: sa.Connection, search_id: str) -> int:
    """How many runs of a search may have a job at the engine."""
    table = tables.runs
    unfinished = table.c.search_id == search_id, table.c.state.in_(OPEN_RUN)
    return connection.execute(sa.select(sa.func.count()).where(*unfinished)).scalar_one()
