"""The clusters and models that users registered, each under its owner or for everybody."""

from __future__ import annotations

from typing import Any

import sqlalchemy as sa

from hp_tool.domain.records import JsonObject, RegistrationKind, RegistrationRecord
from hp_tool.errors import ConflictError, NotFoundError
from hp_tool.store import tables
from hp_tool.store.base import StoreBase, insert_if_new, now
from hp_tool.store.columns import encode, row_dict

REGISTRATION = tables.registrations
MOST_REGISTRATIONS = 1000
"""Of one kind and owner: lists are answered whole."""


class Registrations(StoreBase):
    """The part of `Store` about registrations. In the table, everybody's have the empty owner."""

    def put_registration(
        self, *, kind: RegistrationKind, name: str, spec: JsonObject, owner: str | None = None
    ) -> RegistrationRecord:
        changed: dict[str, Any] = {"spec": encode(spec, field="spec")}
        with self._writing() as connection:
            at = now(connection)
            changed["updated_at"] = at
            update = sa.update(REGISTRATION).where(*_here(kind, name, owner)).values(**changed).returning(REGISTRATION)
            if (row := connection.execute(update).one_or_none()) is not None:
                return _record(row)
            registered = sa.select(sa.func.count()).where(REGISTRATION.c.kind == kind, REGISTRATION.c.owner == (owner or ""))
            if connection.execute(registered).scalar_one() >= MOST_REGISTRATIONS:
                raise ConflictError(f"{MOST_REGISTRATIONS} of kind {kind} are registered; delete some first", code="too_many")
            new: dict[str, Any] = {"kind": kind, "name": name, "owner": owner or "", "created_at": at, **changed}
            if not insert_if_new(connection, REGISTRATION, new):  # another put it there meanwhile; the last one wins
                connection.execute(update)
            return _record(connection.execute(sa.select(REGISTRATION).where(*_here(kind, name, owner))).one())

    def get_registration(self, *, kind: RegistrationKind, name: str, owner: str | None = None) -> RegistrationRecord | None:
        query = sa.select(REGISTRATION).where(
            REGISTRATION.c.kind == kind, REGISTRATION.c.name == name, REGISTRATION.c.owner.in_({owner or "", ""})
        )
        with self._reading() as connection:
            row = connection.execute(query.order_by(REGISTRATION.c.owner.desc()).limit(1)).one_or_none()
        return None if row is None else _record(row)

    def list_registrations(self, *, kind: RegistrationKind, owner: str | None = None) -> list[RegistrationRecord]:
        query = sa.select(REGISTRATION).where(REGISTRATION.c.kind == kind, REGISTRATION.c.owner.in_({owner or "", ""}))
        with self._reading() as connection:
            rows = connection.execute(query.order_by(REGISTRATION.c.name, REGISTRATION.c.owner)).all()
        return list({row.name: _record(row) for row in rows}.values())

    def remove_registration(self, *, kind: RegistrationKind, name: str, owner: str | None = None) -> None:
        with self._writing() as connection:
            if connection.execute(sa.delete(REGISTRATION).where(*_here(kind, name, owner))).rowcount == 0:
                raise NotFoundError(f"no {kind} {name!r} is registered", field="name")


def _here(kind: RegistrationKind, name: str, owner: str | None) -> tuple[sa.ColumnElement[bool], ...]:
    return REGISTRATION.c.kind == kind, REGISTRATION.c.name == name, REGISTRATION.c.owner == (owner or "")


def _record(row: sa.Row[Any]) -> RegistrationRecord:
    values = row_dict(row)
    return RegistrationRecord(**values | {"owner": values["owner"] or None})
