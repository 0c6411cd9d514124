"""The schema's version: which one a database has, and how it gets the newest (Alembic's scripts in migrations/)."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import sqlalchemy as sa

from hp_tool.errors import StoreError
from hp_tool.store.base import translated_errors
from hp_tool.store.engine import WRITES, create_engine, parse_url
from hp_tool.store.tables import PREFIX

if TYPE_CHECKING:
    from alembic.config import Config

HEAD = "0008"
"""The newest revision, said here too so that opening a store need not load Alembic; a test compares the two."""
VERSION_TABLE = "hp_alembic_version"
UPGRADE_LOCK = 0x68705F746F6F6C
"""PostgreSQL advisory lock: one upgrade at a time. (SQLite's write lock does the same there.)"""


def current(url: str) -> str | None:
    """The database's revision; None where there is no schema of ours, or no SQLite file (which asking does not make)."""
    parsed = parse_url(url)
    if parsed.get_backend_name() == "sqlite" and not Path(parsed.database or "").is_file():
        return None
    engine = create_engine(url)
    try:
        with translated_errors(engine), engine.begin() as connection:
            return revision(connection)
    finally:
        engine.dispose()


def revision(connection: sa.Connection) -> str | None:
    """The revision that this connection's database has."""
    if not sa.inspect(connection).has_table(VERSION_TABLE):
        return None
    value = connection.execute(sa.text(f"SELECT version_num FROM {VERSION_TABLE}")).scalar_one_or_none()  # noqa: S608
    return None if value is None else str(value)


def upgrade(url: str, *, to: str = "head") -> None:
    """Bring a database to the newest (or a given) revision, in one transaction; harmless where it has it."""
    _migrate(url, to=to, down=False)


def downgrade(url: str, *, to: str) -> None:
    """Take a database back to an older revision (`base`: no tables of ours), losing what only the newer one holds."""
    _migrate(url, to=to, down=True)


def _migrate(url: str, *, to: str, down: bool) -> None:
    from alembic import command
    from alembic.util import CommandError

    engine = create_engine(url, foreign_keys=False)  # SQLite rebuilds tables to change them
    try:
        with translated_errors(engine), engine.execution_options(**{WRITES: True}).begin() as connection:
            if connection.dialect.name == "postgresql":
                connection.execute(sa.select(sa.func.pg_advisory_xact_lock(UPGRADE_LOCK)))
            config = alembic_config()
            config.attributes["connection"] = connection
            (command.downgrade if down else command.upgrade)(config, to)
    except CommandError as error:
        raise StoreError(f"{error}; the database may have been written by a newer hp-tool") from error
    finally:
        engine.dispose()


def alembic_config() -> Config:
    """Alembic's configuration, made in code: installed packages have no place for an ini file."""
    from alembic.config import Config

    config = Config()
    config.set_main_option("script_location", str(migrations_folder()).replace("%", "%%"))
    config.set_main_option("path_separator", "os")
    return config


def migrations_folder() -> Path:
    """Inside the package when installed from a wheel, at the top level in a checkout."""
    installed = Path(__file__).parent / "migrations"
    return installed if installed.is_dir() else Path(__file__).parents[2] / "migrations"


def is_ours(name: str | None, kind: str, _: Any) -> bool:
    """Alembic's include_name: of the tables found in a database only ours are compared, never Optuna's or the user's."""
    return kind != "table" or (name is not None and name.startswith(PREFIX) and name != VERSION_TABLE)
