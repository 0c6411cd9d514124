"""Storage of searches, runs, measurements and calibrations.

SQLAlchemy is imported on first use.
"""

from __future__ import annotations

import contextlib
import os
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hp_tool.extras import require

if TYPE_CHECKING:
    from hp_tool.store.engine import mask_password
    from hp_tool.store.sql import SqlStore, open_store

__all__ = [
    "SqlStore",
    "database_url",
    "mask_password",
    "may_hold_calibrations",
    "open_store",
]
_MODULES = {"SqlStore": "sql", "mask_password": "engine", "open_store": "sql"}


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    require("search", by="the database of searches and measurements")
    return getattr(import_module(f"{__name__}.{_MODULES[name]}"), name)


def database_url(url: str | None = None) -> str:
    """Return `url`, by default HP_DATABASE_URL or a SQLite file in the user's data folder.

    The URL may contain a password. Use `mask_password` before printing it.
    """
    if url := url or os.environ.get("HP_DATABASE_URL"):
        return url
    from platformdirs import user_data_path

    return f"sqlite:///{user_data_path('hp-tool', appauthor=False) / 'hp_tool.sqlite3'}"


CALIBRATIONS = "hp_calibrations"
"""Name of the calibrations table. It is repeated here because importing the schema is slow; a test
compares the two.
"""


def sqlite_path(url: str) -> Path | None:
    """Return the path in a SQLite URL; None for any other URL."""
    scheme, separator, place = url.partition(":///")
    path = Path(place.partition("?")[0])
    is_file = (
        separator and scheme.partition("+")[0] == "sqlite" and path.name and path.name != ":memory:"
    )
    return path if is_file else None


def may_hold_calibrations(url: str) -> bool:
    """Return False if the URL is a SQLite file that is missing or has no calibrations.

    Return True for other URLs and for unreadable files. The file is not changed.
    """
    path = sqlite_path(url)
    if path is None:
        return True
    if not path.is_file():
        return False
    import sqlite3

    try:
        with contextlib.closing(
            sqlite3.connect(f"{path.absolute().as_uri()}?mode=ro", uri=True)
        ) as connection:
            table = connection.execute(
                "SELECT 1 FROM sqlite_master WHERE type = 'table' AND name = ?", (CALIBRATIONS,)
            )
            if table.fetchone() is None:
                return False
            return (
                connection.execute(f"SELECT 1 FROM {CALIBRATIONS} LIMIT 1").fetchone() is not None  # noqa: S608
            )
    except sqlite3.Error:
        return True
