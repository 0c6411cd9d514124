"""API keys and the audit log."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import sqlalchemy as sa

from hp_tool.domain.access import AuditRecord, KeyRecord, Scope
from hp_tool.domain.records import ANY_KEY, Page
from hp_tool.errors import InputError, NotFoundError
from hp_tool.store import tables
from hp_tool.store.base import StoreBase, checked, now
from hp_tool.store.columns import new_id, row_dict, storable
from hp_tool.store.paging import Listing, fetch_page
from hp_tool.store.usage import reserved_by_open_searches, used_today

KEY, AUDIT = tables.api_keys, tables.audit
LONGEST_LIFETIME_S = 100 * 365.25 * 86_400.0


class Access(StoreBase):
    """The part of `AccessStore` beyond `Store`."""

    def add_key(
        self,
        *,
        key_id: str,
        owner: str,
        scope: Scope,
        secret_sha256: str,
        lifetime_s: float | None = None,
        requests_per_second: float | None = None,
        gpu_seconds_per_day: float | None = None,
    ) -> KeyRecord:
        amounts = {
            "lifetime_s": lifetime_s,
            "requests_per_second": requests_per_second,
            "gpu_seconds_per_day": gpu_seconds_per_day,
        }
        for name, amount in amounts.items():
            if amount is not None and not 0 < amount <= LONGEST_LIFETIME_S:
                raise InputError(f"{name} is {amount}; it must be above 0 and at most {LONGEST_LIFETIME_S:g}", field=name)
        if not owner.strip():
            raise InputError("a key needs an owner", field="owner")
        with self._writing() as connection:
            at = now(connection)
            values: dict[str, Any] = {
                "id": key_id,
                "owner": owner,
                "scope": int(scope),
                "secret_sha256": secret_sha256,
                "requests_per_second": requests_per_second,
                "gpu_seconds_per_day": gpu_seconds_per_day,
                "created_at": at,
                "expires_at": None if lifetime_s is None else at + timedelta(seconds=lifetime_s),
            }
            connection.execute(sa.insert(KEY).values(checked(KEY, values)))
            return _read_key(connection, key_id)

    def get_key(self, *, key_id: str) -> KeyRecord:
        with self._reading() as connection:
            return _read_key(connection, key_id)

    def list_keys(self, *, limit: int = 50, cursor: str | None = None) -> Page[KeyRecord]:
        with self._reading() as connection:
            return fetch_page(
                connection,
                query=sa.select(KEY),
                listing=Listing(table=KEY),
                limit=limit,
                cursor=cursor,
                record=_key_record,
            )

    def revoke_key(self, *, key_id: str) -> KeyRecord:
        with self._writing() as connection:
            valid = KEY.c.id == key_id, KEY.c.revoked_at.is_(None)
            connection.execute(sa.update(KEY).where(*valid).values(revoked_at=now(connection)))
            return _read_key(connection, key_id)

    def gpu_seconds_today(self, *, api_key_id: str | None = ANY_KEY) -> float:
        with self._reading() as connection:
            used = used_today(connection, at=now(connection), api_key_id=api_key_id)
            return used + reserved_by_open_searches(connection, api_key_id=api_key_id)

    def add_audit(
        self,
        *,
        owner: str | None,
        api_key_id: str | None,
        action: str,
        resource: str,
        outcome: str,
        request_id: str | None = None,
    ) -> None:
        values = {
            "id": new_id(),
            "owner": owner,
            "api_key_id": api_key_id,
            "action": action[:200],
            "resource": storable(resource[:500]),  # what a stranger typed
            "outcome": outcome,
            "request_id": request_id,
        }
        with self._writing() as connection:
            connection.execute(sa.insert(AUDIT).values(**values, created_at=now(connection)))

    def audit(self, *, owner: str | None = None, limit: int = 50, cursor: str | None = None) -> Page[AuditRecord]:
        with self._reading() as connection:
            return fetch_page(
                connection,
                query=sa.select(AUDIT),
                listing=Listing(table=AUDIT, filters={AUDIT.c.owner: owner}),
                limit=limit,
                cursor=cursor,
                record=lambda row: AuditRecord(**row_dict(row)),
            )


def _read_key(connection: sa.Connection, key_id: str) -> KeyRecord:
    row = connection.execute(sa.select(KEY).where(KEY.c.id == key_id)).one_or_none()
    if row is None:
        raise NotFoundError(f"no key {key_id!r}", field="key_id")
    return _key_record(row)


def _key_record(row: sa.Row[Any]) -> KeyRecord:
    values = row_dict(row)
    return KeyRecord(**values | {"scope": Scope(values["scope"])})
