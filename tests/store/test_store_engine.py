"""Database URLs and connections."""

from __future__ import annotations

import os
import shutil
import sqlite3
import stat
import sys
import threading
import time
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from types import SimpleNamespace

import pytest
import sqlalchemy as sa

from hp_tool.cluster.diagnostics import check_database_state
from hp_tool.domain.measurement import Fidelity
from hp_tool.domain.parallel import ParallelConfig
from hp_tool.errors import InputError, MissingExtraError, StoreError
from hp_tool.store import database_url, engine, mask_password, open_store, schema
from hp_tool.store.tables import searches


def test_the_url_given_wins_over_the_environment_and_that_over_the_user_folder(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("HP_DATABASE_URL", "sqlite:////from/environment.sqlite3")
    assert database_url("sqlite:////given.sqlite3") == "sqlite:////given.sqlite3"
    assert database_url() == "sqlite:////from/environment.sqlite3"
    monkeypatch.delenv("HP_DATABASE_URL")
    monkeypatch.setenv("XDG_DATA_HOME", "/data home")
    assert database_url() == "sqlite:////data home/hp-tool/hp_tool.sqlite3"


@pytest.mark.parametrize(
    "scheme", ["postgresql", "postgres", "postgresql+psycopg", "postgresql+psycopg2"]
)
def test_postgresql_means_psycopg_3(scheme: str) -> None:
    assert engine.parse_url(f"{scheme}://u@h/d").drivername == "postgresql+psycopg"


@pytest.mark.parametrize(
    "url",
    [
        "",
        "store.sqlite3",
        "sqlite://",
        "sqlite:///:memory:",
        "mysql://u:hunter2@h/d",
        "postgresql://u:hunter2@h:port/d",
    ],
)
def test_a_url_of_no_use_is_bad_input_and_not_repeated(url: str) -> None:
    with pytest.raises(InputError) as caught:
        engine.parse_url(url)
    assert caught.value.field == "HP_DATABASE_URL"
    assert "hunter2" not in caught.value.message


def test_passwords_are_masked() -> None:
    assert mask_password("postgresql://ada:hunter2@h/d") == "postgresql+psycopg://ada:***@h/d"


def test_a_missing_driver_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "psycopg", None)
    with pytest.raises(MissingExtraError, match=r"pip install .*\[postgresql\]"):
        engine.create_engine("postgresql://ada@h/d")


def test_a_server_that_does_not_answer_is_told_without_the_password() -> None:
    pytest.importorskip("psycopg")
    with pytest.raises(StoreError) as caught:
        open_store("postgresql://ada:hunter2@127.0.0.1:1/d")
    assert "127.0.0.1:1" in caught.value.message
    assert "hunter2" not in caught.value.message


def test_a_file_that_is_no_database_is_told(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("not a database" * 100)
    with pytest.raises(StoreError, match="not a database"):
        open_store(f"sqlite:///{tmp_path}/notes.txt")


def test_sqlite_writes_ahead_and_checks_foreign_keys(tmp_path: Path) -> None:
    with engine.create_engine(f"sqlite:///{tmp_path}/s.sqlite3").connect() as connection:
        pragmas = {
            name: connection.exec_driver_sql(f"PRAGMA {name}").scalar()
            for name in ("journal_mode", "foreign_keys")
        }
    assert pragmas == {"journal_mode": "wal", "foreign_keys": 1}


def test_what_was_answered_or_intended_survives_a_power_cut(tmp_path: Path) -> None:
    """SQLite waits for the disk at a commit where `synchronous` is FULL (2); a sign of life may be
    lost.
    """
    waited: list[int] = []

    @sa.event.listens_for(sa.Engine, "commit")
    def note(connection: sa.Connection) -> None:
        waited.append(connection.exec_driver_sql("PRAGMA synchronous").scalar_one())

    store = open_store(f"sqlite:///{tmp_path}/s.sqlite3")
    try:
        levels = {}

        def level(name: str, write: Callable[[], object]) -> None:
            waited.clear()
            write()
            levels[name] = waited[-1]

        level("submitted", lambda: store.create_search(query={}))
        claimed = store.claim_search(holder="test", lease_s=60.0)
        assert claimed is not None
        lease = claimed[1]
        level("sign of life", lambda: store.renew_lease(lease=lease, lease_s=60.0))
        parallel = ParallelConfig()
        level(
            "intent",
            lambda: store.intend_run(
                lease=lease, parallel=parallel, fidelity=Fidelity(), predicted={}
            ),
        )
        level("cancel", lambda: store.request_cancel(search_id=lease.search_id))
    finally:
        sa.event.remove(sa.Engine, "commit", note)
        store.close()
    assert levels == {"submitted": 2, "sign of life": 1, "intent": 2, "cancel": 2}


def test_nan_never_reaches_a_json_column(tmp_path: Path) -> None:
    with (
        engine.create_engine(f"sqlite:///{tmp_path}/s.sqlite3").begin() as connection,
        pytest.raises(sa.exc.StatementError, match="not JSON compliant"),
    ):
        connection.execute(sa.select(sa.literal({"x": float("nan")}, sa.JSON)))


@pytest.mark.parametrize("replaced", [False, True])
def test_nothing_is_written_into_a_file_that_was_taken_away(tmp_path: Path, replaced: bool) -> None:
    path = tmp_path / "store.sqlite3"
    store = open_store(f"sqlite:///{path}")
    path.rename(tmp_path / "elsewhere.sqlite3")
    if replaced:
        path.write_bytes(b"")
    with pytest.raises(StoreError, match="deleted or replaced while in use"):
        store.create_search(query={})
    assert path.exists() == replaced
    (tmp_path / "elsewhere.sqlite3").rename(path)  # put back, it is as before
    assert store.list_searches(limit=1).items == ()
    store.close()


def test_a_new_sqlite_file_is_its_owners_alone(tmp_path: Path) -> None:
    earlier = os.umask(0o022)
    try:
        store = open_store(f"sqlite:///{tmp_path / 'hp.sqlite3'}")
        store.add_audit(owner="ada", api_key_id=None, action="POST", resource="/", outcome="202")
        modes = {path.name: stat.S_IMODE(path.stat().st_mode) for path in tmp_path.iterdir()}
        store.close()
    finally:
        os.umask(earlier)
    assert modes == dict.fromkeys(("hp.sqlite3", "hp.sqlite3-wal", "hp.sqlite3-shm"), 0o600)


@pytest.mark.parametrize(
    ("fault", "fix"),
    [
        (
            "PRAGMA query_only = ON",
            "attempt to write a readonly database; give this user write access",
        ),
        (
            "PRAGMA max_page_count = 1",
            "database or disk is full; free space on the database's disk",
        ),
    ],
)
def test_a_database_that_takes_no_writes_says_what_to_do(
    tmp_path: Path, fault: str, fix: str
) -> None:
    open_store(f"sqlite:///{tmp_path}/s.sqlite3").close()

    @sa.event.listens_for(sa.Engine, "connect")
    def break_it(connection: sqlite3.Connection, _: object) -> None:
        connection.execute(fault)

    try:
        store = open_store(f"sqlite:///{tmp_path}/s.sqlite3")
        with pytest.raises(StoreError) as caught:
            store.create_search(query={"text": "x" * 100_000})
    finally:
        sa.event.remove(sa.Engine, "connect", break_it)
    store.close()
    assert fix in caught.value.message


def test_a_full_disk_is_seen_before_a_write_fails(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = open_store(f"sqlite:///{tmp_path}/s.sqlite3")
    room = shutil.disk_usage(tmp_path)
    assert store.state().free_bytes == pytest.approx(room.free, rel=0.2)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: room._replace(free=2**20))
    (check,) = (
        each for each in check_database_state(store.state()) if each.name == "database disk"
    )
    store.close()
    assert (check.status, check.fix) == ("failed", "free some space")


def test_writers_of_a_process_take_turns(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """SQLite's own waiting looks often at first and then ever more rarely: who came last would
    write first.
    """
    looked, order = threading.Event(), []

    def look_again(seconds: float) -> None:
        looked.set()
        time.sleep(seconds)

    monkeypatch.setattr(engine, "time", SimpleNamespace(monotonic=time.monotonic, sleep=look_again))
    database = engine.create_engine(f"sqlite:///{tmp_path / 'hp.sqlite3'}").execution_options(
        **{engine.WRITES: True}
    )

    def write(name: str) -> None:
        with database.begin():
            order.append(name)

    threads = [
        threading.Thread(target=write, args=(name,)) for name in ("first", "second", "third")
    ]
    with database.begin():
        threads[0].start()
        assert looked.wait(30)  # in vain: its turn, once the database is free
        for later in threads[1:]:
            later.start()
    for thread in threads:
        thread.join()
    assert order[0] == "first" and len(order) == 3
    database.dispose()


@pytest.mark.components
def test_who_sleeps_in_a_transaction_keeps_nobody_waiting_for_long(
    migrated_postgres_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A stopped process, or one of a host that sleeps, would hold its rows until it wakes: no
    cancel would be answered.
    """
    monkeypatch.setattr(engine, "IDLE_TRANSACTION_TIMEOUT_S", 0.3)
    store, sleeper = open_store(migrated_postgres_url), engine.create_engine(migrated_postgres_url)
    search, cancelled = store.create_search(query={}), threading.Event()

    def cancel() -> None:
        store.request_cancel(search_id=search.id)
        cancelled.set()

    with (
        pytest.raises(sa.exc.DBAPIError, match="idle-in-transaction"),
        sleeper.begin() as connection,
    ):
        connection.execute(sa.update(searches).where(searches.c.id == search.id).values(priority=1))
        user = threading.Thread(target=cancel)
        user.start()
        assert cancelled.wait(20)
    user.join()
    sleeper.dispose()
    store.close()


@pytest.mark.components
def test_a_store_outlives_a_restart_of_its_database(migrated_postgres_url: str) -> None:
    """A server that restarts, or a firewall, closes connections that nobody uses: the next question
    gets a new one.
    """
    store, other = open_store(migrated_postgres_url), engine.create_engine(migrated_postgres_url)
    search = store.create_search(query={})
    with other.begin() as connection:
        others = "datname = current_database() AND pid <> pg_backend_pid()"
        assert connection.execute(
            sa.text(f"SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE {others}")
        ).all()
    assert store.get_search(search_id=search.id).id == search.id
    other.dispose()
    store.close()


@pytest.mark.components
def test_a_database_in_sql_ascii_keeps_text(postgres_server_url: str) -> None:
    import psycopg

    with psycopg.connect(postgres_server_url, autocommit=True) as connection:
        connection.execute(
            "CREATE DATABASE ascii ENCODING 'SQL_ASCII' TEMPLATE template0 LC_COLLATE 'C' LC_CTYPE "
            "'C'"
        )
        try:
            url = postgres_server_url.replace("/postgres?", "/ascii?")
            schema.upgrade(url)
            with closing(open_store(url)) as store:
                made = store.create_search(query={"id": "é"}, owner="Zoë")
                assert store.get_search(search_id=made.id) == made and made.owner == "Zoë"
        finally:
            connection.execute("DROP DATABASE ascii WITH (FORCE)")
