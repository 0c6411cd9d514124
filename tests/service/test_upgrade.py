"""An upgrade from an edition of the repository's history, and a restore, under running searches, on
both databases.
"""

from __future__ import annotations

import copy
import json
from contextlib import ExitStack, closing
from pathlib import Path
from typing import Any

import httpx
import pytest

from hp_tool.domain.records import RunRecord
from hp_tool.store import SqlStore, open_store
from tests.conftest import new_database
from tests.service.editions import THIS, Edition, expected_step_s, newer, older, quick_trainer
from tests.service.processes import wait_for
from tests.service.test_editions import QUERY

pytestmark = [pytest.mark.long, pytest.mark.components]
REPORT = {
    "query": {
        name: value
        for name, value in QUERY.items()
        if name not in ("parallel", "search", "trainer")
    },
    "parallel": {"tensor_parallel_size": 2},
    "measurement": {"status": "ok", "step_s": 0.25},
}
LEASE = ("--lease-s", "2")
BOTH = ["sqlite", pytest.param("postgresql", marks=pytest.mark.components)]


@pytest.fixture(params=BOTH)
def url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    place: str = f"sqlite:///{tmp_path / 'hp.sqlite3'}"
    return str(request.getfixturevalue("postgres_url")) if request.param == "postgresql" else place


def test_an_upgrade_under_running_searches(url: str, tmp_path: Path) -> None:
    """Searches of before, in the queue and under way, and those of after all end with their own
    results, by workers of both editions; jobs under way keep their names.
    """
    go, running = tmp_path / "go", {"database_url": url, "home": tmp_path}
    quick_trainer(tmp_path / "catalog", go=go)
    before, after = (
        older(tmp_path / "older"),
        newer(tmp_path / "newer"),
    )  # whose queries have a default more
    upgrade(before, url=url, home=tmp_path)
    with ExitStack() as stack:
        old_api = stack.enter_context(before.api(**running))
        workers = [
            stack.enter_context(before.process("worker", *LEASE, **running)) for _ in range(2)
        ]
        searches = [submit(old_api) for _ in range(3)]
        wait_for(lambda: len(started(tmp_path)) == 2)
        under_way = started(tmp_path)
        upgrade(after, url=url, home=tmp_path)
        api = stack.enter_context(after.api(**running))
        leaving, _ = workers[0]
        # it hands its search back, with the job running, to whichever edition takes it
        leaving.terminate()
        leaving.wait(60)
        stack.enter_context(after.process("worker", *LEASE, **running))
        searches += [submit(api), submit(api), submit(old_api)]
        go.touch()
        store = stack.enter_context(closing(open_store(url)))
        wait_for(lambda: all(store.get_search(search_id=each).state.ended for each in searches))
        assert workers[1][0].poll() is None, workers[1][1].read_text()
        runs = [run for each in searches for run in store.runs(search_id=each)]
        told = [store.get_search(search_id=each) for each in searches]
    assert [(each.state, each.error) for each in told] == [("succeeded", None)] * len(searches)
    assert under_way <= {run.job_name for run in runs}
    assert len(runs) == len(searches) * QUERY["search"]["budget_runs"]
    for run in runs:
        assert measured_s(run) == expected_step_s(run.parallel)


def test_a_restore_under_running_searches(
    url: str, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    """Workers and host are lost; the restored database goes on from its backup: what it knew
    stands, what it did not know is run again, and doctor tells of the jobs of the lost time.
    """
    go, day = tmp_path / "go", tmp_path / "catalog" / "day"
    quick_trainer(tmp_path / "catalog", go=go, pause_s=2.0)
    query = copy.deepcopy(QUERY)
    query["search"]["budget_runs"] = 4
    upgrade(THIS, url=url, home=tmp_path)
    with ExitStack() as stack:
        restored = restored_place(url, tmp_path, stack, request)
        store = stack.enter_context(closing(open_store(url)))
        begun, waiting = (store.create_search(query=query).id for _ in range(2))
        worker, _ = stack.enter_context(
            THIS.process("worker", *LEASE, database_url=url, home=tmp_path)
        )
        go.touch()
        wait_for(lambda: any(run.state.ended for run in runs_of(store, begun)))
        save(url, restored, home=tmp_path)
        wait_for(lambda: store.get_search(search_id=waiting).state.ended)
        go.unlink()
        lost = store.create_search(query=query).id
        wait_for(lambda: submitted(store, [lost]))
        worker.kill()
        worker.wait()
        day.write_text("10")
        (stray,) = submitted(store, [lost])
        doctor = THIS.run("doctor", "--json", database_url=restored, home=tmp_path)
        checks = {each["name"]: each for each in json.loads(doctor.stdout)["checks"]}
        assert stray.job_name in checks["unknown jobs"]["detail"]
        assert "job folders that are not in the database" in checks["unknown folders"]["detail"]
        after = stack.enter_context(closing(open_store(restored)))
        known = {run.id for run in runs_of(after, begun)}
        assert 0 < len(known) < query["search"]["budget_runs"] and not runs_of(after, waiting)
        stack.enter_context(THIS.process("worker", *LEASE, database_url=restored, home=tmp_path))
        go.touch()
        wait_for(lambda: after.get_search(search_id=waiting).state.ended)
        assert [after.get_search(search_id=each).state for each in (begun, waiting)] == [
            "succeeded"
        ] * 2
        for run in [*runs_of(after, begun), *runs_of(after, waiting)]:
            assert measured_s(run) == expected_step_s(
                run.parallel, day=0 if run.id in known else 10
            )
        names = [{run.job_name for run in runs_of(each, waiting)} for each in (store, after)]
        assert not names[0] & names[1]
        wait_for(lambda: (tmp_path / "runs" / stray.job_name / "ended.json").exists())


def test_an_earlier_editions_keys_are_honoured(url: str, tmp_path: Path) -> None:
    """A request of before the upgrade is answered as it was, though its fingerprint covers that
    edition's defaults.
    """
    quick_trainer(tmp_path / "catalog", go=tmp_path / "go")
    before, running, headers = (
        older(tmp_path / "older"),
        {"database_url": url, "home": tmp_path},
        {"Idempotency-Key": "one"},
    )
    bodies = {"searches": QUERY, "measurements": REPORT}
    answers: dict[str, set[str]] = {path: set() for path in bodies}
    for edition in (before, THIS, newer(tmp_path / "newer")):  # the newer one's defaults are more
        upgrade(edition, url=url, home=tmp_path)
        with edition.api(**running) as api:
            for path, body in bodies.items():
                answer = httpx.post(f"{api}/v1/{path}", json=body, headers=headers, timeout=30)
                assert answer.is_success, answer.text
                answers[path].add(answer.json()["id"])
            if edition is not before:
                other = QUERY | {"id": "another"}
                assert (
                    httpx.post(
                        f"{api}/v1/searches", json=other, headers=headers, timeout=30
                    ).status_code
                    == 409
                )
    assert [len(ids) for ids in answers.values()] == [1, 1]


def upgrade(edition: Edition, *, url: str, home: Path) -> None:
    """Run `hp-tool db upgrade` of an edition, though workers are at work."""
    places: dict[str, Any] = {"database_url": url, "home": home}
    agreed = ["--yes"] if "--yes" in edition.run("db", "upgrade", "--help", **places).stdout else []
    done = edition.run("db", "upgrade", *agreed, **places)
    assert done.returncode == 0, done.stderr


def submit(api: str) -> str:
    """Submit a search; its id."""
    answer = httpx.post(f"{api}/v1/searches", json=QUERY, timeout=30)
    assert answer.is_success, answer.text
    return str(answer.json()["id"])


def started(home: Path) -> set[str]:
    """Return the names of the jobs that were started on this host."""
    return {path.parent.name for path in (home / "runs").glob("*/started.json")}


def restored_place(url: str, home: Path, stack: ExitStack, request: pytest.FixtureRequest) -> str:
    """Return the URL of a database to be filled from a backup."""
    if url.startswith("sqlite"):
        return f"sqlite:///{home / 'restored.sqlite3'}"
    return stack.enter_context(new_database(request.getfixturevalue("postgres_server_url")))


def save(url: str, place: str, *, home: Path) -> None:
    """Copy a database in use, as of one instant."""
    path = place.removeprefix("sqlite:///")
    arguments = ("backup", path) if path != place else ("copy", url, place)
    done = THIS.run("db", *arguments, database_url=url, home=home)
    assert done.returncode == 0, done.stderr


def submitted(store: SqlStore, searches: list[str]) -> list[RunRecord]:
    """Return the runs whose job the engine has."""
    return [run for each in searches for run in runs_of(store, each) if run.state == "submitted"]


def runs_of(store: SqlStore, search_id: str) -> list[RunRecord]:
    return store.runs(search_id=search_id)


def measured_s(run: RunRecord) -> float | None:
    assert run.measurement is not None, run
    return run.measurement.step_s
