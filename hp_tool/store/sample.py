"""A store of its own with rows that were recorded elsewhere."""

import atexit
import tempfile
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import sqlalchemy as sa

from hp_tool.store import tables
from hp_tool.store.base import writing
from hp_tool.store.columns import UtcDateTime
from hp_tool.store.engine import create_engine
from hp_tool.store.sql import SqlStore


def open_sample(rows: Mapping[str, Sequence[Mapping[str, Any]]]) -> SqlStore:
    """A store in a temporary file with these rows by table, instants as ISO text without a zone;
    gone with this process.
    """
    folder = tempfile.TemporaryDirectory(prefix="hp-sample-", ignore_cleanup_errors=True)
    engine = create_engine(f"sqlite:///{Path(folder.name) / 'sample.sqlite3'}")
    atexit.register(folder.cleanup)
    with writing(engine) as connection:
        tables.metadata.create_all(connection)
        for table in tables.metadata.sorted_tables:
            for row in rows.get(table.name, ()):
                connection.execute(
                    sa.insert(table).values(
                        {name: _value(table.c[name], each) for name, each in row.items()}
                    )
                )
    return SqlStore(engine=engine)


def _value(column: sa.Column[Any], value: Any) -> Any:
    return (
        datetime.fromisoformat(value).replace(tzinfo=UTC)
        if isinstance(column.type, UtcDateTime)
        else value
    )
