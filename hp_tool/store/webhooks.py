"""Webhooks of searches: stored with them, reset where a search goes on, and claimed one attempt at
a time.

An attempt is counted and the next one scheduled before anything is sent: a worker that dies on the
way leaves it to whoever comes by when that is due, so each end is reported at least once.
"""

from collections.abc import Collection
from dataclasses import replace
from datetime import datetime, timedelta
from typing import Any

import sqlalchemy as sa

from hp_tool.domain.records import SearchRecord
from hp_tool.domain.webhooks import ATTEMPTS, WebhookRecord, WebhookState, wait_s
from hp_tool.errors import NotFoundError
from hp_tool.store import tables
from hp_tool.store.base import CLOCK_SLACK, ENDED, StoreBase, checked, now, read_search
from hp_tool.store.columns import row_dict, storable

HOOK, SEARCH = tables.webhooks, tables.searches


def add_webhook(connection: sa.Connection, *, search_id: str, url: str, at: datetime) -> None:
    """Store the webhook of a new search."""
    values = {"search_id": search_id, "url": url, **_fresh(at), "created_at": at}
    connection.execute(sa.insert(HOOK).values(checked(HOOK, values)))


def reset_webhook(connection: sa.Connection, *, search_id: str, at: datetime) -> None:
    """Reset the webhook of a failed search that goes on: its next end is reported too."""
    connection.execute(sa.update(HOOK).where(HOOK.c.search_id == search_id).values(_fresh(at)))


def untold(*columns: Any) -> sa.Select[Any]:
    """These columns of webhooks whose search has ended and that are neither delivered nor given
    up.
    """
    due = HOOK.c.state == WebhookState.PENDING, SEARCH.c.state.in_(ENDED)
    return (
        sa.select(*columns)
        .select_from(HOOK)
        .join(SEARCH, SEARCH.c.id == HOOK.c.search_id)
        .where(*due)
    )


def _fresh(at: datetime) -> dict[str, Any]:
    return {
        "state": WebhookState.PENDING,
        "attempts": 0,
        "next_attempt_at": at,
        "last_error": None,
        "delivered_at": None,
    }


class Deliveries(StoreBase):
    """The part of `AccessStore` that tells of ends; `create_search` stores webhooks,
    `resume_search` sets them back.
    """

    def get_webhook(self, *, search_id: str) -> WebhookRecord:
        with self._reading() as connection:
            row = connection.execute(
                sa.select(HOOK).where(HOOK.c.search_id == search_id)
            ).one_or_none()
        if row is None:
            raise NotFoundError(f"search {search_id!r} has no webhook", field="search_id")
        return _record(row)

    def claim_webhook(
        self, *, except_of: Collection[str | None] = ()
    ) -> tuple[WebhookRecord, SearchRecord] | None:
        with (
            self._reading() as connection
        ):  # most of the time nothing is due, which costs no write lock
            if connection.execute(_due(now(connection), except_of)).first() is None:
                return None
        with self._writing() as connection:
            at = now(connection)
            lost = (
                HOOK.c.state == WebhookState.PENDING,
                HOOK.c.attempts >= ATTEMPTS,
                HOOK.c.next_attempt_at <= at,
            )
            given_up = {
                "state": WebhookState.FAILED,
                "last_error": "the worker of the last attempt was lost",
            }
            connection.execute(sa.update(HOOK).where(*lost).values(given_up))
            row = connection.execute(_due(at, except_of).with_for_update(skip_locked=True)).first()
            if row is None:
                return None
            hook = _record(row)
            attempt = hook.attempts + 1
            begun = replace(
                hook,
                attempts=attempt,
                next_attempt_at=at + timedelta(seconds=wait_s(attempt=attempt)),
            )
            values = {"attempts": begun.attempts, "next_attempt_at": begun.next_attempt_at}
            connection.execute(
                sa.update(HOOK).where(HOOK.c.search_id == hook.search_id).values(values)
            )
            return begun, read_search(connection, hook.search_id)

    def settle_webhook(self, *, webhook: WebhookRecord, error: str | None) -> None:
        with self._writing() as connection:
            # The instant of the next attempt is this claim's own: one that comes late, or after a
            # reset, changes nothing.
            mine = (
                HOOK.c.search_id == webhook.search_id,
                HOOK.c.next_attempt_at == webhook.next_attempt_at,
            )
            values: dict[str, Any] = {"last_error": error and storable(error[:500])}
            if error is None:
                values |= {"state": WebhookState.DELIVERED, "delivered_at": now(connection)}
            elif webhook.attempts >= ATTEMPTS:
                values["state"] = WebhookState.FAILED
            connection.execute(
                sa.update(HOOK).where(HOOK.c.state == WebhookState.PENDING, *mine).values(values)
            )


def _due(at: datetime, except_of: Collection[str | None]) -> sa.Select[Any]:
    """The webhook of an ended search that has waited the longest for its next attempt, of all
    owners but these.
    """
    clock_went_back = (  # it waits for longer than anybody ever set
        sa.and_(
            HOOK.c.attempts == n,
            HOOK.c.next_attempt_at > at + timedelta(seconds=wait_s(attempt=n)) + CLOCK_SLACK,
        )
        for n in range(ATTEMPTS)
    )
    wanted = (
        sa.or_(HOOK.c.next_attempt_at <= at, *clock_went_back),
        sa.func.coalesce(SEARCH.c.owner, "").not_in([owner or "" for owner in except_of]),
    )
    return untold(HOOK).where(*wanted).order_by(HOOK.c.next_attempt_at).limit(1)


def _record(row: sa.Row[Any]) -> WebhookRecord:
    return WebhookRecord(**row_dict(row) | {"state": WebhookState(row.state)})
