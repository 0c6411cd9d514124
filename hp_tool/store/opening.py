"""Opening a store: the schema is checked first, and made or brought up to date where that is safe."""

from __future__ import annotations

from hp_tool.errors import StoreError
from hp_tool.store import schema
from hp_tool.store.base import translated_errors
from hp_tool.store.engine import create_engine, database_url, masked
from hp_tool.store.sql import SqlStore


def open_store(url: str | None = None) -> SqlStore:
    """The store at a URL, by default `database_url()`; close() it in the end.

    A SQLite file is created or upgraded on the way. PostgreSQL is shared by many hosts, so only `hp-tool db upgrade`
    changes its schema; a StoreError says so.
    """
    url = database_url(url)
    engine = create_engine(url)
    with translated_errors(engine), engine.begin() as connection:
        found = schema.revision(connection)
    if found != schema.HEAD:
        if engine.dialect.name == "sqlite":
            schema.upgrade(url)
        else:
            state = "has no hp-tool schema" if found is None else f"has schema {found}, this version needs {schema.HEAD}"
            engine.dispose()
            raise StoreError(f"database {masked(url)} {state}: run `hp-tool db upgrade`", code="schema_outdated")
    return SqlStore(engine=engine)
