"""What outlives a search: calibrations in versions, and the clusters, models and GPUs that users registered."""

from __future__ import annotations

from typing import Any

import sqlalchemy as sa

from hp_tool.domain.records import CalibrationRecord, JsonObject, Page, RegistrationKind, RegistrationRecord
from hp_tool.errors import ConflictError
from hp_tool.store import tables
from hp_tool.store.base import StoreBase, insert_if_new, now
from hp_tool.store.codec import encode
from hp_tool.store.paging import fetch_page
from hp_tool.store.types import new_id, row_dict

CALIBRATION = tables.calibrations
REGISTRATION = tables.registrations
MAX_RIVALS = 50


class Knowledge(StoreBase):
    """The part of `Store` about calibrations and registrations."""

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

    def latest_calibration(self, *, cluster_key: str, framework: str, model_family: str = "") -> CalibrationRecord | None:
        series = _series(cluster_key=cluster_key, framework=framework, model_family=model_family)
        query = sa.select(CALIBRATION).where(*series).order_by(CALIBRATION.c.version.desc()).limit(1)
        with self._reading() as connection:
            row = connection.execute(query).one_or_none()
        return None if row is None else CalibrationRecord(**row_dict(row))

    def list_calibrations(
        self, *, cluster_key: str | None = None, framework: str | None = None, limit: int = 50, cursor: str | None = None
    ) -> Page[CalibrationRecord]:
        query = sa.select(CALIBRATION)
        if cluster_key is not None:
            query = query.where(CALIBRATION.c.cluster_key == cluster_key)
        if framework is not None:
            query = query.where(CALIBRATION.c.framework == framework)
        with self._reading() as connection:
            return fetch_page(
                connection,
                table=CALIBRATION,
                query=query,
                limit=limit,
                cursor=cursor,
                record=lambda row: CalibrationRecord(**row_dict(row)),
            )

    def put_registration(
        self, *, kind: RegistrationKind, name: str, spec: JsonObject, owner: str | None = None
    ) -> RegistrationRecord:
        changed = {"spec": encode(spec, field="spec"), "owner": owner}
        with self._writing() as connection:
            at = now(connection)
            new: dict[str, Any] = {"kind": kind, "name": name, "created_at": at, "updated_at": at, **changed}
            if insert_if_new(connection, REGISTRATION, new):
                return RegistrationRecord(**new)
            here = REGISTRATION.c.kind == kind, REGISTRATION.c.name == name
            update = sa.update(REGISTRATION).where(*here).values(updated_at=at, **changed).returning(REGISTRATION)
            return RegistrationRecord(**row_dict(connection.execute(update).one()))

    def get_registration(self, *, kind: RegistrationKind, name: str) -> RegistrationRecord | None:
        query = sa.select(REGISTRATION).where(REGISTRATION.c.kind == kind, REGISTRATION.c.name == name)
        with self._reading() as connection:
            row = connection.execute(query).one_or_none()
        return None if row is None else RegistrationRecord(**row_dict(row))

    def list_registrations(self, *, kind: RegistrationKind) -> list[RegistrationRecord]:
        query = sa.select(REGISTRATION).where(REGISTRATION.c.kind == kind).order_by(REGISTRATION.c.name)
        with self._reading() as connection:
            return [RegistrationRecord(**row_dict(row)) for row in connection.execute(query)]


def _series(*, cluster_key: str, framework: str, model_family: str) -> tuple[sa.ColumnElement[bool], ...]:
    """The calibrations that are versions of each other."""
    return (
        CALIBRATION.c.cluster_key == cluster_key,
        CALIBRATION.c.framework == framework,
        CALIBRATION.c.model_family == model_family,
    )
