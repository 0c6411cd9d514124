"""An upgrade of many measurements while others write: nobody waits for it, and one that was
interrupted goes on.
"""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import sqlalchemy as sa

from benchmarks.service import upgrades
from hp_tool.store import schema
from hp_tool.store.engine import opened
from hp_tool.store.schema import HEAD
from tests.service.processes import hp_tool

ROWS = 12_000
SERVER = pytest.param("postgresql", marks=pytest.mark.components)


@pytest.fixture
def old_url(url: str) -> str:
    """A database of an older version with ROWS measurements, whose keys the upgrade changes."""
    upgrades.seed(url, measurements=ROWS)
    return url


def moved(url: str) -> int:
    """Measurements whose key is that of the newest version."""
    with opened(url) as engine, engine.connect() as connection:
        query = sa.text("SELECT count(*) FROM hp_measurements WHERE cluster_key = :key")
        count: int = connection.execute(query, {"key": upgrades.WHOLE_KEY}).scalar_one()
    return count


@pytest.fixture
def started(old_url: str, tmp_path: Path) -> Iterator[subprocess.Popen[bytes]]:
    """`hp-tool db upgrade`, under way."""
    environment = os.environ | {"HP_DATABASE_URL": old_url}
    running = subprocess.Popen(
        hp_tool("db", "upgrade"), env=environment, stderr=subprocess.PIPE, stdout=subprocess.PIPE
    )
    yield running
    running.kill()
    running.communicate()


@pytest.mark.parametrize(
    "url", [pytest.param("sqlite", marks=pytest.mark.long), SERVER], indirect=True
)
def test_writes_of_searches_go_on_during_an_upgrade(old_url: str) -> None:
    report = upgrades.upgrade_under_writes(old_url)
    assert schema.current(old_url) == HEAD
    assert moved(old_url) == ROWS + report.measurements_written
    assert report.longest_wait_s < 0.25 * report.upgrade_s, report
    assert report.writes > 20, report


@pytest.mark.components
@pytest.mark.parametrize(
    "url",
    ["sqlite", pytest.param(*SERVER.values, marks=[*SERVER.marks, pytest.mark.long])],
    indirect=True,
)
def test_an_interrupted_upgrade_goes_on(old_url: str, started: subprocess.Popen[bytes]) -> None:
    while not 0 < moved(old_url) < ROWS:
        assert started.poll() is None, "it moved all measurements at once"
        time.sleep(0.01)
    started.send_signal(signal.SIGKILL)
    started.wait()
    before = moved(old_url)
    assert 0 < before < ROWS
    assert schema.current(old_url) != HEAD
    subprocess.run(
        hp_tool("db", "upgrade"),
        env=os.environ | {"HP_DATABASE_URL": old_url},
        check=True,
        capture_output=True,
    )
    assert (schema.current(old_url), moved(old_url)) == (HEAD, ROWS)
