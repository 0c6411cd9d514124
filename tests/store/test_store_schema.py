"""Migrations: they lead to the tables the code uses, beside other people's tables."""

from __future__ import annotations

import json
import subprocess
import sys
from contextlib import closing
from pathlib import Path
from typing import Any

import optuna
import pytest
import sqlalchemy as sa
from alembic.autogenerate import compare_metadata
from alembic.migration import MigrationContext
from alembic.script import ScriptDirectory

from hp_tool.errors import StoreError
from hp_tool.store import open_store, schema, upgrades
from hp_tool.store.engine import create_engine, parse_url
from hp_tool.store.tables import metadata
from tests.service.editions import older


def table_names(url: str) -> set[str]:
    engine = create_engine(url)
    try:
        return set(sa.inspect(engine).get_table_names())
    finally:
        engine.dispose()


def set_revision(url: str, revision: str) -> None:
    engine = create_engine(url)
    with engine.begin() as connection:
        connection.execute(
            sa.text(f"UPDATE {schema.VERSION_TABLE} SET version_num = :revision"),
            {"revision": revision},
        )
    engine.dispose()


def test_head_is_the_newest_script() -> None:
    assert ScriptDirectory.from_config(schema.alembic_config()).get_current_head() == schema.HEAD


def test_an_upgrade_of_the_newest_schema_changes_nothing(url: str) -> None:
    assert schema.current(url) is None
    for _ in range(2):
        schema.upgrade(url)
        assert schema.current(url) == schema.HEAD
    assert table_names(url) == {schema.VERSION_TABLE, *metadata.tables}


def test_migrations_and_tables_agree_and_optuna_is_left_alone(url: str) -> None:
    optuna.storages.RDBStorage(parse_url(url).render_as_string(hide_password=False))
    optunas = table_names(url)
    assert {"studies", "trials", "alembic_version"} <= optunas
    schema.upgrade(url)
    engine = create_engine(url)
    with engine.connect() as connection:
        options = {
            "include_name": schema.is_hp_table,
            "compare_type": True,
            "version_table": schema.VERSION_TABLE,
        }
        assert (
            compare_metadata(MigrationContext.configure(connection, opts=options), metadata) == []
        )
    engine.dispose()
    assert table_names(url) == optunas | {schema.VERSION_TABLE, *metadata.tables}


def test_the_drift_check_can_fail(url: str) -> None:
    schema.upgrade(url)
    engine = create_engine(url)
    with engine.begin() as connection:
        connection.execute(sa.text("ALTER TABLE hp_events DROP COLUMN kind"))
        options = {
            "include_name": schema.is_hp_table,
            "compare_type": True,
            "version_table": schema.VERSION_TABLE,
        }
        ((change, _, table, column),) = compare_metadata(
            MigrationContext.configure(connection, opts=options), metadata
        )
    engine.dispose()
    assert (change, table, column.name) == ("add_column", "hp_events", "kind")


def test_a_failing_migration_leaves_nothing_behind(url: str) -> None:
    engine = create_engine(url)
    with engine.begin() as connection:
        connection.execute(
            sa.text("CREATE TABLE hp_runs (id INTEGER)")
        )  # in the way of the script's third table or so
    with pytest.raises(StoreError, match="hp_runs"):
        schema.upgrade(url)
    assert table_names(url) == {"hp_runs"}
    engine.dispose()


def test_a_database_of_a_newer_version_is_refused(url: str) -> None:
    schema.upgrade(url)
    set_revision(url, "9999")
    for door in (open_store, upgrades.upgrade):
        with pytest.raises(StoreError, match=r"newer hp-tool|schema 9999") as refused:
            door(url)
        assert refused.value.code == "older_edition"


def test_sqlite_is_upgraded_on_opening(tmp_path: Path) -> None:
    url = f"sqlite:///{tmp_path}/some/where/store.sqlite3"
    assert schema.current(url) is None
    assert not (tmp_path / "some").exists()  # looking makes nothing
    open_store(url).close()
    assert schema.current(url) == schema.HEAD


@pytest.mark.components
def test_postgresql_is_upgraded_only_on_demand(postgres_url: str) -> None:
    with pytest.raises(StoreError, match="hp-tool db upgrade") as caught:
        open_store(postgres_url)
    assert caught.value.code == "schema_outdated"
    assert table_names(postgres_url) == set()


def test_the_wheel_takes_the_migrations_along() -> None:
    import tomllib

    root = Path(schema.__file__).parents[2]
    included = tomllib.loads((root / "pyproject.toml").read_text())["tool"]["hatch"]["build"][
        "targets"
    ]["wheel"]["force-include"]
    assert included["migrations"] == "hp_tool/store/migrations"
    assert schema.migrations_folder() == root / "migrations"


def described(url: str) -> dict[str, Any]:
    """Return columns, keys and indexes of our tables, by table."""
    engine = create_engine(url)
    with engine.connect() as connection:
        found = sa.inspect(connection)
        tables = {
            name: {
                "columns": {
                    column["name"]: [str(column["type"]), column["nullable"], column["default"]]
                    for column in found.get_columns(name)
                },
                "primary key": found.get_pk_constraint(name),
                "unique": sorted(found.get_unique_constraints(name), key=str),
                "foreign keys": sorted(found.get_foreign_keys(name), key=str),
                "checks": found.get_check_constraints(name),
                "indexes": sorted(found.get_indexes(name), key=str),
            }
            for name in found.get_table_names()
            if name in metadata.tables
        }
    engine.dispose()
    loaded: dict[str, Any] = json.loads(json.dumps(tables))
    return loaded


def test_the_first_schema_is_the_one_that_the_previews_migrated_to(url: str) -> None:
    """preview_schema.json describes databases that the 16 migrations of the last preview made."""
    schema.upgrade(url)
    recorded = json.loads((Path(__file__).parent / "preview_schema.json").read_text())
    assert described(url) == recorded[parse_url(url).get_backend_name()]


def test_a_database_of_an_earlier_preview_is_refused_unchanged(url: str) -> None:
    schema.upgrade(url)
    set_revision(url, "0015")
    for door in (open_store, upgrades.upgrade, schema.upgrade):
        with pytest.raises(StoreError, match=schema.LAST_PREVIEW) as refused:
            door(url)
        assert refused.value.code == "preview_schema"
    assert schema.current(url) == "0015"


@pytest.mark.components
def test_upgrades_lose_nothing(url: str, tmp_path: Path) -> None:
    """A database that the last preview filled opens as it is."""
    preview = older(tmp_path / "preview", commit=schema.LAST_PREVIEW)
    places = {"database_url": url, "home": tmp_path}
    assert preview.run("db", "upgrade", **places).returncode == 0
    code = (
        "from hp_tool.store import open_store; "
        "open_store().create_search(query={'kind': 'training', 'model': 'gpt'})"
    )
    subprocess.run(
        [sys.executable, "-c", code],
        cwd=preview.folder,
        env=preview.environment(url, tmp_path),
        check=True,
    )
    upgrades.upgrade(url)
    with closing(open_store(url)) as store:
        (search,) = store.list_searches(kind="training").items
    assert search.query["model"] == "gpt"
