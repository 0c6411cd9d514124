"""What a running service keeps: metrics tell of it, and a worker applies its settings."""

from __future__ import annotations

import os
import re
import subprocess
from pathlib import Path

import httpx
import pytest
import sqlalchemy as sa

from hp_tool.store import open_store
from hp_tool.store.engine import open_engine
from tests.service.processes import api, hp_tool, wait_for


@pytest.fixture
def url(tmp_path: Path) -> str:
    """A database with a search that was cancelled 40 days ago."""
    url = f"sqlite:///{tmp_path / 'hp.sqlite3'}"
    store = open_store(url)
    store.request_cancel(search_id=store.create_search(query={"kind": "training"}).id)
    store.close()
    with open_engine(url) as engine, engine.begin() as connection:
        connection.execute(
            sa.text("UPDATE hp_searches SET finished_at = datetime('now', '-40 days')")
        )
    return url


def sample(text: str, name: str) -> float:
    match = re.search(rf"^{name} (\S+)$", text, re.MULTILINE)
    assert match is not None, f"no {name}"
    return float(match[1])


@pytest.mark.components
def test_metrics_and_worker(url: str, tmp_path: Path) -> None:
    folder = tmp_path / "runs" / "hp-somebody-r0-t1"
    folder.mkdir(parents=True)
    with api(database_url=url, home=tmp_path) as address:
        text = httpx.get(f"{address}/metrics").text
        assert sample(text, "hp_ended_search_oldest_seconds") == pytest.approx(40 * 86400, rel=0.01)
        assert sample(text, "hp_run_folders") == 1
        assert sample(text, "hp_database_bytes") > 10_000
        environment = os.environ | {
            "HP_DATABASE_URL": url,
            "HP_RUNS_DIR": str(folder.parent),
            "HP_RETENTION_SEARCH_DAYS": "30",
        }
        with subprocess.Popen(
            hp_tool("worker"), env=environment, stderr=subprocess.DEVNULL
        ) as worker:
            wait_for(lambda: httpx.get(f"{address}/v1/searches").json()["items"] == [])
            worker.terminate()
    assert folder.exists()
