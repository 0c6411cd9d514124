"""Versioned calibrations, and user-registered clusters and models."""

from collections.abc import Collection
from datetime import datetime
from typing import Any, Unpack

import sqlalchemy as sa

from hp_tool.domain.records import (
    CalibrationRecord,
    JsonObject,
    Page,
    Paging,
    RegistrationKind,
    RegistrationRecord,
)
from hp_tool.errors import ConflictError, NotFoundError
from hp_tool.store import tables
from hp_tool.store.base import StoreBase, insert_if_new, now
from hp_tool.store.columns import encode, new_id, row_dict
from hp_tool.store.paging import RowList

CALIBRATION, REGISTRATION = tables.calibrations, tables.registrations
MAX_VERSION_ATTEMPTS = 50
MAX_REGISTRATIONS = 1000
"""Maximum number of registrations per kind and owner."""


class Knowledge(StoreBase):
    """Calibrations and registrations."""

    def save_calibration(
        self,
        *,
        cluster_key: str,
        framework: str,
        payload: JsonObject,
        num_measurements: int,
        model_family: str = "",
        owner: str = "",
    ) -> CalibrationRecord:
        series = {
            "cluster_key": cluster_key,
            "framework": framework,
            "model_family": model_family,
            "owner": owner,
        }
        payload = encode(payload, field="payload")
        values: dict[str, Any] = {
            "id": new_id(),
            **series,
            "payload": payload,
            "num_measurements": num_measurements,
        }
        newest = sa.select(sa.func.coalesce(sa.func.max(CALIBRATION.c.version), 0)).filter_by(
            **series
        )
        with self._writing() as connection:
            # A concurrent call may have saved this version; try the next one.
            for _ in range(MAX_VERSION_ATTEMPTS):
                values |= {
                    "version": connection.execute(newest).scalar_one() + 1,
                    "created_at": now(connection),
                }
                if insert_if_new(connection, CALIBRATION, values):
                    return CalibrationRecord(**values)
        raise ConflictError(
            f"Too many calibrations of {cluster_key} are being saved at once. Try again."
        )

    def latest_calibration(
        self,
        *,
        cluster_key: str,
        framework: str,
        model_family: str = "",
        owner: str = "",
        before: datetime | None = None,
    ) -> CalibrationRecord | None:
        query = sa.select(CALIBRATION).order_by(CALIBRATION.c.version.desc()).limit(1)
        query = query.filter_by(
            cluster_key=cluster_key, framework=framework, model_family=model_family, owner=owner
        )
        if before is not None:
            query = query.where(CALIBRATION.c.created_at < before)
        with self._reading() as connection:
            row = connection.execute(query).one_or_none()
        return None if row is None else CalibrationRecord(**row_dict(row))

    def list_calibrations(
        self,
        *,
        cluster_key: str | None = None,
        framework: str | None = None,
        owners: Collection[str] | None = None,
        limit: int = 50,
        **paging: Unpack[Paging],
    ) -> Page[CalibrationRecord]:
        listed = sa.select(CALIBRATION)
        if owners is not None:
            listed = listed.where(CALIBRATION.c.owner.in_(owners))
        filters = {CALIBRATION.c.cluster_key: cluster_key, CALIBRATION.c.framework: framework}
        listing = RowList(table=CALIBRATION, filters=filters, paging=paging)
        with self._reading() as connection:
            return listing.page(
                connection,
                limit=limit,
                record=lambda row: CalibrationRecord(**row_dict(row)),
                query=listed,
            )

    def put_registration(
        self, *, kind: RegistrationKind, name: str, spec: JsonObject, owner: str | None = None
    ) -> RegistrationRecord:
        changed: dict[str, Any] = {"spec": encode(spec, field="spec")}
        with self._writing() as connection:
            at = now(connection)
            changed["updated_at"] = at
            update = (
                sa.update(REGISTRATION)
                .where(*_key_of(kind, name, owner))
                .values(**changed)
                .returning(REGISTRATION)
            )
            if (row := connection.execute(update).one_or_none()) is not None:
                return _record(row)
            registered = sa.select(sa.func.count()).where(
                REGISTRATION.c.kind == kind, REGISTRATION.c.owner == (owner or "")
            )
            if connection.execute(registered).scalar_one() >= MAX_REGISTRATIONS:
                raise ConflictError(
                    f"{MAX_REGISTRATIONS} {kind}s are registered already. Delete some first.",
                    code="too_many",
                )
            new: dict[str, Any] = {
                "kind": kind,
                "name": name,
                "owner": owner or "",
                "created_at": at,
                **changed,
            }
            if not insert_if_new(connection, REGISTRATION, new):
                # A concurrent call inserted the row; the last write wins.
                connection.execute(update)
            return _record(
                connection.execute(sa.select(REGISTRATION).where(*_key_of(kind, name, owner))).one()
            )

    def get_registration(
        self, *, kind: RegistrationKind, name: str, owner: str | None = None
    ) -> RegistrationRecord | None:
        query = sa.select(REGISTRATION).where(
            *_visible_to(kind, owner), REGISTRATION.c.name == name
        )
        with self._reading() as connection:
            row = connection.execute(
                query.order_by(REGISTRATION.c.owner.desc()).limit(1)
            ).one_or_none()
        return None if row is None else _record(row)

    def registered_names(self, *, kind: RegistrationKind, owner: str | None = None) -> list[str]:
        query = (
            sa.select(REGISTRATION.c.name)
            .distinct()
            .where(*_visible_to(kind, owner))
            .order_by(REGISTRATION.c.name)
        )
        with self._reading() as connection:
            return list(connection.scalars(query))

    def list_registrations(
        self,
        *,
        kind: RegistrationKind,
        owner: str | None = None,
        names: Collection[str] | None = None,
    ) -> list[RegistrationRecord]:
        query = sa.select(REGISTRATION).where(*_visible_to(kind, owner))
        if names is not None:
            query = query.where(REGISTRATION.c.name.in_(names))
        with self._reading() as connection:
            rows = connection.execute(
                query.order_by(REGISTRATION.c.name, REGISTRATION.c.owner)
            ).all()
        return list({row.name: _record(row) for row in rows}.values())

    def remove_registration(
        self, *, kind: RegistrationKind, name: str, owner: str | None = None
    ) -> None:
        with self._writing() as connection:
            if (
                connection.execute(
                    sa.delete(REGISTRATION).where(*_key_of(kind, name, owner))
                ).rowcount
                == 0
            ):
                raise NotFoundError(f"No {kind} {name!r} is registered.", field="name")


def _visible_to(kind: RegistrationKind, owner: str | None) -> tuple[sa.ColumnElement[bool], ...]:
    return REGISTRATION.c.kind == kind, REGISTRATION.c.owner.in_({owner or "", ""})


def _key_of(
    kind: RegistrationKind, name: str, owner: str | None
) -> tuple[sa.ColumnElement[bool], ...]:
    return (
        REGISTRATION.c.kind == kind,
        REGISTRATION.c.name == name,
        REGISTRATION.c.owner == (owner or ""),
    )


def _record(row: sa.Row[Any]) -> RegistrationRecord:
    return RegistrationRecord(**row_dict(row) | {"owner": row.owner or None})
