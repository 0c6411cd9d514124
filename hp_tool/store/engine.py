"""From a URL to a SQLAlchemy engine set up for many writers."""

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
"""How long a writer waits for its turn on SQLite; a transaction of ours takes about a
millisecond.
"""
_LOOK_S = 0.002
ASLEEP_S = 30.0
"""How long a transaction on PostgreSQL may stand still: its process was stopped, or its host
sleeps, and others may wait for its rows.
"""
WRITES = "hp_writes"
"""Execution option: this transaction will write."""
LASTING = "hp_lasting"
"""Execution option: what it writes survives a power cut. What is written often and means little
after one does without.
"""


def parse_url(url: str) -> URL:
    """Check a URL and name the driver. InputError says what is expected, never the URL itself: it
    may hold a password.
    """
    expected = "expected sqlite:////absolute/path.sqlite3 or postgresql://user@host/database"
    try:
        parsed = make_url(url)
    except (sa.exc.ArgumentError, ValueError):
        raise InputError(
            f"the database URL cannot be read; {expected}", field=ENVIRONMENT_VARIABLE
        ) from None
    backend = parsed.get_backend_name()
    if backend == "sqlite":
        if parsed.database in (None, "", ":memory:"):
            raise InputError(
                f"an in-memory database cannot be shared between processes; {expected}",
                field=ENVIRONMENT_VARIABLE,
            )
        return parsed.set(drivername="sqlite")
    if backend in ("postgresql", "postgres"):
        return parsed.set(drivername="postgresql+psycopg")
    raise InputError(f"no support for {backend} databases; {expected}", field=ENVIRONMENT_VARIABLE)


def masked(url: str) -> str:
    """The URL for people and logs, without its password."""
    return parse_url(url).render_as_string(hide_password=True)


POSTGRESQL_OPTIONS = {"connect_timeout": 10, "client_encoding": "utf8"}
"""Options of every connection. The driver returns bytes instead of text from a database in
SQL_ASCII unless told otherwise.
"""


def create_engine(url: str, *, foreign_keys: bool = True) -> sa.Engine:
    """An engine with transactions that wait for each other instead of failing.

    foreign_keys=False is for migrations, which on SQLite rebuild tables. MissingExtraError without
    PostgreSQL's driver, StoreError where a SQLite file has no place.
    """
    parsed = parse_url(url)
    # A NaN in JSON would be accepted by SQLite and break every reader after it.
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
            f"the database's folder {folder} cannot be made: {error.strerror}; name another place "
            f"in {ENVIRONMENT_VARIABLE}"
        ) from None
    engine = connect(parsed, connect_args={"timeout": BUSY_TIMEOUT_S})
    _set_up_sqlite(engine, foreign_keys=foreign_keys)
    return engine


@contextmanager
def opened(url: str, *, foreign_keys: bool = True) -> Iterator[sa.Engine]:
    """An engine as `create_engine` makes it, which gives its connections back in the end."""
    engine = create_engine(url, foreign_keys=foreign_keys)
    try:
        yield engine
    finally:
        engine.dispose()


def _set_up_postgresql(engine: sa.Engine) -> None:
    @sa.event.listens_for(engine, "connect")
    def give_up_who_sleeps(connection: Any, _: object) -> None:
        connection.autocommit = True  # a setting made in a transaction ends with it
        connection.execute(f"SET idle_in_transaction_session_timeout = {round(1000 * ASLEEP_S)}")
        connection.autocommit = False


def _set_up_sqlite(engine: sa.Engine, *, foreign_keys: bool) -> None:
    file, turns = _SameFile(engine.url), threading.Lock()

    @sa.event.listens_for(engine, "do_connect")
    def make_file(*_: object) -> None:
        file.check()  # before SQLite makes an empty one
        file.make()

    @sa.event.listens_for(engine, "connect")
    def set_pragmas(connection: sqlite3.Connection, _: object) -> None:
        connection.isolation_level = None  # transactions begin below, not where the driver guesses
        if connection.execute("PRAGMA journal_mode").fetchone() != ("wal",):
            connection.execute(
                "PRAGMA journal_mode = WAL"
            )  # readers and the writer do not block each other
        connection.execute(f"PRAGMA foreign_keys = {'ON' if foreign_keys else 'OFF'}")
        file.remember()

    @sa.event.listens_for(engine, "begin")
    def begin(connection: sa.Connection) -> None:
        file.check()
        options = connection.get_execution_options()
        if options.get("isolation_level") == "AUTOCOMMIT":
            return
        if not options.get(WRITES, False):
            connection.exec_driver_sql("BEGIN")
            return
        # Either is safe against a crash of any process; FULL waits for the disk, with all that was
        # written before.
        connection.exec_driver_sql(
            f"PRAGMA synchronous = {'FULL' if options.get(LASTING, False) else 'NORMAL'}"
        )
        # A transaction that reads first and writes later fails at once when another wrote in
        # between, whatever the timeout. Taking the write lock at the start makes it wait its turn.
        _begin_to_write(connection, turns)


def _begin_to_write(connection: sa.Connection, turns: threading.Lock) -> None:
    """Begin as soon as nobody else writes, one thread of this process after the other.

    SQLite's own waiting looks ever more rarely, so that under load whoever waits longest is
    overtaken until its time is up.
    """
    raw = connection.connection.driver_connection
    assert isinstance(raw, sqlite3.Connection)
    deadline = time.monotonic() + BUSY_TIMEOUT_S
    my_turn = turns.acquire(timeout=BUSY_TIMEOUT_S)
    raw.execute("PRAGMA busy_timeout = 0")
    try:
        while time.monotonic() < deadline:
            try:
                raw.execute("BEGIN IMMEDIATE")
            except sqlite3.OperationalError as error:
                if error.sqlite_errorcode & 0xFF != sqlite3.SQLITE_BUSY:
                    break
                time.sleep(_LOOK_S)
            else:
                return
        connection.exec_driver_sql("BEGIN IMMEDIATE")  # whose error is the driver's own
    finally:
        raw.execute(f"PRAGMA busy_timeout = {round(1000 * BUSY_TIMEOUT_S)}")
        if my_turn:
            turns.release()


class _SameFile:
    """The file of a SQLite database: what is written into one that was deleted or replaced
    meanwhile is lost without a word.
    """

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
        """Make a new database for its owner's eyes alone, and so the files that SQLite lays beside
        it.
        """
        with suppress(OSError):  # it is there, or SQLite will say why not
            self._path.touch(mode=0o600, exist_ok=False)

    def remember(self) -> None:
        self._known = self._known or self._identity()

    def check(self) -> None:
        """Raises StoreError where it is not the file that was opened first."""
        if self._known is not None and self._identity() != self._known:
            raise StoreError(
                f"database {self._url.render_as_string(hide_password=True)}: its file was deleted "
                "or replaced while in use; "
                "put it back, or restart what uses it"
            )
