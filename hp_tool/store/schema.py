"""Schema version, migrations (in migrations/), and the state of a database."""

from __future__ import annotations

import fcntl
import os
import shutil
import time
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import sqlalchemy as sa

from hp_tool.domain.access import DatabaseState
from hp_tool.domain.webhooks import OVERDUE_S
from hp_tool.errors import OLDER_EDITION, StoreError
from hp_tool.store.base import now, transaction, translated_errors
from hp_tool.store.engine import DURABLE, WRITES, open_engine, parse_url
from hp_tool.store.tables import PREFIX, runs
from hp_tool.store.webhooks import HOOK, SEARCH, pending_webhooks

if TYPE_CHECKING:
    from alembic.config import Config

T = TypeVar("T")
HEAD = "0016"
"""Newest schema revision. It is repeated here so that opening a store does not import Alembic; a
test compares the two.
"""
OLDEST = "0016"
"""Oldest revision that can be upgraded: that of release 0.1.0."""
LAST_PREVIEW = "4fc00346"
"""Commit of the last preview version. It upgrades databases of earlier previews to OLDEST."""
UPGRADE_PREVIEW = (
    f"in a checkout, run `git worktree add --detach ../hp-tool-preview {LAST_PREVIEW} && pip "
    "install '../hp-tool-preview[search,postgresql]' && hp-tool db upgrade`, then install this "
    "version again"
)
VERSION_TABLE = "hp_alembic_version"
INSTALL = "install the newer version on this host and restart"
UPGRADE_LOCK = 0x68705F746F6F6C
"""PostgreSQL advisory lock that allows only one upgrade at a time."""
FOREIGN_TABLES_LOCK = UPGRADE_LOCK + 1
POLL_INTERVAL_S = 0.1
LOCK_TIMEOUT_S = 10.0
"""Seconds that a migration waits for a table lock. It is shorter than a lease, because other
transactions queue behind the migration.
"""
NAMES_PER_QUERY = 500


def current(url: str) -> str | None:
    """Return the database's revision; None without hp_tool's tables or without the SQLite file."""
    return read(url, revision)


def revision(connection: sa.Connection) -> str | None:
    """Return the schema revision of a connected database."""
    if not sa.inspect(connection).has_table(VERSION_TABLE):
        return None
    value = connection.execute(
        sa.text(f"SELECT version_num FROM {VERSION_TABLE}")  # noqa: S608
    ).scalar_one_or_none()
    return None if value is None else str(value)


def check_known(connection: sa.Connection) -> str | None:
    """Return the database's revision if this version supports it.

    Raises:
        StoreError: The schema was written by a newer hp-tool (`older_edition`) or by a preview
            (`preview_schema`).
    """
    current = revision(connection)
    if current is None or OLDEST <= current <= HEAD:
        return current
    if current > HEAD:
        raise StoreError(
            f"The database uses schema {current}, from a newer hp-tool (this one supports up to "
            f"{HEAD}): {INSTALL}",
            code=OLDER_EDITION,
        )
    raise StoreError(
        f"The database uses schema {current}, from a preview before 0.1.0: {UPGRADE_PREVIEW}",
        code="preview_schema",
    )


def upgrade(url: str) -> None:
    """Upgrade a database to the newest revision. Do nothing if it is up to date.

    Each migration runs in its own transaction. An interrupted upgrade continues where it stopped.

    Raises:
        StoreError: The schema was written by a newer hp-tool or by a preview.
    """
    with exclusive_access(url, lock=UPGRADE_LOCK):
        read(url, check_known)
        migrate(url)


@contextmanager
def exclusive_access(url: str, *, lock: int = FOREIGN_TABLES_LOCK) -> Iterator[None]:
    """Wait for exclusive access to the tables of hp_tool or of other tools in a database.

    Args:
        url: Database URL.
        lock: FOREIGN_TABLES_LOCK for the tables of other tools, UPGRADE_LOCK for hp_tool's.
    """
    with open_engine(url) as engine:
        if engine.dialect.name == "postgresql":
            # Use a session lock, because a transaction that idles this long would be ended.
            with transaction(engine.execution_options(isolation_level="AUTOCOMMIT")) as connection:
                # Poll, because CREATE INDEX CONCURRENTLY would wait for a blocked statement.
                while not connection.execute(
                    sa.select(sa.func.pg_try_advisory_lock(lock))
                ).scalar_one():
                    time.sleep(POLL_INTERVAL_S)
                yield
            return
        # Lock the folder. Holding the database file in a transaction would block every writer.
        folder = os.open(Path(engine.url.database or "").absolute().parent, os.O_RDONLY)
        try:
            fcntl.flock(folder, fcntl.LOCK_EX)
            yield
        finally:
            os.close(folder)


def migrate(url: str) -> None:
    """Run all pending migrations. The caller must hold UPGRADE_LOCK."""
    from alembic import command

    # Foreign keys off: SQLite rebuilds tables to change them.
    with (
        open_engine(url, foreign_keys=False) as engine,
        translated_errors(engine),
        _migration_connection(engine) as connection,
    ):
        config = alembic_config()
        config.attributes["connection"] = connection
        command.upgrade(config, "head")


@contextmanager
def _migration_connection(engine: sa.Engine) -> Iterator[sa.Connection]:
    with engine.execution_options(**{WRITES: True, DURABLE: True}).connect() as connection:
        if connection.dialect.name == "postgresql":
            connection.execute(sa.text(f"SET lock_timeout = {round(1000 * LOCK_TIMEOUT_S)}"))
            connection.commit()
        yield connection


def alembic_config() -> Config:
    """Return Alembic's configuration.

    It is built in code, because an installed package has no ini file.
    """
    from alembic.config import Config

    config = Config()
    config.set_main_option("script_location", str(migrations_folder()).replace("%", "%%"))
    config.set_main_option("path_separator", "os")
    return config


def migrations_folder() -> Path:
    """Return the migrations folder, which is in the package or at the top of the checkout."""
    installed = Path(__file__).parent / "migrations"
    return installed if installed.is_dir() else Path(__file__).parents[2] / "migrations"


def is_hp_table(name: str | None, kind: str, _: Any) -> bool:
    """Return True for hp_tool's tables. Alembic calls it as include_name to ignore other tables."""
    return kind != "table" or (
        name is not None and name.startswith(PREFIX) and name != VERSION_TABLE
    )


def probe(url: str) -> DatabaseState | None:
    """Return the state of the database at a URL; None if the SQLite file does not exist."""
    return read(url, state_of)


def read(url: str, read: Callable[[sa.Connection], T]) -> T | None:
    """Call `read` with a connection in a transaction.

    Return None if the SQLite file does not exist.

    Raises:
        StoreError: The database does not respond.
        InputError: The URL cannot be parsed.
    """
    parsed = parse_url(url)
    if parsed.get_backend_name() == "sqlite" and not Path(parsed.database or "").is_file():
        return None
    with open_engine(url) as engine, transaction(engine) as connection:
        return read(connection)


def unknown_jobs(url: str, job_names: Collection[str]) -> list[str]:
    """Return the names of jobs that have no run in the database, sorted; [] without a database."""
    stored_names = sa.select(runs.c.job_name).where(
        runs.c.job_name.in_(sa.bindparam("names", expanding=True))
    )

    def look_up(connection: sa.Connection) -> list[str]:
        if revision(connection) is None:
            return []
        names, unknown = sorted(job_names), list[str]()
        for start in range(0, len(names), NAMES_PER_QUERY):
            batch = names[start : start + NAMES_PER_QUERY]
            stored = set(connection.scalars(stored_names, {"names": batch}))
            unknown += [name for name in batch if name not in stored]
        return unknown

    return read(url, look_up) or []


def state_of(connection: sa.Connection) -> DatabaseState:
    """Return the state of a connected database."""
    asked_at = datetime.now(UTC)
    offset = now(connection) - asked_at
    return DatabaseState(
        revision=revision(connection),
        needed_revision=HEAD,
        clock_offset_s=offset.total_seconds(),
        read_only=_read_only(connection),
        free_bytes=_free_bytes(connection),
        overdue_webhooks=_overdue_webhooks(connection),
    )


def _overdue_webhooks(connection: sa.Connection) -> int:
    # The database has no schema, or a preview's schema.
    if not sa.inspect(connection).has_table(HOOK.name):
        return 0
    # A first attempt is due when the search ends, although its `next_attempt_at` is the submission
    # time.
    overdue_since = now(connection) - timedelta(seconds=OVERDUE_S)
    late = HOOK.c.next_attempt_at <= overdue_since, SEARCH.c.finished_at <= overdue_since
    number: int = connection.execute(pending_webhooks(sa.func.count()).where(*late)).scalar_one()
    return number


def _free_bytes(connection: sa.Connection) -> int | None:
    if connection.dialect.name == "postgresql":
        return None
    return shutil.disk_usage(Path(connection.engine.url.database or "").absolute().parent).free


def _read_only(connection: sa.Connection) -> bool:
    """Return True if writes would fail: on a standby server, or without write permission."""
    if connection.dialect.name == "postgresql":
        answer: str = connection.execute(sa.text("SHOW transaction_read_only")).scalar_one()
        return answer == "on"
    file = Path(connection.engine.url.database or "")
    # WAL also needs to write to the folder.
    return not (os.access(file, os.W_OK) and os.access(file.parent, os.W_OK))
