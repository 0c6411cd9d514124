"""`hp-tool` of the next release on a SQLite file of this one: the file is copied first, and left
alone under a live worker.
"""

from __future__ import annotations

import json
import shutil
import sqlite3
from contextlib import closing
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest

from hp_tool.store import open_store, schema
from tests import command_line
from tests.command_line import Ended
from tests.store.acting import NewMeasurementFactory
from tests.store.conftest import new_measurement

__all__ = ["new_measurement"]
ROOT = Path(__file__).parents[2]
OLD, NEXT = schema.HEAD, "9998"
MIGRATION = f"""
import sqlalchemy as sa
from alembic import op

revision, down_revision = "{NEXT}", "{OLD}"


def upgrade():
    op.add_column("hp_searches", sa.Column("novelty", sa.Integer))
"""
"""The migration of a next release."""


def hp_tool(path: Path, *arguments: str) -> Ended:
    """`hp-tool` on the database file, without a terminal."""
    return command_line.hp_tool(
        *arguments, HP_DATABASE_URL=f"sqlite:///{path}", HP_RUNS_DIR=str(path.parent / "runs")
    )


def ask(path: Path, query: str, *values: object) -> list[tuple[object, ...]]:
    with closing(sqlite3.connect(path)) as connection, connection:
        return connection.execute(query, values).fetchall()


def revision_of(path: Path) -> object:
    ((revision,),) = ask(path, f"SELECT version_num FROM {schema.VERSION_TABLE}")
    return revision


def backups(path: Path) -> list[Path]:
    return sorted(each for each in path.parent.iterdir() if each.name.endswith(".backup"))


@pytest.fixture
def old(
    tmp_path: Path, new_measurement: NewMeasurementFactory, monkeypatch: pytest.MonkeyPatch
) -> Path:
    """The database file of this release, with a search and a measurement, under the next one."""
    path = tmp_path / "hp.sqlite3"
    url = f"sqlite:///{path}"
    with closing(open_store(url)) as store:
        store.create_search(query={"kind": "training"})
        store.add_measurement(measurement=new_measurement())
    migrations = tmp_path / "migrations"
    shutil.copytree(schema.migrations_folder(), migrations)
    (migrations / "versions" / "next.py").write_text(MIGRATION)
    monkeypatch.setattr(schema, "migrations_folder", lambda: migrations)
    monkeypatch.setattr(schema, "HEAD", NEXT)
    return path


def add_worker(path: Path, *, seen_at: datetime) -> None:
    ask(
        path,
        "INSERT INTO hp_workers (holder, offers, started_at, seen_at) VALUES (?, ?, ?, ?)",
        *(
            "worker-of-old",
            "[]",
            seen_at.isoformat(" "),
            seen_at.isoformat(" ", timespec="microseconds"),
        ),
    )


def test_a_command_keeps_the_old_file_beside_the_upgraded_one(old: Path) -> None:
    done = hp_tool(old, "measurements", "--json")
    assert done.returncode == 0, done.stderr
    assert len(json.loads(done.stdout)["measurements"]) == 1
    (kept,) = backups(old)
    assert OLD in kept.name and str(kept) in done.stderr
    assert kept.stat().st_mode & 0o077 == 0  # a database may hold names and keys
    assert (revision_of(kept), revision_of(old)) == (OLD, NEXT)
    assert ask(kept, "SELECT count(*) FROM hp_measurements") == [(1,)]
    again = hp_tool(old, "measurements", "--json")
    assert again.stderr == "" and backups(old) == [kept]  # once


def test_a_new_file_needs_no_backup(tmp_path: Path) -> None:
    done = hp_tool(tmp_path / "new.sqlite3", "measurements")
    assert (done.returncode, done.stderr, backups(tmp_path / "new.sqlite3")) == (0, "", [])


def test_a_file_under_a_live_worker_is_left_as_it_is(old: Path) -> None:
    add_worker(old, seen_at=datetime.now(UTC).replace(tzinfo=None))
    for command in (("measurements", "--json"), ("db", "upgrade"), ("calibrate",)):
        done = hp_tool(old, *command)
        assert done.returncode != 0
        assert "worker-of-old" in done.stderr and "hp-tool db upgrade" in done.stderr
    assert (revision_of(old), backups(old)) == (OLD, [])
    asked = hp_tool(old, "db", "upgrade", "--yes")
    assert asked.returncode == 0, asked.stderr
    (kept,) = backups(old)
    assert (revision_of(kept), revision_of(old)) == (OLD, NEXT)


def test_a_worker_that_fell_silent_is_not_waited_for(old: Path) -> None:
    add_worker(old, seen_at=datetime.now(UTC).replace(tzinfo=None) - timedelta(minutes=5))
    assert hp_tool(old, "measurements").returncode == 0
    assert revision_of(old) == NEXT


def test_a_search_that_runs_in_a_terminal_counts_as_a_worker(old: Path) -> None:
    until = datetime.now(UTC).replace(tzinfo=None) + timedelta(minutes=5)
    changed = (
        "UPDATE hp_searches SET state = 'running', lease_holder = 'tune-at-desk', "
        "lease_expires_at = ?"
    )
    ask(old, changed, until.isoformat(" ", timespec="microseconds"))
    done = hp_tool(old, "measurements")
    assert done.returncode != 0 and "tune-at-desk" in done.stderr
    assert revision_of(old) == OLD
