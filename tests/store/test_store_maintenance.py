"""Backups and copies of whole databases, and the commands that make them."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import typer
from typer.testing import CliRunner

from hp_tool.cli import db
from hp_tool.domain.access import NewKey, Scope
from hp_tool.domain.measurement import Fidelity
from hp_tool.domain.measurement_records import NewMeasurement
from hp_tool.domain.parallel import ParallelConfig
from hp_tool.domain.records import Label
from hp_tool.domain.states import SearchState
from hp_tool.domain.watch_records import WatchChange
from hp_tool.errors import ConflictError, InputError, NotFoundError, StoreError, UnsupportedError
from hp_tool.store import SqlStore, maintenance, open_store, schema
from hp_tool.store.tables import metadata


def fill(store: SqlStore, new_measurement: Callable[..., NewMeasurement]) -> None:
    """At least a row in every table."""
    store.create_search(
        query={"model": "größe"},
        owner="ada",
        idempotency_key="k",
        webhook="https://example.org/ended",
    )
    store.announce_worker(holder="w", offers=[])
    claim = store.claim_search(holder="w", lease_s=60.0)
    assert claim is not None
    store.label_search(search_id=claim[0].id, label=Label(name="first"))
    run = store.intend_run(
        lease=claim[1], parallel=ParallelConfig(), fidelity=Fidelity(), predicted={"step_s": 1.25}
    )
    store.finish_run(lease=claim[1], run_id=run.id, measurement=new_measurement(), gpu_seconds=2.0)
    store.finish_search(lease=claim[1], state=SearchState.SUCCEEDED, result={"z": 1, "a": 2})
    for _ in range(3):
        added = store.add_measurement(measurement=new_measurement())
    store.set_measurement_state(measurement_id=added.id, state="excluded")
    store.save_calibration(cluster_key="c", framework="f", payload={}, num_measurements=1)
    store.put_registration(kind="cluster", name="lab", spec={"gpu": "cpu"})
    store.add_key(key=NewKey(id="ab", owner="ada", scope=Scope.SUBMIT, secret_sha256="00"))
    watch = store.create_watch(name="job", query={"kind": "training"}, expected=None)
    made = WatchChange(state={"steps": 1}, source={"rank": 0}, status="learning")
    store.change_watch(watch_id=watch.id, source="s", change=lambda *_: made)
    store.add_audit(
        owner="ada",
        api_key_id="ab",
        action="POST /v1/searches",
        resource="/v1/searches",
        outcome="202",
    )


def content(store: SqlStore) -> list[object]:
    (search,) = store.list_searches().items
    whole = store.get_search(search_id=search.id)
    assert whole.result is not None
    return [
        whole,
        list(whole.result),  # the order of keys, which == does not see
        store.runs(search_id=search.id),
        store.events(search_id=search.id),
        store.measurements().items,
        store.due_refits(),
        store.list_calibrations().items,
        store.list_registrations(kind="cluster"),
        store.list_watches().items,
        list(store.watch_sources(watch_id=store.list_watches().items[0].id)),
        store.list_keys().items,
        store.audit().items,
    ]


def test_a_copy_there_and_back_is_the_same(
    store: SqlStore,
    url: str,
    tmp_path: Path,
    store_url: str,
    new_measurement: Callable[..., NewMeasurement],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    fill(store, new_measurement)
    monkeypatch.setattr(maintenance, "BATCH_ROWS", 2)
    rows = maintenance.copy(source=store_url, target=url)
    assert set(rows) == set(metadata.tables)
    assert all(rows.values())
    back = f"sqlite:///{tmp_path}/back.sqlite3"
    assert maintenance.copy(source=url, target=back) == rows
    assert content(open_store(url)) == content(open_store(back)) == content(store)
    with pytest.raises(ConflictError, match="already has rows"):
        maintenance.copy(source=store_url, target=back)
    assert content(open_store(back)) == content(store)


def test_a_source_without_schema_is_refused(tmp_path: Path) -> None:
    with pytest.raises(StoreError, match="no hp-tool schema"):
        maintenance.copy(
            source=f"sqlite:///{tmp_path}/a.sqlite3", target=f"sqlite:///{tmp_path}/b.sqlite3"
        )
    assert list(tmp_path.iterdir()) == []


def test_backups_are_complete(
    tmp_path: Path, new_measurement: Callable[..., NewMeasurement]
) -> None:
    url, path = f"sqlite:///{tmp_path}/s.sqlite3", tmp_path / "backups" / "s.backup"
    store = open_store(url)
    fill(store, new_measurement)
    maintenance.backup(url=url, path=path)
    assert [file.name for file in path.parent.iterdir()] == ["s.backup"]
    assert content(open_store(f"sqlite:///{path}")) == content(store)
    with pytest.raises(InputError, match="exists"):
        maintenance.backup(url=url, path=path)
    with pytest.raises(NotFoundError):
        maintenance.backup(url=f"sqlite:///{tmp_path}/none.sqlite3", path=tmp_path / "none")


def test_postgresql_is_backed_up_by_its_own_tool() -> None:
    with pytest.raises(UnsupportedError) as caught:
        maintenance.backup(url="postgresql://ada:hunter2@h/d", path=Path("/x/s.dump"))
    assert (
        "pg_dump --format=custom --file=/x/s.dump 'postgresql://ada:***@h/d'"
        in caught.value.message
    )


def test_the_commands(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    app = typer.Typer()
    app.add_typer(db.db, name="db")
    url = f"sqlite:///{tmp_path}/s.sqlite3"
    monkeypatch.setenv("HP_DATABASE_URL", url)

    def run(*arguments: str) -> str:
        result = CliRunner().invoke(app, ["db", *arguments], catch_exceptions=False)
        assert result.exit_code == 0, result.output
        return result.stdout

    assert json.loads(run("current", "--json")) == {
        "database": url,
        "current": None,
        "head": schema.HEAD,
    }
    assert f"schema {schema.HEAD}" in run("upgrade")
    assert json.loads(run("current", "--json"))["current"] == schema.HEAD
    run("backup", str(tmp_path / "b.sqlite3"))
    copied = json.loads(run("copy", url, f"sqlite:///{tmp_path}/c.sqlite3", "--json"))
    assert copied == {"rows": dict.fromkeys(metadata.tables, 0)}
