"""Optuna's tables in our database, opened by workers that all begin at the same moment."""

from __future__ import annotations

import threading
from contextlib import suppress
from multiprocessing.synchronize import Barrier
from pathlib import Path

import optuna
import pytest

from hp_tool.errors import StoreError
from hp_tool.loop.tuning import study_storage
from hp_tool.loop.tuning.study import opened_studies
from tests.forked import FORKED


def open_with_others(url: str, together: Barrier) -> None:
    together.wait()
    study_storage(url)


def open_together(url: str, *, processes: int = 4) -> list[int | None]:
    together = FORKED.Barrier(processes)
    workers = [
        FORKED.Process(target=open_with_others, args=(url, together)) for _ in range(processes)
    ]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    return [worker.exitcode for worker in workers]


@pytest.mark.components
def test_many_processes_may_open_a_new_sqlite_file(tmp_path):
    assert open_together(f"sqlite:///{tmp_path / 'new.sqlite3'}") == [0, 0, 0, 0]


@pytest.mark.long
@pytest.mark.components
def test_many_processes_may_open_a_new_postgresql_database(postgres_url):
    assert open_together(postgres_url) == [0, 0, 0, 0]


@pytest.mark.parametrize(
    "database", ["sqlite", pytest.param("postgresql", marks=pytest.mark.components)]
)
def test_one_at_a_time_makes_the_tables(
    database: str, tmp_path: Path, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> None:
    url = (
        request.getfixturevalue("postgres_url")
        if database == "postgresql"
        else f"sqlite:///{tmp_path / 'new.sqlite3'}"
    )
    beside, begun, inside = [], threading.Barrier(2), threading.Semaphore(1)

    class Storage:
        def __init__(self, *_: object, **__: object) -> None:
            beside.append(not inside.acquire(blocking=False))
            with suppress(threading.BrokenBarrierError):
                begun.wait(0.3)  # for another, which must not come
            inside.release()

    monkeypatch.setattr(optuna.storages, "RDBStorage", Storage)
    threads = [threading.Thread(target=study_storage, args=(url,)) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert beside == [False, False]


def test_a_database_that_does_not_answer_is_said_without_its_password():
    pytest.importorskip("psycopg")
    with pytest.raises(StoreError) as caught:
        study_storage("postgresql://user:secret@127.0.0.1:1/db")
    assert "secret" not in str(caught.value)


def test_connections_of_opened_studies_are_closed(tmp_path: Path) -> None:
    with opened_studies(f"sqlite:///{tmp_path / 'studies.sqlite3'}") as storage:
        optuna.create_study(storage=storage, study_name="one")
        used = storage.engine.pool
        assert used.checkedin() > 0
    assert used.checkedin() == 0
