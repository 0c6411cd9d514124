"""Online migrations of large tables: move rows in batches, create indexes concurrently.

A migration that calls these functions commits piece by piece. Pieces that an interrupted upgrade
completed are skipped or change nothing, so the migration can run again. It must first expand
(columns, indexes), then move rows, then contract.
"""

from collections.abc import Callable, Sequence
from typing import Any

import sqlalchemy as sa
from alembic import op

from hp_tool.store.base import transaction, writing

BATCH_ROWS = 500
"""Rows changed per transaction, which takes some milliseconds."""
Change = Callable[[sa.Connection, Sequence[sa.Row[Any]]], None]


def add_column(table: str, column: sa.Column[Any]) -> None:
    """Add a column unless the table has it."""
    if column.name not in {found["name"] for found in sa.inspect(op.get_bind()).get_columns(table)}:
        op.add_column(table, column)


def create_index(name: str, table: str, columns: Sequence[str]) -> None:
    """Create an index unless it exists; on PostgreSQL without blocking writers."""
    with op.get_context().autocommit_block():
        if op.get_bind().dialect.name == "postgresql" and _is_invalid(name):
            op.drop_index(name, table)
        op.create_index(
            name, table, list(columns), if_not_exists=True, postgresql_concurrently=True
        )


def in_batches(query: sa.Select[Any], *, key: sa.ColumnElement[str], change: Change) -> None:
    """Call `change` with batches of BATCH_ROWS rows, each in its own transaction.

    Args:
        query: Select that includes `key`.
        key: Column that orders the rows.
        change: Updates a batch; must not change rows that it changed before.
    """
    with op.get_context().autocommit_block():
        engine, last = op.get_bind().engine, ""
        while True:
            with transaction(engine) as connection:
                batch = connection.execute(
                    query.where(key > last).order_by(key).limit(BATCH_ROWS)
                ).all()
            if batch:
                with writing(engine) as connection:
                    change(connection, batch)
            if len(batch) < BATCH_ROWS:
                return
            last = batch[-1]._mapping[key]


def update_in_batches(
    table: sa.TableClause, *, where: sa.ColumnElement[bool], values: dict[str, Any]
) -> None:
    """Set `values` in the rows that match `where`; the table needs an `id` column."""

    def change(connection: sa.Connection, rows: Sequence[sa.Row[Any]]) -> None:
        connection.execute(
            sa.update(table).where(table.c.id.in_([row.id for row in rows])).values(values)
        )

    in_batches(sa.select(table.c.id).where(where), key=table.c.id, change=change)


def _is_invalid(index: str) -> bool:
    """Return True if an interrupted CREATE INDEX CONCURRENTLY left an unusable index."""
    query = sa.text("SELECT NOT indisvalid FROM pg_index WHERE indexrelid = to_regclass(:index)")
    return bool(op.get_bind().execute(query, {"index": index}).scalar())
