"""`hp-tool cancel`, on a database and on a server."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from hp_tool.cli.main import build
from hp_tool.domain.records import SearchState
from hp_tool.errors import ConflictError, InputError
from hp_tool.store import SqlStore
from tests.service.coordinator import claim, finish


def run(*arguments: str) -> str:
    done = CliRunner().invoke(build(), ["cancel", *arguments], catch_exceptions=False)
    assert done.exit_code == 0, done.output
    return done.stdout


def test_searches_are_cancelled_in_the_database_and_on_a_server(
    server: str, store: SqlStore, query: dict[str, Any], tmp_path: Path
) -> None:
    failed, running, done = (store.create_search(query=query).id for _ in range(3))
    database = ("--database-url", f"sqlite:///{tmp_path / 'hp.sqlite3'}")
    store.finish_search(lease=claim(store, failed), state=SearchState.FAILED, error={"code": "internal"})
    assert json.loads(run(failed, *database, "--json"))["state"] == "cancelled"
    claim(store, running)
    assert run(running, "--server", server) == f"search {running}: running, cancel requested\n"
    finish(store, claim(store, done))
    for where in (database, ("--server", server)):
        with pytest.raises(ConflictError, match="succeeded"):
            run(done, *where)
    with pytest.raises(InputError, match="--database-url"):
        run(failed, "--server", server, *database)
