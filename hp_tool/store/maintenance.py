"""Whole databases: a backup of one, a copy into another, and what of it may be forgotten."""

from contextlib import closing
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any

import sqlalchemy as sa

from hp_tool.errors import ConflictError, InputError, NotFoundError, StoreError, UnsupportedError
from hp_tool.store import schema, tables
from hp_tool.store.base import ENDED, StoreBase, now, transaction, translated_errors, writing
from hp_tool.store.engine import masked, opened, parse_url

BATCH_ROWS = 500
PRUNED_ROWS = 1000
"""Rows per transaction: nobody waits long for the write lock."""
SECONDS_A_DAY = 86_400.0
SHORTEST_DAYS = 1.0
"""A client may still follow yesterday's search, or send a request of yesterday again."""


def backup(*, url: str, path: Path) -> None:
    """Write a consistent copy of a SQLite database, in use or not, to a new file; Optuna's tables go with it.

    UnsupportedError for PostgreSQL, with the command that does it; InputError where the file exists.
    """
    parsed = parse_url(url)
    if parsed.get_backend_name() != "sqlite":
        reachable = parsed.set(drivername="postgresql").render_as_string(hide_password=True)
        raise UnsupportedError(f"PostgreSQL has its own backup: pg_dump --format=custom --file={path} '{reachable}'")
    if not Path(parsed.database or "").is_file():
        raise NotFoundError(f"there is no database at {parsed.database}", field="database_url")
    if path.exists():
        raise InputError(f"{path} exists; a backup replaces nothing", field="path")
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(path.name + ".partial")
    partial.unlink(missing_ok=True)
    partial.touch(mode=0o600)  # for its owner's eyes alone, as the database itself
    with opened(url) as engine, translated_errors(engine), closing(engine.raw_connection()) as connection:
        connection.cursor().execute("VACUUM INTO ?", (str(partial),))
    partial.rename(path)


def copy(*, source: str, target: str) -> dict[str, int]:
    """Copy all our tables from one database into another one without such rows; the number of rows by table.

    The target's schema is made or upgraded first. The source is read as of one instant and only read; the target gets
    everything or nothing. StoreError where the source has another schema version, ConflictError where the target has rows.
    """
    if (revision := schema.current(source)) != schema.HEAD:
        state = "has no hp-tool schema" if revision is None else f"has schema {revision}, not {schema.HEAD}"
        raise StoreError(f"{masked(source)} {state}: run `hp-tool db upgrade` on it first", code="schema_outdated")
    schema.upgrade(target)
    with opened(source) as reader, opened(target) as writer:
        if reader.dialect.name == "postgresql":
            reader = reader.execution_options(isolation_level="REPEATABLE READ")
        with transaction(reader) as read, writing(writer) as write:
            return {table.name: _copy_table(read, write, table) for table in tables.metadata.sorted_tables}


def _copy_table(read: sa.Connection, write: sa.Connection, table: sa.Table) -> int:
    if write.execute(sa.select(sa.literal(1)).select_from(table).limit(1)).first() is not None:
        raise ConflictError(f"the target already has rows in {table.name}; a copy needs one without")
    copied = 0
    rows = read.execution_options(yield_per=BATCH_ROWS).execute(sa.select(table))
    for batch in rows.mappings().partitions():
        write.execute(sa.insert(table), [dict(row) for row in batch])
        copied += len(batch)
    return copied


class Retention(StoreBase):
    """The part of `AccessStore` that forgets."""

    def prune(self, *, older_than_days: float) -> dict[str, int]:
        if not SHORTEST_DAYS <= older_than_days <= 36_500:
            raise InputError(f"{older_than_days:g} days; it must be from {SHORTEST_DAYS:g} to 36500", field="older_than_days")
        with self._reading() as connection:
            before = now(connection) - timedelta(seconds=older_than_days * SECONDS_A_DAY)
        search, event = tables.searches.c, tables.events.c
        of_old = sa.exists().where(search.id == event.search_id, search.state.in_(ENDED), search.finished_at < before)
        used, gone = tables.idempotency_keys.c, tables.measurements
        return {
            "events": self._delete(tables.events, sa.tuple_(event.search_id, event.seq), of_old),
            "audit": self._delete(tables.audit, tables.audit.c.id, tables.audit.c.created_at < before),
            "idempotency_keys": self._delete(
                tables.idempotency_keys, sa.tuple_(used.scope, used.owner, used.key), used.created_at < before
            ),
            "logs": self._cut_logs(before),
            "measurements": self._delete(gone, gone.c.id, sa.and_(gone.c.state == "deleted", gone.c.created_at < before)),
        }

    def _delete(self, table: sa.Table, key: Any, old: sa.ColumnElement[bool]) -> int:
        """Delete what is old, some rows at a time; how many there were."""
        columns = list(table.primary_key.columns)
        total = 0
        while True:
            with self._writing() as connection:
                some = sa.select(*columns).where(old).limit(PRUNED_ROWS)
                gone = connection.execute(sa.delete(table).where(key.in_(some))).rowcount
            total += gone
            if gone < PRUNED_ROWS:
                return total

    def _cut_logs(self, before: datetime) -> int:
        """Take the ends of logs out of old measurements; status and cause stay."""
        table, last, total = tables.measurements, "", 0
        holds_log = table.c.measurement["log_tail"].as_string() != ""
        while True:
            with self._writing() as connection:
                query = sa.select(table.c.id, table.c.measurement).where(
                    table.c.status != "ok", table.c.created_at < before, table.c.id > last, holds_log
                )
                rows = connection.execute(query.order_by(table.c.id).limit(PRUNED_ROWS)).all()
                for row in rows:
                    cut = row.measurement | {"log_tail": None}
                    connection.execute(sa.update(table).where(table.c.id == row.id).values(measurement=cut))
            total += len(rows)
            if len(rows) < PRUNED_ROWS:
                return total
            last = rows[-1].id
