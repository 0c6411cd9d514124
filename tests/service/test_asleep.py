"""Real workers over jobs that no live search owns: one that sleeps over a submit, and one that
finds such a job.
"""

from __future__ import annotations

import importlib.util
import random
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from hp_tool.cluster.launchers import create
from hp_tool.store import open_store
from tests.conftest import skip_or_fail
from tests.launchers.contract import STUBBORN, plan, processes
from tests.service.faults.audit import audit
from tests.service.faults.campaign import QUERY
from tests.service.faults.databases import Sqlite
from tests.service.faults.injections import Scene, sleep_through_cancel
from tests.service.faults.processes import Service, preload
from tests.service.processes import wait_for
from tests.store.acting import claimed, intended

pytestmark = pytest.mark.components


@pytest.fixture
def scene(tmp_path: Path) -> Iterator[Scene]:
    """Nothing runs yet."""
    if importlib.util.find_spec("megatron") is None or importlib.util.find_spec("torch") is None:
        skip_or_fail(component="MEGATRON", reason="the profiler extra is not installed")
    preload()
    (tmp_path / "faults").mkdir()
    database = Sqlite(tmp_path)
    service = Service(database_url=database.url, home=tmp_path, lease_s=0.5)
    yield Scene(service=service, database=database, random=random.Random(0), longest_s=1.0)
    service.stop()
    database.close()


def test_a_worker_that_wakes_to_a_cancelled_search_starts_no_job(
    scene: Scene, tmp_path: Path
) -> None:
    service = scene.service
    service.start_api()
    service.ensure_workers(2)
    search = httpx.post(f"{service.url}/v1/searches", json=QUERY).json()["id"]
    sleep_through_cancel(scene, place="within")
    wait_for(lambda: "lease_lost" in (tmp_path / "worker.log").read_text())
    service.stop()
    leftovers = [" ".join(process.cmdline()) for process in service.leftovers()]
    found = audit(
        database_url=service.database_url,
        home=tmp_path,
        accepted={"only": search},
        leftovers=leftovers,
    )
    assert (found.lost, found.doubled, found.orphaned, found.unbooked) == ([], [], [], [])


def test_any_worker_ends_and_books_a_job_that_no_search_owns(scene: Scene, tmp_path: Path) -> None:
    store, launcher = (
        open_store(scene.service.database_url),
        create("local", root=tmp_path / "runs", cpu_only=True),
    )
    try:
        lease = claimed(store, query=QUERY)
        run = intended(store, lease)
        handle = launcher.submit(plan(STUBBORN, job_name=run.job_name))
        store.abandon_run(
            lease=lease,
            run_id=run.id,
            cause="given up by a worker that died before it ended the job",
        )
        assert launcher.open_jobs() == [run.job_name]
        scene.service.ensure_workers(1)
        wait_for(lambda: store.runs(search_id=run.search_id)[0].gpu_seconds)
        assert (launcher.open_jobs(), processes(run.job_name)) == ([], [])
        assert store.runs(search_id=run.search_id)[0].gpu_seconds == 2 * (
            launcher.fetch(handle).wall_s or 0.0
        )
    finally:
        store.close()
