"""Pages of a list, newest first or oldest first, by (created_at, id): no page is slower than another and none skips a row."""

from __future__ import annotations

import base64
import binascii
from collections.abc import Callable
from datetime import datetime
from typing import Any, TypeVar

import sqlalchemy as sa

from hp_tool.domain.records import Page
from hp_tool.errors import InputError
from hp_tool.store.types import UtcDateTime

MAX_LIMIT = 1000
T = TypeVar("T")


def fetch_page(
    connection: sa.Connection,
    *,
    table: sa.Table,
    query: sa.Select[Any],
    limit: int,
    cursor: str | None,
    record: Callable[[sa.Row[Any]], T],
    since: datetime | None = None,
    until: datetime | None = None,
    oldest_first: bool = False,
) -> Page[T]:
    """Run `query`, which must select created_at and id of `table`, for one page of what was created from `since` to before
    `until`."""
    if not 1 <= limit <= MAX_LIMIT:
        raise InputError(f"limit is {limit}; it must be from 1 to {MAX_LIMIT}", field="limit")
    key = table.c.created_at, table.c.id
    if since is not None:
        query = query.where(table.c.created_at >= since)
    if until is not None:
        query = query.where(table.c.created_at < until)
    if cursor is not None:
        at, last = _decode(cursor)
        here, there = sa.tuple_(*key), sa.tuple_(sa.literal(at, UtcDateTime()), sa.literal(last))
        query = query.where(here > there if oldest_first else here < there)
    query = query.order_by(*(column.asc() if oldest_first else column.desc() for column in key)).limit(limit + 1)
    rows = connection.execute(query).all()
    shown = rows[:limit]
    more = len(rows) > limit
    return Page(
        items=tuple(map(record, shown)), next_cursor=encode_cursor(shown[-1].created_at, shown[-1].id) if more else None
    )


def encode_cursor(at: datetime, last: str) -> str:
    """The cursor of what comes after this row."""
    return base64.urlsafe_b64encode(f"{at.isoformat()}|{last}".encode()).decode().rstrip("=")


def _decode(cursor: str) -> tuple[datetime, str]:
    try:
        text = base64.urlsafe_b64decode(cursor + "=" * (-len(cursor) % 4)).decode()
        at, last = text.split("|")
        instant = datetime.fromisoformat(at)
        if instant.tzinfo is None:
            raise ValueError("no time zone")
    except (ValueError, binascii.Error):
        raise InputError(
            "cursor is not one that an earlier page answered; leave it out for the first page", field="cursor"
        ) from None
    return instant, last
