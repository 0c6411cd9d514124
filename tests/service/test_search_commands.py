"""`hp-tool budget` and `hp-tool cancel`, on a database and on a server."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from hp_tool.cli.main import build
from hp_tool.domain.states import SearchState
from hp_tool.errors import ConflictError, InputError, NotFoundError
from hp_tool.store import SqlStore
from tests.service.coordinator import claim, finish


def run(*arguments: str) -> str:
    done = CliRunner().invoke(build(), arguments, catch_exceptions=False)
    assert done.exit_code == 0, done.output
    return done.stdout


def test_a_budget_changes_in_the_database_and_on_a_server(
    server: str, store: SqlStore, query: dict[str, Any], tmp_path: Path
) -> None:
    search = store.create_search(query=query)
    database = ("--database-url", f"sqlite:///{tmp_path / 'hp.sqlite3'}")
    changed = json.loads(run("budget", search.id, "--runs", "9", *database, "--json"))
    assert (changed["id"], changed["query"]["search"]["budget_runs"]) == (search.id, 9)
    assert "9 runs, 40 GPU-seconds" in run(
        "budget", search.id, "--gpu-seconds", "40", "--server", server
    )
    asked = store.get_search(search_id=search.id).query["search"]
    assert (asked["budget_runs"], asked["budget_gpu_seconds"]) == (9, 40.0)
    for wrong in (
        ("--runs", "0"),
        ("--gpu-seconds", "-1"),
        (),
        ("--runs", "3", "--server", server),
    ):
        with pytest.raises(InputError):
            run("budget", search.id, *wrong, *database)
    with pytest.raises(NotFoundError):
        run("budget", "nope", "--runs", "3", *database)
    finish(store, claim(store, search.id))
    for where in (database, ("--server", server)):
        with pytest.raises(ConflictError, match="succeeded"):
            run("budget", search.id, "--runs", "3", *where)


def test_searches_are_cancelled_in_the_database_and_on_a_server(
    server: str, store: SqlStore, query: dict[str, Any], tmp_path: Path
) -> None:
    failed, running, done = (store.create_search(query=query).id for _ in range(3))
    database = ("--database-url", f"sqlite:///{tmp_path / 'hp.sqlite3'}")
    store.finish_search(
        lease=claim(store, failed), state=SearchState.FAILED, error={"code": "internal"}
    )
    assert json.loads(run("cancel", failed, *database, "--json"))["state"] == "cancelled"
    claim(store, running)
    assert (
        run("cancel", running, "--server", server)
        == f"search {running}: running, cancel requested\n"
    )
    finish(store, claim(store, done))
    for where in (database, ("--server", server)):
        with pytest.raises(ConflictError, match="succeeded"):
            run("cancel", done, *where)
    with pytest.raises(InputError, match="--database-url"):
        run("cancel", failed, "--server", server, *database)
