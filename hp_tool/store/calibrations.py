"""What outlives a search: calibrations, in versions."""

from __future__ import annotations

from datetime import datetime
from typing import Any

import sqlalchemy as sa

from hp_tool.domain.records import CalibrationRecord, JsonObject, Page
from hp_tool.errors import ConflictError
from hp_tool.store import tables
from hp_tool.store.base import StoreBase, insert_if_new, now
from hp_tool.store.columns import encode, new_id, row_dict
from hp_tool.store.paging import Listing, fetch_page

CALIBRATION = tables.calibrations
MAX_RIVALS = 50


class Knowledge(StoreBase):
    """The part of `Store` about calibrations."""

    def save_calibration(
        self, *, cluster_key: str, framework: str, payload: JsonObject, num_measurements: int, model_family: str = ""
    ) -> CalibrationRecord:
        values: dict[str, Any] = {
            "id": new_id(),
            "cluster_key": cluster_key,
            "framework": framework,
            "model_family": model_family,
            "payload": encode(payload, field="payload"),
            "num_measurements": num_measurements,
        }
        newest = sa.select(sa.func.coalesce(sa.func.max(CALIBRATION.c.version), 0)).where(
            *_series(cluster_key=cluster_key, framework=framework, model_family=model_family)
        )
        with self._writing() as connection:
            for _ in range(MAX_RIVALS):  # another may take the version meanwhile; then take the one after it
                values |= {"version": connection.execute(newest).scalar_one() + 1, "created_at": now(connection)}
                if insert_if_new(connection, CALIBRATION, values):
                    return CalibrationRecord(**values)
        raise ConflictError(f"too many calibrations of {cluster_key} are being saved at once; try again")

    def latest_calibration(
        self, *, cluster_key: str, framework: str, model_family: str = "", before: datetime | None = None
    ) -> CalibrationRecord | None:
        series = _series(cluster_key=cluster_key, framework=framework, model_family=model_family)
        query = sa.select(CALIBRATION).where(*series).order_by(CALIBRATION.c.version.desc()).limit(1)
        if before is not None:
            query = query.where(CALIBRATION.c.created_at < before)
        with self._reading() as connection:
            row = connection.execute(query).one_or_none()
        return None if row is None else CalibrationRecord(**row_dict(row))

    def list_calibrations(
        self, *, cluster_key: str | None = None, framework: str | None = None, limit: int = 50, cursor: str | None = None
    ) -> Page[CalibrationRecord]:
        filters = {CALIBRATION.c.cluster_key: cluster_key, CALIBRATION.c.framework: framework}
        with self._reading() as connection:
            return fetch_page(
                connection,
                query=sa.select(CALIBRATION),
                listing=Listing(table=CALIBRATION, filters=filters),
                limit=limit,
                cursor=cursor,
                record=lambda row: CalibrationRecord(**row_dict(row)),
            )


def _series(*, cluster_key: str, framework: str, model_family: str) -> tuple[sa.ColumnElement[bool], ...]:
    """The calibrations that are versions of each other."""
    return (
        CALIBRATION.c.cluster_key == cluster_key,
        CALIBRATION.c.framework == framework,
        CALIBRATION.c.model_family == model_family,
    )
