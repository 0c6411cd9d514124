"""Keyset pagination by (created_at, id): all pages take equally long, and no row is skipped."""

import base64
import binascii
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any, TypeVar

import sqlalchemy as sa

from hp_tool.domain.digests import json_digest
from hp_tool.domain.records import Page, Paging
from hp_tool.errors import InputError
from hp_tool.store.columns import UtcDateTime

MAX_LIMIT = 1000
T = TypeVar("T")


@dataclass(frozen=True, slots=True, kw_only=True)
class RowList:
    """A filtered and sorted list of table rows."""

    table: sa.Table
    filters: Mapping[sa.Column[Any], Any] = field(default_factory=dict)
    """Required values by column. None matches any value."""
    paging: Paging = field(default_factory=Paging)
    words: tuple[str, ...] = ()
    """Additional filter words. They are applied by the query and are part of the cursor's digest.
    """

    def page(
        self,
        connection: sa.Connection,
        *,
        limit: int,
        record: Callable[[sa.Row[Any]], T],
        query: sa.Select[Any] | None = None,
    ) -> Page[T]:
        """Return the page that starts at the cursor.

        Args:
            connection: Connection in a transaction.
            limit: Maximum number of items.
            record: Function that converts a row to an item.
            query: Query that selects the table's created_at and id; by default it selects all
                columns.
        """
        if not 1 <= limit <= MAX_LIMIT:
            raise InputError(f"limit is {limit}. Use 1 to {MAX_LIMIT}.", field="limit")
        query = self._filtered(sa.select(self.table) if query is None else query)
        if (cursor := self.paging.get("cursor")) is not None:
            row_key, cursor_key = sa.tuple_(*self._key), sa.tuple_(*self._decode(cursor))
            query = query.where(row_key > cursor_key if self._ascending else row_key < cursor_key)
        rows = connection.execute(query.limit(limit + 1)).all()
        shown = rows[:limit]
        next_cursor = self.cursor(shown[-1].created_at, shown[-1].id) if len(rows) > limit else None
        return Page(items=tuple(map(record, shown)), next_cursor=next_cursor)

    def _filtered(self, query: sa.Select[Any]) -> sa.Select[Any]:
        created_at = self.table.c.created_at
        for column, required in self.filters.items():
            if required is not None:
                query = query.where(column == required)
        if since := self.paging.get("since"):
            query = query.where(created_at >= since)
        if until := self.paging.get("until"):
            query = query.where(created_at < until)
        return query.order_by(
            *(column.asc() if self._ascending else column.desc() for column in self._key)
        )

    def cursor(self, at: datetime, last: str) -> str:
        """Return the cursor of the rows that follow the row with this creation time and id."""
        return (
            base64.urlsafe_b64encode(f"{at.isoformat()}|{last}|{self._digest}".encode())
            .decode()
            .rstrip("=")
        )

    @property
    def _key(self) -> tuple[sa.Column[Any], sa.Column[Any]]:
        return self.table.c.created_at, self.table.c.id

    @property
    def _ascending(self) -> bool:
        return self.paging.get("oldest_first", False)

    @property
    def _digest(self) -> str:
        filters = {
            str(column): str(required)
            for column, required in self.filters.items()
            if required is not None
        }
        instants = (self.paging.get("since"), self.paging.get("until"))
        span = [
            None if instant is None else instant.astimezone(UTC).isoformat() for instant in instants
        ]
        return json_digest([self.table.name, filters, span, self._ascending, *self.words])[:16]

    def _decode(self, cursor: str) -> tuple[sa.BindParameter[datetime], sa.BindParameter[str]]:
        try:
            text = base64.urlsafe_b64decode(cursor + "=" * (-len(cursor) % 4)).decode()
            at, last, digest = text.split("|")
            instant = datetime.fromisoformat(at)
            if instant.tzinfo is None or not last.isalnum():
                raise ValueError("not a cursor of this store")
            instant = instant.astimezone(UTC)
        except (ValueError, OverflowError, binascii.Error):
            raise _cursor_error("is not a `next_cursor` of an earlier page") from None
        if digest != self._digest:
            raise _cursor_error("belongs to a list with other filters or order")
        return sa.literal(instant, UtcDateTime()), sa.literal(last)


def _cursor_error(problem: str) -> InputError:
    return InputError(f"cursor {problem}. Omit it to get the first page.", field="cursor")
