"""The webhook of a search: stored with it, set back where it goes on, and untold while nobody was told of its end."""

from __future__ import annotations

from datetime import datetime
from typing import Any

import sqlalchemy as sa

from hp_tool.domain.records import SearchState
from hp_tool.domain.webhooks import WebhookState
from hp_tool.store import tables
from hp_tool.store.base import checked

HOOK, SEARCH = tables.webhooks, tables.searches
ENDED = tuple(state for state in SearchState if state.ended)


def add_webhook(connection: sa.Connection, *, search_id: str, url: str, at: datetime) -> None:
    """Store the webhook of a new search."""
    values = {"search_id": search_id, "url": url, **_fresh(at), "created_at": at}
    connection.execute(sa.insert(HOOK).values(checked(HOOK, values)))


def reset_webhook(connection: sa.Connection, *, search_id: str, at: datetime) -> None:
    """A failed search that goes on will end once more, and that is told too."""
    connection.execute(sa.update(HOOK).where(HOOK.c.search_id == search_id).values(_fresh(at)))


def untold(*columns: Any) -> sa.Select[Any]:
    """These columns of webhooks whose search has ended and that are neither delivered nor given up."""
    due = HOOK.c.state == WebhookState.PENDING, SEARCH.c.state.in_(ENDED)
    return sa.select(*columns).select_from(HOOK).join(SEARCH, SEARCH.c.id == HOOK.c.search_id).where(*due)


def _fresh(at: datetime) -> dict[str, Any]:
    return {
        "state": WebhookState.PENDING,
        "attempts": 0,
        "next_attempt_at": at,
        "last_error": None,
        "delivered_at": None,
    }
