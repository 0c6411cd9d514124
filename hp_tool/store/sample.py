"""Temporary stores with recorded rows."""

import atexit
import tempfile
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import sqlalchemy as sa

from hp_tool.store import tables
from hp_tool.store.base import write_transaction
from hp_tool.store.columns import UtcDateTime
from hp_tool.store.engine import create_engine
from hp_tool.store.sql import SqlStore


def open_sample(rows: Mapping[str, Sequence[Mapping[str, Any]]]) -> SqlStore:
    """Return a store in a temporary SQLite file, which is deleted when the process exits.

    Args:
        rows: Rows by table name. Timestamps are ISO strings in UTC without an offset.
    """
    folder = tempfile.TemporaryDirectory(prefix="hp-sample-", ignore_cleanup_errors=True)
    engine = create_engine(f"sqlite:///{Path(folder.name) / 'sample.sqlite3'}")
    atexit.register(folder.cleanup)
    with write_transaction(engine) as connection:
        tables.metadata.create_all(connection)
        for table in tables.metadata.sorted_tables:
            for row in rows.get(table.name, ()):
                connection.execute(
                    sa.insert(table).values(
                        {name: _decode_value(table.c[name], value) for name, value in row.items()}
                    )
                )
    return SqlStore(engine=engine)


def _decode_value(column: sa.Column[Any], value: Any) -> Any:
    return (
        datetime.fromisoformat(value).replace(tzinfo=UTC)
        if isinstance(column.type, UtcDateTime)
        else value
    )
