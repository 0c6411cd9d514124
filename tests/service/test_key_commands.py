"""`hp-tool keys`, on a database of its own."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from hp_tool.cli.main import build
from hp_tool.errors import NotFoundError
from hp_tool.store import open_store


def test_keys_are_made_listed_and_revoked(tmp_path: Path) -> None:
    runner, app, database = (
        CliRunner(),
        build(),
        ["--database-url", f"sqlite:///{tmp_path}/keys.sqlite3"],
    )

    def keys(*arguments: str) -> str:
        done = runner.invoke(app, ["keys", *arguments, *database], catch_exceptions=False)
        assert done.exit_code == 0
        return done.stdout

    made = json.loads(
        keys("create", "--owner", "ada", "--scope", "submit", "--expires-days", "1", "--json")
    )
    token = keys("create", "--owner", "bob", "--scope", "read").strip()
    assert token.startswith("hp_")
    assert made["token"] not in keys("list")
    listed = json.loads(keys("list", "--json"))["items"]
    assert [(key["owner"], key["scope"]) for key in listed] == [("bob", "read"), ("ada", "submit")]
    keys("revoke", made["key"]["id"])
    assert f"{made['key']['id']}  submit  revoked" in keys("list")
    with pytest.raises(NotFoundError, match="No key 'nope'"):
        keys("revoke", "nope")
    store = open_store(database[1])
    assert [record.action for record in store.audit().items] == [
        "keys revoke",
        "keys create",
        "keys create",
    ]
    store.close()
