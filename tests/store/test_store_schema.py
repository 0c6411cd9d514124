"""Migrations: they lead to the tables the code uses, there and back, beside other people's
tables.
"""

from __future__ import annotations

from pathlib import Path

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
from tests.store.acting import NewMeasurementFactory
from tests.store.test_store_maintenance import fill


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


def test_up_down_up(url: str) -> None:
    assert schema.current(url) is None
    for _ in range(2):  # the second time nothing is left to do
        schema.upgrade(url)
        assert schema.current(url) == schema.HEAD
    schema.downgrade(url, to="base")
    assert schema.current(url) is None
    assert table_names(url) == {schema.VERSION_TABLE}
    schema.upgrade(url)
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
    schema.downgrade(url, to="base")
    assert table_names(url) == optunas | {schema.VERSION_TABLE}


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


def test_searches_stored_before_are_found_by_kind_and_model(url: str) -> None:
    schema.upgrade(url)
    store = open_store(url)
    asked = (
        {"kind": "training", "model": "gpt"},
        {"kind": "inference", "model": {"name": "mine"}},
        {"model": 3},
    )
    ids = [store.create_search(query=query).id for query in asked]
    store.close()
    schema.downgrade(url, to="0005")
    schema.upgrade(url)
    store = open_store(url)
    filters: tuple[dict[str, str], ...] = ({"kind": "training"}, {"model": "mine"}, {})
    found = [[each.id for each in store.list_searches(**given).items] for given in filters]
    store.close()
    assert found == [[ids[0]], [ids[1]], ids[::-1]]


def test_suggested_changes_of_stored_results_are_called_fixes(url: str) -> None:
    schema.upgrade(url)
    store = open_store(url)
    store.create_search(query={"kind": "training", "model": "gpt"})
    store.close()
    engine = create_engine(url)

    def result() -> str:
        statement = sa.text("SELECT CAST(result AS VARCHAR) FROM hp_searches")
        with engine.connect() as connection:
            return str(connection.execute(statement).scalar_one())

    with engine.begin() as connection:
        connection.execute(
            sa.text("UPDATE hp_searches SET result = :result"),
            {"result": '{"fixes": [], "model": "mends", "answer": {"verdict": {}}}'},
        )
    schema.downgrade(url, to="0015")
    assert result() == '{"mends": [], "model": "mends", "answer": {}}'
    with engine.begin() as connection:
        connection.execute(
            sa.text("UPDATE hp_searches SET result = :result"),
            {"result": '{"mends": [], "model": "mends", "answer": {"advice": "keep"}}'},
        )
    schema.upgrade(url)
    assert result() == '{"fixes": [], "model": "mends", "answer": {}}'
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


def rows(url: str) -> dict[str, list[dict[str, object]]]:
    """All that our tables hold, as it lies there; nothing and an empty text are the same."""
    engine = create_engine(url)
    found = sa.MetaData()
    found.reflect(engine)
    with engine.connect() as connection:
        content = {
            name: [
                {key: value or None for key, value in row._mapping.items()}
                for row in connection.execute(sa.select(table).order_by(*table.primary_key))
            ]
            for name, table in found.tables.items()
            if name != schema.VERSION_TABLE
        }
    engine.dispose()
    return content


@pytest.mark.parametrize(
    "url",
    [
        pytest.param("sqlite", marks=pytest.mark.components),
        pytest.param("postgresql", marks=[pytest.mark.components, pytest.mark.long]),
    ],
    indirect=True,
)
def test_upgrades_lose_nothing(url: str, new_measurement: NewMeasurementFactory) -> None:
    """Data of every schema there was: each is reached by the way back, filled, and upgraded."""
    schema.upgrade(url)
    store = open_store(url)
    fill(store, new_measurement)
    store.close()
    revisions = [
        script.revision
        for script in ScriptDirectory.from_config(schema.alembic_config()).walk_revisions()
    ]
    for revision in revisions[1:]:
        schema.downgrade(url, to=revision)
        before = rows(url)
        assert sum(map(len, before.values())) > 10
        schema.upgrade(url)
        after = rows(url)
        for table, lines in before.items():
            kept = (
                [{column: line[column] for column in lines[0]} for line in after[table]]
                if lines
                else after[table]
            )
            assert kept == lines, (revision, table)
    open_store(url).close()
