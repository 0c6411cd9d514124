"""A glance into a SQLite file without SQLAlchemy: a prediction should not pay for a database that knows nothing."""

from __future__ import annotations

import contextlib
import sqlite3
from pathlib import Path

CALIBRATIONS = "hp_calibrations"
"""The table's name, said here too; a test compares the two."""


def may_hold_calibrations(url: str) -> bool:
    """False where the URL names a SQLite file that is missing, not of ours, or has no calibration; else whoever opens it
    properly will see. Nothing is created or changed.
    """
    scheme, separator, place = url.partition(":///")
    path = Path(place.partition("?")[0])
    if not separator or scheme.partition("+")[0] != "sqlite" or not path.name or path.name == ":memory:":
        return True
    if not path.is_file():
        return False
    try:
        with contextlib.closing(sqlite3.connect(f"{path.absolute().as_uri()}?mode=ro", uri=True)) as connection:
            known = connection.execute("SELECT 1 FROM sqlite_master WHERE type = 'table' AND name = ?", (CALIBRATIONS,))
            if known.fetchone() is None:
                return False
            return connection.execute(f"SELECT 1 FROM {CALIBRATIONS} LIMIT 1").fetchone() is not None  # noqa: S608
    except sqlite3.Error:
        return True
