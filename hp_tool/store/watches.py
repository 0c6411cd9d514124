"""Watched jobs: detector states, and webhook deliveries of their events."""

from collections.abc import Collection, Iterator
from dataclasses import replace
from datetime import datetime, timedelta
from typing import Any, Unpack

import sqlalchemy as sa

from hp_tool.domain.digests import json_digest
from hp_tool.domain.records import JsonObject, Page, Paging
from hp_tool.domain.watch_records import Change, WatchRecord, WatchSource
from hp_tool.domain.webhooks import ATTEMPTS, WebhookState, wait_s
from hp_tool.errors import ConflictError, NotFoundError
from hp_tool.store import tables
from hp_tool.store.base import StoreBase, first_resource_id, now, storable_values
from hp_tool.store.columns import encode, new_id, row_dict, storable
from hp_tool.store.paging import RowList

WATCH, SOURCE = tables.watches, tables.watch_sources
MAX_WATCHES_PER_OWNER = 1000
MAX_PROCESSES_PER_WATCH = 20_000
"""Maximum number of processes per job, including those that a restart replaced."""
ROWS_PER_FETCH = 200
"""Number of process states held in memory at a time."""


class Watches(StoreBase):
    """`WatchStore` on SQLAlchemy."""

    def create_watch(
        self,
        *,
        name: str,
        query: JsonObject | None,
        expected: JsonObject | None,
        webhook: str | None = None,
        owner: str | None = None,
        idempotency_key: str | None = None,
    ) -> WatchRecord:
        watch_id = new_id()
        with self._writing() as connection:
            at = now(connection)
            fingerprint = json_digest({"name": name, "query": query, "webhook": webhook})
            stored_id = first_resource_id(
                connection,
                scope="watches",
                owner=owner,
                key=idempotency_key,
                fingerprint=fingerprint,
                resource_id=watch_id,
                at=at,
            )
            if stored_id == watch_id:
                if (
                    connection.execute(
                        sa.select(sa.func.count()).where(_owned_by(owner))
                    ).scalar_one()
                    >= MAX_WATCHES_PER_OWNER
                ):
                    raise ConflictError(
                        f"This owner already has {MAX_WATCHES_PER_OWNER:,} watches. Delete watches "
                        "of ended jobs (DELETE /v1/watches/{id}).",
                        code="too_many",
                    )
                values: dict[str, Any] = {
                    "id": watch_id,
                    "name": storable(name),
                    "owner": owner,
                    "query": query and encode(query, field="query"),
                    "expected": expected,
                    "status": "learning",
                    "webhook": webhook,
                    "event": 0,
                    "attempts": 0,
                    "created_at": at,
                    "updated_at": at,
                }
                connection.execute(sa.insert(WATCH).values(storable_values(WATCH, values)))
            return _read_watch(connection, stored_id)

    def get_watch(self, *, watch_id: str) -> WatchRecord:
        with self._reading() as connection:
            return _read_watch(connection, watch_id)

    def watch_sources(self, *, watch_id: str) -> Iterator[WatchSource]:
        with self._reading() as connection:
            yield from _sources(connection, watch_id)

    def list_watches(
        self, *, owner: str | None = None, limit: int = 50, **paging: Unpack[Paging]
    ) -> Page[WatchRecord]:
        listing = RowList(table=WATCH, filters={WATCH.c.owner: owner}, paging=paging)
        with self._reading() as connection:
            return listing.page(connection, limit=limit, record=_record)

    def change_watch(
        self, *, watch_id: str, source: str, change: Change, max_processes: int | None = None
    ) -> WatchRecord:
        source = storable(source)
        with self._writing() as connection:
            watch = _read_watch(connection, watch_id, locked=True)
            process = SOURCE.c.watch_id == watch_id, SOURCE.c.source == source
            stored = connection.execute(sa.select(SOURCE.c.state).where(*process))
            previous = stored.scalar_one_or_none()
            if previous is None:
                _admit_process(connection, watch, max_processes=max_processes)
            changed = change(watch, previous, lambda: _sources(connection, watch_id))
            at = now(connection)
            state = {"state": encode(changed.source, field="reports")}
            if previous is None:
                new = storable_values(SOURCE, {"watch_id": watch_id, "source": source, **state})
                connection.execute(sa.insert(SOURCE).values(new))
            else:
                connection.execute(sa.update(SOURCE).where(*process).values(state))
            values: dict[str, Any] = {"updated_at": at, "status": changed.status}
            if changed.state is not None:
                values["state"] = encode(changed.state, field="reports")
            if changed.message is not None:
                values |= {
                    "event": watch.event + 1,
                    "message": encode(changed.message, field="reports"),
                }
                if watch.webhook is not None:
                    values |= {
                        "webhook_state": WebhookState.PENDING,
                        "attempts": 0,
                        "next_attempt_at": at,
                        "last_error": None,
                    }
            connection.execute(
                sa.update(WATCH)
                .where(WATCH.c.id == watch_id)
                .values(storable_values(WATCH, values))
            )
            return _read_watch(connection, watch_id)

    def note_teaching(self, *, watch_id: str, measurement_id: str | None, why: str | None) -> None:
        values = {"measurement_id": measurement_id, "teaching": why and storable(why[:500])}
        with self._writing() as connection:
            connection.execute(sa.update(WATCH).where(WATCH.c.id == watch_id).values(values))

    def delete_watch(self, *, watch_id: str) -> None:
        with self._writing() as connection:
            if connection.execute(sa.delete(WATCH).where(WATCH.c.id == watch_id)).rowcount == 0:
                raise _watch_not_found(watch_id)

    def claim_watch_event(self, *, except_of: Collection[str | None] = ()) -> WatchRecord | None:
        # Usually nothing is due, so check before taking the write lock.
        with self._reading() as connection:
            if connection.execute(_due(now(connection), except_of)).first() is None:
                return None
        with self._writing() as connection:
            at = now(connection)
            row = connection.execute(_due(at, except_of).with_for_update(skip_locked=True)).first()
            if row is None:
                return None
            record = _record(row)
            attempt = record.attempts + 1
            claimed = replace(
                record,
                attempts=attempt,
                next_attempt_at=at + timedelta(seconds=wait_s(attempt=attempt)),
            )
            values = {"attempts": attempt, "next_attempt_at": claimed.next_attempt_at}
            connection.execute(sa.update(WATCH).where(WATCH.c.id == record.id).values(values))
            return claimed

    def settle_watch_event(self, *, watch: WatchRecord, error: str | None) -> None:
        same_attempt = (
            WATCH.c.id == watch.id,
            WATCH.c.event == watch.event,
            WATCH.c.next_attempt_at == watch.next_attempt_at,
        )
        values: dict[str, Any] = {"last_error": error and storable(error[:500])}
        if error is None:
            values["webhook_state"] = WebhookState.DELIVERED
        elif watch.attempts >= ATTEMPTS:
            values["webhook_state"] = WebhookState.FAILED
        with self._writing() as connection:
            connection.execute(
                sa.update(WATCH)
                .where(WATCH.c.webhook_state == WebhookState.PENDING, *same_attempt)
                .values(values)
            )


def _due(at: datetime, except_of: Collection[str | None]) -> sa.Select[Any]:
    """Select the job whose event has waited longest for delivery.

    Jobs of owners in `except_of` are excluded.
    """
    owners = [owner or "" for owner in except_of]
    due = (
        WATCH.c.webhook_state == WebhookState.PENDING,
        WATCH.c.next_attempt_at <= at,
        sa.func.coalesce(WATCH.c.owner, "").not_in(owners),
    )
    return sa.select(WATCH).where(*due).order_by(WATCH.c.next_attempt_at).limit(1)


def _read_watch(connection: sa.Connection, watch_id: str, *, locked: bool = False) -> WatchRecord:
    query = sa.select(WATCH).where(WATCH.c.id == watch_id)
    row = connection.execute(query.with_for_update() if locked else query).one_or_none()
    if row is None:
        raise _watch_not_found(watch_id)
    return _record(row)


def _admit_process(
    connection: sa.Connection, watch: WatchRecord, *, max_processes: int | None
) -> None:
    counted = sa.select(sa.func.count()).select_from(SOURCE)
    if (
        connection.execute(counted.where(SOURCE.c.watch_id == watch.id)).scalar_one()
        >= MAX_PROCESSES_PER_WATCH
    ):
        raise ConflictError(
            f"{MAX_PROCESSES_PER_WATCH:,} processes already report to this watch. Create a new "
            "watch.",
            code="too_many",
        )
    if max_processes is None:
        return
    of_owner = counted.join(WATCH, WATCH.c.id == SOURCE.c.watch_id).where(_owned_by(watch.owner))
    if connection.execute(of_owner).scalar_one() >= max_processes:
        raise ConflictError(
            f"{max_processes:,} processes already report to watches of this owner "
            "(HP_MAX_WATCH_PROCESSES_PER_OWNER). "
            "Delete watches of ended jobs (DELETE /v1/watches/{id}), or report from fewer ranks.",
            code="too_many",
        )


def _owned_by(owner: str | None) -> sa.ColumnElement[bool]:
    return sa.func.coalesce(WATCH.c.owner, "") == (owner or "")


def _sources(connection: sa.Connection, watch_id: str) -> Iterator[WatchSource]:
    query = (
        sa.select(SOURCE.c.source, SOURCE.c.state)
        .where(SOURCE.c.watch_id == watch_id)
        .order_by(SOURCE.c.source)
    )
    for row in connection.execution_options(yield_per=ROWS_PER_FETCH).execute(query):
        yield WatchSource(source=row.source, state=row.state)


def _record(row: sa.Row[Any]) -> WatchRecord:
    state = None if row.webhook_state is None else WebhookState(row.webhook_state)
    return WatchRecord(**row_dict(row) | {"webhook_state": state})


def _watch_not_found(watch_id: str) -> NotFoundError:
    return NotFoundError(f"No watched job {watch_id!r}.", field="watch_id")
