"""Search webhooks. Each delivery attempt must be claimed first.

An attempt is counted, and the next one is scheduled, before anything is sent. If a worker dies
during an attempt, another worker makes the next one. The end of a search is therefore reported at
least once.
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
from hp_tool.store.base import CLOCK_SLACK, ENDED, StoreBase, now, read_search, storable_values
from hp_tool.store.columns import row_dict, storable

HOOK, SEARCH = tables.webhooks, tables.searches


def add_webhook(connection: sa.Connection, *, search_id: str, url: str, at: datetime) -> None:
    """Store the webhook of a new search."""
    values = {"search_id": search_id, "url": url, **_initial_values(at), "created_at": at}
    connection.execute(sa.insert(HOOK).values(storable_values(HOOK, values)))


def reset_webhook(connection: sa.Connection, *, search_id: str, at: datetime) -> None:
    """Reset the webhook of a resumed search, so that its next end is reported."""
    connection.execute(
        sa.update(HOOK).where(HOOK.c.search_id == search_id).values(_initial_values(at))
    )


def pending_webhooks(*columns: Any) -> sa.Select[Any]:
    """Select columns of the pending webhooks of ended searches."""
    due = HOOK.c.state == WebhookState.PENDING, SEARCH.c.state.in_(ENDED)
    return (
        sa.select(*columns)
        .select_from(HOOK)
        .join(SEARCH, SEARCH.c.id == HOOK.c.search_id)
        .where(*due)
    )


def _initial_values(at: datetime) -> dict[str, Any]:
    return {
        "state": WebhookState.PENDING,
        "attempts": 0,
        "next_attempt_at": at,
        "last_error": None,
        "delivered_at": None,
    }


class Deliveries(StoreBase):
    """Webhook methods of `AccessStore`. `create_search` and `resume_search` also write webhooks."""

    def get_webhook(self, *, search_id: str) -> WebhookRecord:
        with self._reading() as connection:
            row = connection.execute(
                sa.select(HOOK).where(HOOK.c.search_id == search_id)
            ).one_or_none()
        if row is None:
            raise NotFoundError(f"Search {search_id!r} has no webhook.", field="search_id")
        return _record(row)

    def claim_webhook(
        self, *, except_of: Collection[str | None] = ()
    ) -> tuple[WebhookRecord, SearchRecord] | None:
        # Usually nothing is due, so check before taking the write lock.
        with self._reading() as connection:
            if connection.execute(_due(now(connection), except_of)).first() is None:
                return None
        with self._writing() as connection:
            at = now(connection)
            lost_attempts = (
                HOOK.c.state == WebhookState.PENDING,
                HOOK.c.attempts >= ATTEMPTS,
                HOOK.c.next_attempt_at <= at,
            )
            failed = {
                "state": WebhookState.FAILED,
                "last_error": "the worker died during the last attempt",
            }
            connection.execute(sa.update(HOOK).where(*lost_attempts).values(failed))
            row = connection.execute(_due(at, except_of).with_for_update(skip_locked=True)).first()
            if row is None:
                return None
            hook = _record(row)
            attempt = hook.attempts + 1
            claimed = replace(
                hook,
                attempts=attempt,
                next_attempt_at=at + timedelta(seconds=wait_s(attempt=attempt)),
            )
            values = {"attempts": claimed.attempts, "next_attempt_at": claimed.next_attempt_at}
            connection.execute(
                sa.update(HOOK).where(HOOK.c.search_id == hook.search_id).values(values)
            )
            return claimed, read_search(connection, hook.search_id)

    def settle_webhook(self, *, webhook: WebhookRecord, error: str | None) -> None:
        with self._writing() as connection:
            # next_attempt_at identifies the claim, so a late or reset attempt matches no row.
            same_attempt = (
                HOOK.c.search_id == webhook.search_id,
                HOOK.c.next_attempt_at == webhook.next_attempt_at,
            )
            values: dict[str, Any] = {"last_error": error and storable(error[:500])}
            if error is None:
                values |= {"state": WebhookState.DELIVERED, "delivered_at": now(connection)}
            elif webhook.attempts >= ATTEMPTS:
                values["state"] = WebhookState.FAILED
            connection.execute(
                sa.update(HOOK)
                .where(HOOK.c.state == WebhookState.PENDING, *same_attempt)
                .values(values)
            )


def _due(at: datetime, except_of: Collection[str | None]) -> sa.Select[Any]:
    """Select the webhook of an ended search that has waited longest for delivery.

    Searches of owners in `except_of` are excluded.
    """
    clock_went_back = (  # The wait is longer than any that is scheduled.
        sa.and_(
            HOOK.c.attempts == n,
            HOOK.c.next_attempt_at > at + timedelta(seconds=wait_s(attempt=n)) + CLOCK_SLACK,
        )
        for n in range(ATTEMPTS)
    )
    due = (
        sa.or_(HOOK.c.next_attempt_at <= at, *clock_went_back),
        sa.func.coalesce(SEARCH.c.owner, "").not_in([owner or "" for owner in except_of]),
    )
    return pending_webhooks(HOOK).where(*due).order_by(HOOK.c.next_attempt_at).limit(1)


def _record(row: sa.Row[Any]) -> WebhookRecord:
    return WebhookRecord(**row_dict(row) | {"state": WebhookState(row.state)})
