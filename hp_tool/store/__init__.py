"""Where searches, runs, measurements and calibrations are kept: SQLite by default, PostgreSQL when outgrown.

`open_store` is the door; the guarantees stand with the port, `hp_tool.domain.ports.Store`. SQLAlchemy is loaded with the
first of these names that is asked for; `hp_tool.store.peek` needs none of them.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from hp_tool.store.engine import database_url, masked
    from hp_tool.store.opening import open_store
    from hp_tool.store.sql import SqlStore

__all__ = ["SqlStore", "database_url", "masked", "open_store"]
_HOMES = {"SqlStore": "sql", "database_url": "engine", "masked": "engine", "open_store": "opening"}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)
