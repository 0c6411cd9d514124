"""A database restored from a backup hands out what it handed out before; jobs and results of the
time between stay apart.
"""

from __future__ import annotations

import json
import shutil
from contextlib import closing
from pathlib import Path

import pytest

from hp_tool.domain.records import Lease
from hp_tool.errors import ConflictError
from hp_tool.store import SqlStore, open_store
from tests.service.editions import THIS, expected_step_s, quick_trainer
from tests.service.processes import wait_for
from tests.service.test_editions import QUERY


@pytest.mark.components
@pytest.mark.long
def test_restores_do_not_mix_up_runs(tmp_path: Path) -> None:
    """Its searches run again, under other names; doctor tells what the lost time left behind."""
    path, saved, go = tmp_path / "hp.sqlite3", tmp_path / "saved.sqlite3", tmp_path / "go"
    url = f"sqlite:///{path}"
    running = {"database_url": url, "home": tmp_path}
    quick_trainer(tmp_path / "catalog", go=go)
    go.touch()
    with closing(open_store(url)) as store:
        search = store.create_search(query=QUERY).id
    assert THIS.run("db", "backup", str(saved), **running).returncode == 0
    before = finished(url, search, tmp_path)
    for suffix in ("", "-wal", "-shm"):
        Path(f"{path}{suffix}").unlink(missing_ok=True)
    shutil.copy(saved, path)
    (tmp_path / "catalog" / "day").write_text("10")
    after = finished(url, search, tmp_path)
    assert not before & after, "a job's name was made twice"
    done = THIS.run("doctor", "--json", **running)
    (check,) = [
        each for each in json.loads(done.stdout)["checks"] if each["name"] == "unknown folders"
    ]
    assert check["status"] == "warning" and "restored" in check["detail"]
    assert all(name in check["detail"] for name in before) and not any(
        name in check["detail"] for name in after
    )


def finished(url: str, search: str, home: Path) -> set[str]:
    """Run a search to its end, and return its jobs' names; each measurement is of today and of its
    own configuration.
    """
    day = int((home / "catalog" / "day").read_text())
    with (
        closing(open_store(url)) as store,
        THIS.process("worker", database_url=url, home=home) as (_, log),
    ):
        wait_for(lambda: store.get_search(search_id=search).state.ended, timeout_s=90)
        assert store.get_search(search_id=search).state == "succeeded", log.read_text()
        runs = store.runs(search_id=search)
    assert len(runs) == QUERY["search"]["budget_runs"]
    for run in runs:
        assert run.measurement is not None
        assert run.measurement.step_s == expected_step_s(run.parallel, day=day), run
    return {run.job_name for run in runs}


@pytest.mark.components
def test_a_job_of_before_a_restore_is_told(tmp_path: Path) -> None:
    """One that still runs, of a search that the restored database never had."""
    path, saved = tmp_path / "hp.sqlite3", tmp_path / "saved.sqlite3"
    url = f"sqlite:///{path}"
    running = {"database_url": url, "home": tmp_path}
    quick_trainer(tmp_path / "catalog", go=tmp_path / "go")
    open_store(url).close()
    assert THIS.run("db", "backup", str(saved), **running).returncode == 0
    with closing(open_store(url)) as store:
        search = store.create_search(query=QUERY).id
        with THIS.process("worker", **running):
            wait_for(
                lambda: [run for run in store.runs(search_id=search) if run.handle], timeout_s=90
            )
        (run,) = store.runs(search_id=search)
    for suffix in ("", "-wal", "-shm"):
        Path(f"{path}{suffix}").unlink(missing_ok=True)
    shutil.copy(saved, path)
    try:
        checks = json.loads(THIS.run("doctor", "--json", **running).stdout)["checks"]
        (check,) = [each for each in checks if each["name"] == "unknown jobs"]
        assert run.job_name in check["detail"] and check["status"] == "warning"
    finally:
        (tmp_path / "go").touch()
        wait_for(lambda: (tmp_path / "runs" / run.job_name / "ended.json").exists())


def test_a_restored_database_does_not_know_the_leases_of_before(tmp_path: Path) -> None:
    """It counts claims again, so a worker of before has the token of one of after: their holders
    tell them apart.
    """
    path, saved = tmp_path / "hp.sqlite3", tmp_path / "saved.sqlite3"
    with closing(open_store(f"sqlite:///{path}")) as store:
        store.create_search(query=QUERY)
        assert (
            THIS.run(
                "db", "backup", str(saved), database_url=f"sqlite:///{path}", home=tmp_path
            ).returncode
            == 0
        )
        before = _claimed(store, holder="before:1")
    with closing(open_store(f"sqlite:///{saved}")) as restored:
        after = _claimed(restored, holder="after:1")
        assert before.token == after.token
        with pytest.raises(ConflictError) as caught:
            restored.renew_lease(lease=before, lease_s=60.0)
        assert caught.value.code == "lease_lost"
        with pytest.raises(ConflictError):
            restored.append_event(lease=before, kind="note", payload={})
        restored.renew_lease(lease=after, lease_s=60.0)


def _claimed(store: SqlStore, *, holder: str) -> Lease:
    claim = store.claim_search(holder=holder, lease_s=60.0)
    assert claim is not None
    return claim[1]
