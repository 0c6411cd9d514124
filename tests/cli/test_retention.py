"""`hp-tool db prune` and what tells of it: ended searches and the folders of their runs go by age
and number, nothing else.
"""

from __future__ import annotations

import fcntl
import json
import os
from collections.abc import Iterator
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from unittest import mock

import optuna
import pytest
import sqlalchemy as sa

from hp_tool.domain.records import RunRecord
from hp_tool.domain.states import SearchState
from hp_tool.loop.tuning.study import opened_studies
from hp_tool.store import SqlStore, open_store
from hp_tool.store.engine import open_engine
from tests.cli.conftest import Run
from tests.command_line import Ended
from tests.store.acting import NewMeasurementFactory, claimed, intended
from tests.store.conftest import new_measurement, store_url

__all__ = ["new_measurement", "store_url"]


@dataclass
class Kept:
    """A database, a runs folder, and what `hp-tool` makes of them."""

    url: str
    runs: Path
    store: SqlStore
    measured: NewMeasurementFactory
    run: Run

    def hp_tool(self, *arguments: str, **environment: str) -> Ended:
        with mock.patch.dict(
            os.environ, {"HP_DATABASE_URL": self.url, "HP_RUNS_DIR": str(self.runs), **environment}
        ):
            return self.run(*arguments)

    def prune(self, *arguments: str, **environment: str) -> dict[str, int]:
        done = self.hp_tool("db", "prune", "--json", *arguments, **environment)
        assert done.returncode == 0, done.stderr
        answer: dict[str, int] = json.loads(done.stdout)
        return answer

    def search(self, *, days: float, ended: bool = True) -> RunRecord:
        """A search with a finished run, whose folder lies there, which ended so many days ago."""
        lease = claimed(self.store)
        run = intended(self.store, lease)
        if ended:
            run = self.store.finish_run(
                lease=lease, run_id=run.id, measurement=self.measured(), gpu_seconds=1.0
            )
            self.store.finish_search(
                lease=lease, state=SearchState.SUCCEEDED, result={"search": {}}
            )
        with opened_studies(self.url) as storage:
            optuna.create_study(storage=storage, study_name=run.search_id)
        self.folder(run.job_name)
        self.age(run, days=days)
        return run

    def age(self, run: RunRecord, *, days: float) -> None:
        ago = {
            "sqlite": f"datetime('now', '-{days} days')",
            "postgresql": f"now() - interval '{days} days'",
        }
        with open_engine(self.url) as engine, engine.begin() as connection:
            for table, key, value in (
                ("hp_searches", "id", run.search_id),
                ("hp_runs", "id", run.id),
            ):
                changed = (
                    f"UPDATE {table} SET created_at = {ago[engine.dialect.name]}, "
                    "finished_at = CASE WHEN finished_at "
                )
                changed += (
                    f"IS NULL THEN NULL ELSE {ago[engine.dialect.name]} END WHERE {key} = :value"
                )
                connection.execute(sa.text(changed), {"value": value})

    def folder(self, name: str) -> Path:
        folder = self.runs / name
        folder.mkdir(parents=True)
        for file in ("request.json", "job.log"):
            (folder / file).write_text("x" * 1000)
        return folder

    def folders(self) -> set[str]:
        return {each.name for each in self.runs.iterdir()}

    def searches(self) -> set[str]:
        return {each.id for each in self.store.list_searches(limit=100).items}


@pytest.fixture
def kept(
    store_url: str, tmp_path: Path, new_measurement: NewMeasurementFactory, entry_point: Run
) -> Iterator[Kept]:
    with closing(open_store(store_url)) as store:
        yield Kept(
            url=store_url,
            runs=tmp_path / "runs",
            store=store,
            measured=new_measurement,
            run=entry_point,
        )


def test_searches_go_by_age_with_their_folders_and_studies(kept: Kept) -> None:
    old, young, running = (
        kept.search(days=40),
        kept.search(days=10),
        kept.search(days=40, ended=False),
    )
    foreign = kept.folder("hp-of-another-database-r0-t1")
    dry = kept.prune("--searches-older-than", "30", "--dry-run")
    assert (dry["searches"], dry["folders"], dry["folder_bytes"]) == (1, 1, 2000)
    assert len(kept.folders()) == 4 and len(kept.searches()) == 3  # nothing went
    assert kept.prune("--searches-older-than", "30") == dry
    assert kept.searches() == {young.search_id, running.search_id}
    assert kept.folders() == {young.job_name, running.job_name, foreign.name}
    with opened_studies(kept.url) as storage:
        names = set(optuna.get_all_study_names(storage))
    assert names >= {young.search_id, running.search_id} and old.search_id not in names
    assert len(kept.store.measurements().items) == 2  # what was measured stays
    assert kept.hp_tool("db", "prune", "--searches-older-than", "30").stdout.startswith(
        "deleted 0 searches"
    )


def test_searches_go_by_number_and_yesterdays_stay(kept: Kept) -> None:
    runs = [kept.search(days=days) for days in (30, 20, 10, 0)]
    assert kept.prune("--keep-searches", "2")["searches"] == 2
    assert kept.searches() == {run.search_id for run in runs[2:]}
    assert kept.prune("--keep-searches", "0")["searches"] == 1
    assert kept.searches() == {runs[3].search_id}  # a client may still follow it


def test_folders_go_alone_by_age_and_number(kept: Kept) -> None:
    runs = [kept.search(days=days) for days in (40, 30, 20, 10, 0)]
    assert kept.prune("--folders-older-than", "35")["folders"] == 1
    assert kept.prune("--keep-folders", "2")["folders"] == 2
    assert kept.folders() == {run.job_name for run in runs[3:]}
    assert len(kept.searches()) == 5
    assert kept.store.runs(search_id=runs[0].search_id)[0].measurement is not None


def test_the_bytes_of_all_deleted_folders_are_added(kept: Kept) -> None:
    for _ in range(3):
        kept.search(days=40)
    for dry_run in (["--dry-run"], []):
        deleted = kept.prune("--folders-older-than", "30", *dry_run)
        assert (deleted["folders"], deleted["folder_bytes"]) == (3, 3 * 2000)


def test_what_lives_or_lies_elsewhere_is_not_followed(kept: Kept, tmp_path: Path) -> None:
    alive, linked = kept.search(days=40), kept.search(days=40)
    treasure = tmp_path / "treasure"
    treasure.mkdir()
    (treasure / "gold").touch()
    (kept.runs / linked.job_name).rename(tmp_path / "away")
    (kept.runs / linked.job_name).symlink_to(treasure)
    with (kept.runs / alive.job_name / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        kept.prune("--folders-older-than", "30")
    assert kept.folders() == {alive.job_name}
    assert (treasure / "gold").exists()


def test_measurements_go_only_on_request(kept: Kept) -> None:
    run = kept.search(days=40)
    with open_engine(kept.url) as engine, engine.begin() as connection:
        connection.execute(
            sa.text("UPDATE hp_measurements SET created_at = (SELECT created_at FROM hp_runs)")
        )
    everything = ("--older-than", "30", "--searches-older-than", "30", "--folders-older-than", "30")
    assert kept.prune(*everything)["searches"] == 1
    assert [each.search_id for each in kept.store.measurements().items] == [None]
    assert kept.prune("--measurements-older-than", "30")["measurements"] == 1
    assert kept.store.measurements().items == ()
    assert run.search_id not in kept.searches()


def test_silent_watched_jobs_go_only_on_request(kept: Kept) -> None:
    old, new = (
        kept.store.create_watch(name=name, query=None, expected=None).id for name in ("old", "new")
    )
    with open_engine(kept.url) as engine, engine.begin() as connection:
        aged = sa.text(
            "UPDATE hp_watches SET updated_at = datetime(updated_at, '-40 days') WHERE id = :id"
        )
        if engine.dialect.name == "postgresql":
            aged = sa.text(
                "UPDATE hp_watches SET updated_at = updated_at - interval '40 days' WHERE id = :id"
            )
        connection.execute(aged, {"id": old})
    assert "watches" not in kept.prune("--older-than", "30")
    assert kept.prune("--watches-older-than", "50")["watches"] == 0
    assert kept.prune(HP_RETENTION_WATCH_DAYS="30")["watches"] == 1
    assert [each.id for each in kept.store.list_watches().items] == [new]


def test_settings_stand_for_flags_and_one_is_needed(kept: Kept) -> None:
    kept.search(days=40)
    refused = kept.hp_tool("db", "prune")
    assert refused.returncode == 2
    assert (
        "--searches-older-than" in refused.stderr and "HP_RETENTION_SEARCH_DAYS" in refused.stderr
    )
    assert kept.prune(HP_RETENTION_SEARCH_DAYS="50")["searches"] == 0
    assert kept.prune(HP_RETENTION_SEARCHES="0")["searches"] == 1
    assert kept.hp_tool("db", "prune", "--searches-older-than", "0.5").returncode == 2


def test_doctor_counts_what_is_kept(kept: Kept) -> None:
    kept.search(days=40)
    checks = {
        each["name"]: each for each in json.loads(kept.hp_tool("doctor", "--json").stdout)["checks"]
    }
    assert "1 ended search, the oldest 40 days" in checks["retention"]["detail"]
    assert (
        "1 run folder" in checks["retention"]["detail"]
        and "db prune" in checks["retention"]["detail"]
    )
    checks = {
        each["name"]: each
        for each in json.loads(
            kept.hp_tool("doctor", "--json", HP_RETENTION_SEARCH_DAYS="90").stdout
        )["checks"]
    }
    assert "searches for 90 days" in checks["retention"]["detail"]
