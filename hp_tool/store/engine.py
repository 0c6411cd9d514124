"""Create SQLAlchemy engines for many concurrent writers."""

import json
import sqlite3
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any

import sqlalchemy as sa
from sqlalchemy.engine import URL, make_url

from hp_tool.errors import InputError, StoreError
from hp_tool.extras import require

ENVIRONMENT_VARIABLE = "HP_DATABASE_URL"
BUSY_TIMEOUT_S = 30.0
"""Seconds that a writer waits for SQLite's write lock. A transaction takes about 1 ms."""
_POLL_INTERVAL_S = 0.002
IDLE_TRANSACTION_TIMEOUT_S = 30.0
"""Seconds after which PostgreSQL ends an idle transaction. Its process may be stopped, or its host
may be suspended, while other transactions wait for its rows.
"""
WRITES = "hp_writes"
"""Execution option that marks transactions that write."""
DURABLE = "hp_lasting"
"""Execution option for transactions whose commits must survive a power failure. Frequent,
unimportant writes omit it.
"""


def parse_url(url: str) -> URL:
    """Parse a database URL and set its driver.

    Raises:
        InputError: The URL is not supported. The message omits the URL, which may contain a
            password.
    """
    expected = "expected sqlite:////absolute/path.sqlite3 or postgresql://user@host/database"
    try:
        parsed = make_url(url)
    except (sa.exc.ArgumentError, ValueError):
        raise InputError(
            f"Cannot parse the database URL; {expected}.", field=ENVIRONMENT_VARIABLE
        ) from None
    backend = parsed.get_backend_name()
    if backend == "sqlite":
        if parsed.database in (None, "", ":memory:"):
            raise InputError(
                f"Processes cannot share an in-memory database; {expected}.",
                field=ENVIRONMENT_VARIABLE,
            )
        return parsed.set(drivername="sqlite")
    if backend in ("postgresql", "postgres"):
        return parsed.set(drivername="postgresql+psycopg")
    raise InputError(f"Unsupported database {backend}; {expected}.", field=ENVIRONMENT_VARIABLE)


def mask_password(url: str) -> str:
    """Return the URL without its password, for output and logs."""
    return parse_url(url).render_as_string(hide_password=True)


POSTGRESQL_OPTIONS = {"connect_timeout": 10, "client_encoding": "utf8"}
"""Connection options. Without client_encoding, an SQL_ASCII database returns bytes."""


def create_engine(url: str, *, foreign_keys: bool = True) -> sa.Engine:
    """Create an engine whose transactions wait for each other instead of failing.

    Args:
        url: Database URL.
        foreign_keys: Enforce foreign keys. False for migrations, which rebuild tables on SQLite.

    Raises:
        MissingExtraError: PostgreSQL's driver is not installed.
        StoreError: The folder of a SQLite file cannot be created.
    """
    parsed = parse_url(url)
    # SQLite would accept NaN in JSON, but every reader would then fail.
    connect = partial(
        sa.create_engine, json_serializer=partial(json.dumps, allow_nan=False), hide_parameters=True
    )
    if parsed.get_backend_name() == "postgresql":
        require("postgresql", by="PostgreSQL")
        engine = connect(parsed, pool_pre_ping=True, connect_args=POSTGRESQL_OPTIONS)
        _set_up_postgresql(engine)
        return engine
    folder = Path(parsed.database or "").parent
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise StoreError(
            f"Cannot create the database folder {folder}: {error.strerror}. Set "
            f"{ENVIRONMENT_VARIABLE} to another location."
        ) from None
    engine = connect(parsed, connect_args={"timeout": BUSY_TIMEOUT_S})
    _set_up_sqlite(engine, foreign_keys=foreign_keys)
    return engine


@contextmanager
def open_engine(url: str, *, foreign_keys: bool = True) -> Iterator[sa.Engine]:
    """Create an engine, and dispose of it when the context exits."""
    engine = create_engine(url, foreign_keys=foreign_keys)
    try:
        yield engine
    finally:
        engine.dispose()


def _set_up_postgresql(engine: sa.Engine) -> None:
    @sa.event.listens_for(engine, "connect")
    def end_idle_transactions(connection: Any, _: object) -> None:
        connection.autocommit = (
            True  # Outside a transaction, because a setting made in one ends with it.
        )
        connection.execute(
            f"SET idle_in_transaction_session_timeout = {round(1000 * IDLE_TRANSACTION_TIMEOUT_S)}"
        )
        connection.autocommit = False


def _set_up_sqlite(engine: sa.Engine, *, foreign_keys: bool) -> None:
    guard, turns = _FileGuard(engine.url), threading.Lock()

    @sa.event.listens_for(engine, "do_connect")
    def make_file(*_: object) -> None:
        guard.check()  # Create the file before SQLite does, which would let others read it.
        guard.make()

    @sa.event.listens_for(engine, "connect")
    def set_pragmas(connection: sqlite3.Connection, _: object) -> None:
        connection.isolation_level = None  # The listener of "begin" starts the transactions.
        if connection.execute("PRAGMA journal_mode").fetchone() != ("wal",):
            # In WAL mode, readers and the writer do not block each other.
            connection.execute("PRAGMA journal_mode = WAL")
        connection.execute(f"PRAGMA foreign_keys = {'ON' if foreign_keys else 'OFF'}")
        guard.remember()

    @sa.event.listens_for(engine, "begin")
    def begin(connection: sa.Connection) -> None:
        guard.check()
        options = connection.get_execution_options()
        if options.get("isolation_level") == "AUTOCOMMIT":
            return
        if not options.get(WRITES, False):
            connection.exec_driver_sql("BEGIN")
            return
        # Both modes survive a process crash; FULL also syncs this and all earlier writes to disk.
        connection.exec_driver_sql(
            f"PRAGMA synchronous = {'FULL' if options.get(DURABLE, False) else 'NORMAL'}"
        )
        # If a transaction reads first and writes later, it fails at once (regardless of the
        # timeout) when another one wrote in between. Taking the write lock at the start makes it
        # wait instead.
        _begin_to_write(connection, turns)


def _begin_to_write(connection: sa.Connection, turns: threading.Lock) -> None:
    """Take the write lock, one thread of this process at a time.

    SQLite's own busy handler polls at growing intervals. Under load, newer writers would overtake
    the longest-waiting one until it times out.
    """
    raw = connection.connection.driver_connection
    assert isinstance(raw, sqlite3.Connection)
    deadline = time.monotonic() + BUSY_TIMEOUT_S
    has_turn = turns.acquire(timeout=BUSY_TIMEOUT_S)
    raw.execute("PRAGMA busy_timeout = 0")
    try:
        while time.monotonic() < deadline:
            try:
                raw.execute("BEGIN IMMEDIATE")
            except sqlite3.OperationalError as error:
                if error.sqlite_errorcode & 0xFF != sqlite3.SQLITE_BUSY:
                    break
                time.sleep(_POLL_INTERVAL_S)
            else:
                return
        connection.exec_driver_sql("BEGIN IMMEDIATE")  # raises the driver's error
    finally:
        raw.execute(f"PRAGMA busy_timeout = {round(1000 * BUSY_TIMEOUT_S)}")
        if has_turn:
            turns.release()


class _FileGuard:
    """Detect that a SQLite file was deleted or replaced, after which writes would be lost."""

    def __init__(self, url: URL) -> None:
        self._url, self._path = url, Path(url.database or "").absolute()
        self._known: tuple[int, int] | None = None

    def _identity(self) -> tuple[int, int] | None:
        try:
            stat = self._path.stat()
        except OSError:
            return None
        return stat.st_dev, stat.st_ino

    def make(self) -> None:
        """Create the file with read permission for its owner only.

        SQLite's side files copy its mode.
        """
        with suppress(OSError):  # The file exists, or SQLite will report the error.
            self._path.touch(mode=0o600, exist_ok=False)

    def remember(self) -> None:
        self._known = self._known or self._identity()

    def check(self) -> None:
        """Raise StoreError if the file is not the one that was opened first."""
        if self._known is not None and self._identity() != self._known:
            raise StoreError(
                f"Database {self._url.render_as_string(hide_password=True)}: the file was deleted "
                "or replaced while in use. Restore it, or restart the processes that use it."
            )
