"""Back up a database, and copy one database into another."""

from contextlib import closing
from pathlib import Path

import sqlalchemy as sa

from hp_tool.errors import ConflictError, InputError, NotFoundError, StoreError, UnsupportedError
from hp_tool.store import schema, tables
from hp_tool.store.base import transaction, translated_errors, write_transaction
from hp_tool.store.engine import mask_password, open_engine, parse_url

BATCH_ROWS = 500


def backup(*, url: str, path: Path) -> None:
    """Back up a SQLite database, including Optuna's tables, to a new file.

    The copy is consistent even if the database is in use.

    Raises:
        UnsupportedError: The database is PostgreSQL. The message contains the pg_dump command.
        NotFoundError: The database file does not exist.
        InputError: `path` already exists.
    """
    parsed = parse_url(url)
    if parsed.get_backend_name() != "sqlite":
        reachable = parsed.set(drivername="postgresql").render_as_string(hide_password=True)
        raise UnsupportedError(
            f"Use pg_dump to back up PostgreSQL: pg_dump --format=custom --file={path} "
            f"'{reachable}'"
        )
    if not Path(parsed.database or "").is_file():
        raise NotFoundError(f"No database at {parsed.database}.", field="database_url")
    if path.exists():
        raise InputError(f"{path} exists. Choose a new file for the backup.", field="path")
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(path.name + ".partial")
    partial.unlink(missing_ok=True)
    partial.touch(mode=0o600)  # readable by the owner only, like the database
    with (
        open_engine(url) as engine,
        translated_errors(engine),
        closing(engine.raw_connection()) as connection,
    ):
        connection.cursor().execute("VACUUM INTO ?", (str(partial),))
    partial.rename(path)


def copy(*, source: str, target: str) -> dict[str, int]:
    """Copy hp_tool's tables from one database to another.

    The target's schema is created or upgraded first. The source is read in one snapshot, and the
    target is written in one transaction.

    Returns:
        Number of copied rows by table.

    Raises:
        StoreError: The source has a different schema version.
        ConflictError: The target already has rows.
    """
    if (revision := schema.current(source)) != schema.HEAD:
        state = (
            "has no hp-tool schema"
            if revision is None
            else f"has schema {revision}, not {schema.HEAD}"
        )
        raise StoreError(
            f"{mask_password(source)} {state}: run `hp-tool db upgrade` on it first",
            code="schema_outdated",
        )
    schema.upgrade(target)
    with open_engine(source) as reader, open_engine(target) as writer:
        if reader.dialect.name == "postgresql":
            reader = reader.execution_options(isolation_level="REPEATABLE READ")
        with transaction(reader) as read, write_transaction(writer) as write:
            return {
                table.name: _copy_table(read, write, table)
                for table in tables.metadata.sorted_tables
            }


def _copy_table(read: sa.Connection, write: sa.Connection, table: sa.Table) -> int:
    if write.execute(sa.select(sa.literal(1)).select_from(table).limit(1)).first() is not None:
        raise ConflictError(
            f"The target already has rows in {table.name}. Copy into an empty database."
        )
    copied = 0
    rows = read.execution_options(yield_per=BATCH_ROWS).execute(sa.select(table))
    for batch in rows.mappings().partitions():
        write.execute(sa.insert(table), [dict(row) for row in batch])
        copied += len(batch)
    return copied
