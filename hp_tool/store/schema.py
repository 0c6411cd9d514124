"""The schema's version, how it gets the newest (Alembic's scripts in migrations/), and what state a
database is in.
"""

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
from hp_tool.store.engine import LASTING, WRITES, opened, parse_url
from hp_tool.store.tables import PREFIX, runs
from hp_tool.store.webhooks import HOOK, SEARCH, untold

if TYPE_CHECKING:
    from alembic.config import Config

T = TypeVar("T")
HEAD = "0016"
"""The newest revision of the schema, repeated here so that opening a store need not load Alembic; a
test compares the two.
"""
VERSION_TABLE = "hp_alembic_version"
INSTALL = "install the newer edition on this host and start again"
UPGRADE_LOCK = 0x68705F746F6F6C
"""PostgreSQL advisory lock: one upgrade at a time."""
OTHERS_LOCK = UPGRADE_LOCK + 1
LOOK_S = 0.1
LOCK_TIMEOUT_S = 10.0
"""How long a migration waits for a table, which others then wait for too: less than a lease."""
NAMES_AT_ONCE = 500


def current(url: str) -> str | None:
    """The database's revision; None where there is no schema of ours, or no SQLite file."""
    return read(url, revision)


def revision(connection: sa.Connection) -> str | None:
    """The revision that this connection's database has."""
    if not sa.inspect(connection).has_table(VERSION_TABLE):
        return None
    value = connection.execute(
        sa.text(f"SELECT version_num FROM {VERSION_TABLE}")  # noqa: S608
    ).scalar_one_or_none()
    return None if value is None else str(value)


def check_known(connection: sa.Connection) -> str | None:
    """Return the database's revision. Raises StoreError `older_edition` where it is of a newer
    hp-tool than this one.
    """
    current = revision(connection)
    if current is not None and current > HEAD:
        raise newer(current, where="the database")
    return current


def newer(revision: str, *, where: str) -> StoreError:
    """Return the error of a database whose schema this hp-tool is too old for."""
    return StoreError(
        f"{where} has schema {revision} of a newer hp-tool, this one knows {HEAD}: {INSTALL}",
        code=OLDER_EDITION,
    )


def upgrade(url: str, *, to: str = "head") -> None:
    """Bring a database to the newest (or a given) revision; harmless where it has it.

    Each migration is a transaction, or several where it moves many rows: interrupted, it goes on
    where it was.
    """
    with alone(url, lock=UPGRADE_LOCK):
        migrate(url, to=to)


def downgrade(url: str, *, to: str) -> None:
    """Take a database back to an older revision (`base`: no tables of ours), losing what only the
    newer one holds.
    """
    with alone(url, lock=UPGRADE_LOCK):
        migrate(url, to=to, down=True)


@contextmanager
def alone(url: str, *, lock: int = OTHERS_LOCK) -> Iterator[None]:
    """Wait until no other process is here with this database, for tables that are not ours; `lock`:
    for ours.
    """
    with opened(url) as engine:
        if engine.dialect.name == "postgresql":
            # The session's lock, which ends with it: a transaction that stands still is given up.
            with transaction(engine.execution_options(isolation_level="AUTOCOMMIT")) as connection:
                # A statement that waits would itself be waited for by CREATE INDEX CONCURRENTLY.
                while not connection.execute(
                    sa.select(sa.func.pg_try_advisory_lock(lock))
                ).scalar_one():
                    time.sleep(LOOK_S)
                yield
            return
        # The folder's lock: while a transaction of ours held the file, nobody could write.
        folder = os.open(Path(engine.url.database or "").absolute().parent, os.O_RDONLY)
        try:
            fcntl.flock(folder, fcntl.LOCK_EX)
            yield
        finally:
            os.close(folder)


def migrate(url: str, *, to: str, down: bool = False) -> None:
    """Run the migrations up or down to a revision. The caller is `alone` with UPGRADE_LOCK."""
    from alembic import command
    from alembic.util import CommandError

    try:
        # Without foreign keys: SQLite rebuilds tables to change them.
        with (
            opened(url, foreign_keys=False) as engine,
            translated_errors(engine),
            _changing(engine) as connection,
        ):
            config = alembic_config()
            config.attributes["connection"] = connection
            (command.downgrade if down else command.upgrade)(config, to)
    except CommandError as error:
        raise StoreError(
            f"{error}; the database may have been written by a newer hp-tool"
        ) from error


@contextmanager
def _changing(engine: sa.Engine) -> Iterator[sa.Connection]:
    """A connection on which each migration begins and ends its transactions."""
    with engine.execution_options(**{WRITES: True, LASTING: True}).connect() as connection:
        if connection.dialect.name == "postgresql":
            connection.execute(sa.text(f"SET lock_timeout = {round(1000 * LOCK_TIMEOUT_S)}"))
            connection.commit()
        yield connection


def alembic_config() -> Config:
    """Alembic's configuration, made in code: installed packages have no place for an ini file."""
    from alembic.config import Config

    config = Config()
    config.set_main_option("script_location", str(migrations_folder()).replace("%", "%%"))
    config.set_main_option("path_separator", "os")
    return config


def migrations_folder() -> Path:
    """Inside the package when installed from a wheel, at the top level in a checkout."""
    installed = Path(__file__).parent / "migrations"
    return installed if installed.is_dir() else Path(__file__).parents[2] / "migrations"


def is_ours(name: str | None, kind: str, _: Any) -> bool:
    """Alembic's include_name: of the tables found in a database only ours are compared, never
    Optuna's or the user's.
    """
    return kind != "table" or (
        name is not None and name.startswith(PREFIX) and name != VERSION_TABLE
    )


def probe(url: str) -> DatabaseState | None:
    """The state of the database at a URL; None for a SQLite file that is not there."""
    return read(url, state_of)


def read(url: str, read: Callable[[sa.Connection], T]) -> T | None:
    """What `read` finds in the database; None for a SQLite file that is not there, which reading
    does not make.

    Raises StoreError where it does not answer, InputError for a URL that cannot be read.
    """
    parsed = parse_url(url)
    if parsed.get_backend_name() == "sqlite" and not Path(parsed.database or "").is_file():
        return None
    with opened(url) as engine, transaction(engine) as connection:
        return read(connection)


def unknown_jobs(url: str, job_names: Collection[str]) -> list[str]:
    """Return those of the names, sorted, that no run of the database at a URL has; none where there
    is no database yet.
    """
    known = sa.select(runs.c.job_name).where(
        runs.c.job_name.in_(sa.bindparam("names", expanding=True))
    )

    def look_up(connection: sa.Connection) -> list[str]:
        if revision(connection) is None:
            return []
        names, unknown = sorted(job_names), list[str]()
        for start in range(0, len(names), NAMES_AT_ONCE):
            batch = names[start : start + NAMES_AT_ONCE]
            stored = set(connection.scalars(known, {"names": batch}))
            unknown += [name for name in batch if name not in stored]
        return unknown

    return read(url, look_up) or []


def state_of(connection: sa.Connection) -> DatabaseState:
    """The state of the database behind a connection."""
    before = datetime.now(UTC)
    offset = now(connection) - before
    return DatabaseState(
        revision=revision(connection),
        needed_revision=HEAD,
        clock_offset_s=offset.total_seconds(),
        read_only=_read_only(connection),
        free_bytes=_free_bytes(connection),
        overdue_webhooks=_overdue_webhooks(connection),
    )


def _overdue_webhooks(connection: sa.Connection) -> int:
    if not sa.inspect(connection).has_table(HOOK.name):  # of an older version, or of nobody's yet
        return 0
    # The first attempt is due as the search ends, though `next_attempt_at` says when it was
    # submitted.
    before = now(connection) - timedelta(seconds=OVERDUE_S)
    late = HOOK.c.next_attempt_at <= before, SEARCH.c.finished_at <= before
    number: int = connection.execute(untold(sa.func.count()).where(*late)).scalar_one()
    return number


def _free_bytes(connection: sa.Connection) -> int | None:
    if connection.dialect.name == "postgresql":
        return None
    return shutil.disk_usage(Path(connection.engine.url.database or "").absolute().parent).free


def _read_only(connection: sa.Connection) -> bool:
    """Whether writing would fail: a standby server, or a file that this user may not write."""
    if connection.dialect.name == "postgresql":
        answer: str = connection.execute(sa.text("SHOW transaction_read_only")).scalar_one()
        return answer == "on"
    file = Path(connection.engine.url.database or "")
    return not (
        os.access(file, os.W_OK) and os.access(file.parent, os.W_OK)
    )  # WAL needs the folder too
