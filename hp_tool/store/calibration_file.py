"""Calibrations of a SQLite file for a single answer, without SQLAlchemy: to import it takes a third
of an estimate's time.
"""

from __future__ import annotations

import json
import sqlite3
from datetime import UTC, datetime
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

from hp_tool.domain.records import CalibrationRecord, Page
from hp_tool.store import CALIBRATIONS, HEAD, LEAST_TRUST, MEASUREMENTS, VERSION_TABLE

if TYPE_CHECKING:
    from hp_tool.store.sql import SqlStore

COLUMNS = (
    "id, version, cluster_key, framework, model_family, owner, payload, num_measurements, "
    "created_at"
)
NEWEST = (
    f"SELECT {COLUMNS} FROM {CALIBRATIONS} WHERE cluster_key = ? AND framework = ? AND "  # noqa: S608
    "model_family = ? AND owner = ? "
    "ORDER BY version DESC LIMIT 1"
)


class CalibrationFile:
    """The part of a `Store` that looks for a calibration; whatever else is asked of it opens the
    whole store.
    """

    def __init__(self, *, url: str, path: Path) -> None:
        """Raises sqlite3.Error where the file cannot be read as it is, ValueError where its schema
        is another version's.
        """
        self._url = url
        self._store: SqlStore | None = None
        self._connection = sqlite3.connect(
            f"{path.absolute().as_uri()}?mode=ro", uri=True, check_same_thread=False
        )
        revision = self._connection.execute(f"SELECT version_num FROM {VERSION_TABLE}").fetchone()  # noqa: S608
        if revision != (HEAD,):
            self._connection.close()
            raise ValueError(f"schema {revision}, not {HEAD}")

    def latest_calibration(self, **query: Any) -> CalibrationRecord | None:
        """Return the newest calibration of a series (`Store.latest_calibration`), or None."""
        if query.get("before") is not None:
            return self._whole().latest_calibration(**query)
        series = (
            query["cluster_key"],
            query["framework"],
            query.get("model_family", ""),
            query.get("owner", ""),
        )
        row = self._connection.execute(NEWEST, series).fetchone()
        if row is None:
            return None
        values = dict(zip(COLUMNS.split(", "), row, strict=True))
        at = datetime.fromisoformat(values["created_at"]).replace(
            tzinfo=UTC
        )  # as UtcDateTime writes it
        return CalibrationRecord(
            **values | {"payload": json.loads(values["payload"]), "created_at": at}
        )

    def measurements(self, *, limit: int, teaches: str, **filters: str) -> Page[Any]:
        """Return matching measurements (`Store.measurements`); of each row only where it was
        measured.
        """
        wanted = " AND ".join(
            [*(f"{name} = ?" for name in filters), f"(trust >= {LEAST_TRUST} OR owner = ?)"]
        )
        newest = (
            f"SELECT cluster_key, framework FROM {MEASUREMENTS} WHERE {wanted} ORDER BY "  # noqa: S608
            f"created_at DESC LIMIT {limit}"
        )
        rows = self._connection.execute(newest, (*filters.values(), teaches))
        return Page(
            items=tuple(SimpleNamespace(cluster_key=key, framework=name) for key, name in rows),
            next_cursor=None,
        )

    def close(self) -> None:
        """Give the file back."""
        self._connection.close()
        if self._store is not None:
            self._store.close()

    def _whole(self) -> SqlStore:
        if self._store is None:
            from hp_tool.store.sql import open_store

            self._store = open_store(self._url)
        return self._store

    def __getattr__(self, name: str) -> Any:
        return getattr(self._whole(), name)
