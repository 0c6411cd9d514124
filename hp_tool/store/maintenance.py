"""Whole databases: a backup of one, a copy into another."""

from contextlib import closing
from pathlib import Path

import sqlalchemy as sa

from hp_tool.errors import ConflictError, InputError, NotFoundError, StoreError, UnsupportedError
from hp_tool.store import schema, tables
from hp_tool.store.base import transaction, translated_errors, writing
from hp_tool.store.engine import masked, opened, parse_url

BATCH_ROWS = 500


def backup(*, url: str, path: Path) -> None:
    """Write a consistent copy of a SQLite database, in use or not, to a new file; Optuna's tables
    go with it.

    UnsupportedError for PostgreSQL, with the command that does it; InputError where the file
    exists.
    """
    parsed = parse_url(url)
    if parsed.get_backend_name() != "sqlite":
        reachable = parsed.set(drivername="postgresql").render_as_string(hide_password=True)
        raise UnsupportedError(
            f"PostgreSQL has its own backup: pg_dump --format=custom --file={path} '{reachable}'"
        )
    if not Path(parsed.database or "").is_file():
        raise NotFoundError(f"there is no database at {parsed.database}", field="database_url")
    if path.exists():
        raise InputError(f"{path} exists; a backup replaces nothing", field="path")
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(path.name + ".partial")
    partial.unlink(missing_ok=True)
    partial.touch(mode=0o600)  # for its owner's eyes alone, as the database itself
    with (
        opened(url) as engine,
        translated_errors(engine),
        closing(engine.raw_connection()) as connection,
    ):
        connection.cursor().execute("VACUUM INTO ?", (str(partial),))
    partial.rename(path)


def copy(*, source: str, target: str) -> dict[str, int]:
    """Copy all our tables from one database into another one without such rows; the number of rows
    by table.

    The target's schema is made or upgraded first. The source is read as of one instant and only
    read; the target gets everything or nothing. StoreError where the source has another schema
    version, ConflictError where the target has rows.
    """
    if (revision := schema.current(source)) != schema.HEAD:
        state = (
            "has no hp-tool schema"
            if revision is None
            else f"has schema {revision}, not {schema.HEAD}"
        )
        raise StoreError(
            f"{masked(source)} {state}: run `hp-tool db upgrade` on it first",
            code="schema_outdated",
        )
    schema.upgrade(target)
    with opened(source) as reader, opened(target) as writer:
        if reader.dialect.name == "postgresql":
            reader = reader.execution_options(isolation_level="REPEATABLE READ")
        with transaction(reader) as read, writing(writer) as write:
            return {
                table.name: _copy_table(read, write, table)
                for table in tables.metadata.sorted_tables
            }


def _copy_table(read: sa.Connection, write: sa.Connection, table: sa.Table) -> int:
    if write.execute(sa.select(sa.literal(1)).select_from(table).limit(1)).first() is not None:
        raise ConflictError(
            f"the target already has rows in {table.name}; a copy needs one without"
        )
    copied = 0
    rows = read.execution_options(yield_per=BATCH_ROWS).execute(sa.select(table))
    for batch in rows.mappings().partitions():
        write.execute(sa.insert(table), [dict(row) for row in batch])
        copied += len(batch)
    return copied
