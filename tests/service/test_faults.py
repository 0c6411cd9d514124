"""Every fault once under running searches: nothing is lost, doubled, orphaned or unbooked.
`benchmarks.service.faults` causes each many times.
"""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest

from tests.conftest import skip_or_fail
from tests.service.editions import extract
from tests.service.faults.campaign import as_text, campaign, is_clean
from tests.service.faults.databases import Database, Postgres, Sqlite
from tests.service.faults.injections import CLOCK, FAULTS, FOLDER_FULL, OLDER, RESTART
from tests.service.faults.processes import preload

pytestmark = pytest.mark.components
SQLITE = [fault for fault in FAULTS if fault not in (RESTART, FOLDER_FULL, CLOCK, OLDER)]
"""Without those that need PostgreSQL, a disk of their own, or all processes under libfaketime
(`benchmarks.service.faults`), or history, which has a test of its own.
"""
POSTGRESQL = [
    "worker killed",
    RESTART,
    "database locked",
    "database read-only",
    "workers claiming at once",
    "cancelled under a sleeping worker",
    "upload that exhausts memory",
    "upload that never ends",
]
"""What befalls the database; the rest is the same on both."""


@pytest.fixture(autouse=True)
def profiler_extra() -> None:
    if importlib.util.find_spec("megatron") is None or importlib.util.find_spec("torch") is None:
        skip_or_fail(component="MEGATRON", reason="the profiler extra is not installed")
    preload()


@pytest.mark.long
@pytest.mark.parametrize(
    "kind", ["sqlite", pytest.param("postgresql", marks=pytest.mark.components)]
)
def test_a_worker_of_an_older_edition(tmp_path: Path, kind: str) -> None:
    if (reason := extract(tmp_path / "older")) is not None:
        pytest.skip(reason)
    try:
        database: Database = Sqlite(tmp_path) if kind == "sqlite" else Postgres()
    except ImportError as error:
        skip_or_fail(component="POSTGRES", reason=f"no PostgreSQL: {error}")
    try:
        clean(database, [OLDER] * 2, tmp_path)
    finally:
        database.close()


def clean(database: Database, faults: list[str], home: Path) -> None:
    row = campaign(faults=faults, database=database, home=home, lease_s=1.0, longest_s=1.5)
    assert is_clean(row), as_text(row)
    assert row["runs"] >= row["searches"] > 0


@pytest.mark.long
def test_faults_on_sqlite(tmp_path: Path) -> None:
    clean(Sqlite(tmp_path), SQLITE, tmp_path)


@pytest.mark.components
@pytest.mark.long
def test_faults_on_postgresql(tmp_path: Path) -> None:
    try:
        database = Postgres()
    except ImportError as error:
        skip_or_fail(component="POSTGRES", reason=f"no PostgreSQL: {error}")
    try:
        clean(database, POSTGRESQL, tmp_path)
    finally:
        database.close()
