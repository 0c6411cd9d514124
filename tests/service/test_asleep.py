"""Real workers, one of which is stopped in the middle of a submit: what it does when it wakes to a search that was cancelled."""

from __future__ import annotations

import importlib.util
import random
from pathlib import Path

import httpx
import pytest

from benchmarks.service.campaign import QUERY
from benchmarks.service.databases import Sqlite
from benchmarks.service.injections import Scene, sleep_through_cancel
from benchmarks.service.ledger import audit
from benchmarks.service.processes import Service, preload
from tests.conftest import skip_or_fail
from tests.service.processes import wait_for

pytestmark = pytest.mark.distributed


def test_a_worker_that_wakes_to_a_cancelled_search_starts_no_job(tmp_path: Path) -> None:
    if importlib.util.find_spec("megatron") is None or importlib.util.find_spec("torch") is None:
        skip_or_fail(component="MEGATRON", reason="the profiler extra is not installed")
    preload()
    database = Sqlite(tmp_path)
    (tmp_path / "faults").mkdir()
    service = Service(database_url=database.url, home=tmp_path, lease_s=0.5)
    scene = Scene(service=service, database=database, random=random.Random(0), longest_s=1.0)
    try:
        service.start_api()
        service.ensure_workers(2)
        search = httpx.post(f"{service.url}/v1/searches", json=QUERY).json()["id"]
        sleep_through_cancel(scene, place="within")
        wait_for(lambda: "lease_lost" in (tmp_path / "worker.log").read_text(), timeout_s=30)
    finally:
        service.stop()
        database.close()
    leftovers = [" ".join(process.cmdline()) for process in service.leftovers()]
    found = audit(database_url=database.url, home=tmp_path, accepted={"only": search}, leftovers=leftovers)
    assert (found.lost, found.doubled, found.orphaned, found.unbooked) == ([], [], [], [])
