"""Where hp_tool keeps its own files when nobody says otherwise."""

from __future__ import annotations

from pathlib import Path


def default_database_path() -> Path:
    """The SQLite file of this user, used where HP_DATABASE_URL names no other database. It need not exist yet."""
    from platformdirs import user_data_path

    return user_data_path("hp-tool", appauthor=False) / "hp_tool.sqlite3"
