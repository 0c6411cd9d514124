"""Pages of a list, newest first or oldest first, by (created_at, id): no page is slower than
another and none skips a row.
"""

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
class Listing:
    """A list: what is in it, and in which order."""

    table: sa.Table
    filters: Mapping[sa.Column[Any], Any] = field(default_factory=dict)
    """What columns must equal; None: anything."""
    paging: Paging = field(default_factory=Paging)
    words: tuple[str, ...] = ()
    """What the query looks for besides; a cursor belongs to them, too."""

    def page(
        self,
        connection: sa.Connection,
        *,
        limit: int,
        record: Callable[[sa.Row[Any]], T],
        query: sa.Select[Any] | None = None,
    ) -> Page[T]:
        """One page, from the cursor on. `query` selects created_at and id of the table, by default
        its whole rows.
        """
        if not 1 <= limit <= MAX_LIMIT:
            raise InputError(f"limit is {limit}; it must be from 1 to {MAX_LIMIT}", field="limit")
        query = self._selected(sa.select(self.table) if query is None else query)
        if (cursor := self.paging.get("cursor")) is not None:
            here, there = sa.tuple_(*self._key), sa.tuple_(*self._decode(cursor))
            query = query.where(here > there if self._rises else here < there)
        rows = connection.execute(query.limit(limit + 1)).all()
        shown = rows[:limit]
        following = self.cursor(shown[-1].created_at, shown[-1].id) if len(rows) > limit else None
        return Page(items=tuple(map(record, shown)), next_cursor=following)

    def _selected(self, query: sa.Select[Any]) -> sa.Select[Any]:
        created_at = self.table.c.created_at
        for column, wanted in self.filters.items():
            if wanted is not None:
                query = query.where(column == wanted)
        if since := self.paging.get("since"):
            query = query.where(created_at >= since)
        if until := self.paging.get("until"):
            query = query.where(created_at < until)
        return query.order_by(
            *(column.asc() if self._rises else column.desc() for column in self._key)
        )

    def cursor(self, at: datetime, last: str) -> str:
        """The cursor of what comes after the row that was created at `at` and has the id `last`."""
        return (
            base64.urlsafe_b64encode(f"{at.isoformat()}|{last}|{self._digest}".encode())
            .decode()
            .rstrip("=")
        )

    @property
    def _key(self) -> tuple[sa.Column[Any], sa.Column[Any]]:
        return self.table.c.created_at, self.table.c.id

    @property
    def _rises(self) -> bool:
        return self.paging.get("oldest_first", False)

    @property
    def _digest(self) -> str:
        filters = {
            str(column): str(wanted)
            for column, wanted in self.filters.items()
            if wanted is not None
        }
        instants = (self.paging.get("since"), self.paging.get("until"))
        span = [
            None if instant is None else instant.astimezone(UTC).isoformat() for instant in instants
        ]
        return json_digest([self.table.name, filters, span, self._rises, *self.words])[:16]

    def _decode(self, cursor: str) -> tuple[sa.BindParameter[datetime], sa.BindParameter[str]]:
        """The key of the row that the cursor names. InputError for another list's."""
        try:
            text = base64.urlsafe_b64decode(cursor + "=" * (-len(cursor) % 4)).decode()
            at, last, digest = text.split("|")
            instant = datetime.fromisoformat(at)
            if instant.tzinfo is None or not last.isalnum():
                raise ValueError("no cursor of ours")
            instant = instant.astimezone(UTC)
        except (ValueError, OverflowError, binascii.Error):
            raise _refused("is not one that an earlier page answered") from None
        if digest != self._digest:
            raise _refused("belongs to another list, order or filter")
        return sa.literal(instant, UtcDateTime()), sa.literal(last)


def _refused(why: str) -> InputError:
    return InputError(f"cursor {why}; leave it out for the first page", field="cursor")
