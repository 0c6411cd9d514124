"""What may be forgotten: the tellings of what happened. What was asked, run, measured and learnt stays."""

from __future__ import annotations

from datetime import datetime, timedelta
from typing import Any

import sqlalchemy as sa

from hp_tool.domain.records import SearchState
from hp_tool.errors import InputError
from hp_tool.store import tables
from hp_tool.store.base import StoreBase, now

BATCH_ROWS = 1000
"""Rows a transaction: nobody waits long for the write lock."""
SECONDS_A_DAY = 86_400.0
ENDED = tuple(state for state in SearchState if state.ended)
SHORTEST_DAYS = 1.0
"""A client may still follow yesterday's search, or send a request of yesterday again."""


class Retention(StoreBase):
    """The part of `AccessStore` that forgets."""

    def prune(self, *, older_than_days: float) -> dict[str, int]:
        if not SHORTEST_DAYS <= older_than_days <= 36_500:
            raise InputError(f"{older_than_days:g} days; it must be from {SHORTEST_DAYS:g} to 36500", field="older_than_days")
        with self._reading() as connection:
            before = now(connection) - timedelta(seconds=older_than_days * SECONDS_A_DAY)
        search, event = tables.searches.c, tables.events.c
        of_old = sa.exists().where(search.id == event.search_id, search.state.in_(ENDED), search.finished_at < before)
        used = tables.idempotency_keys.c
        return {
            "events": self._delete(tables.events, sa.tuple_(event.search_id, event.seq), of_old),
            "audit": self._delete(tables.audit, tables.audit.c.id, tables.audit.c.created_at < before),
            "idempotency_keys": self._delete(
                tables.idempotency_keys, sa.tuple_(used.scope, used.owner, used.key), used.created_at < before
            ),
            "logs": self._cut_logs(before),
        }

    def _delete(self, table: sa.Table, key: Any, old: sa.ColumnElement[bool]) -> int:
        """Delete what is old, some rows at a time; how many there were."""
        columns = list(table.primary_key.columns)
        total = 0
        while True:
            with self._writing() as connection:
                some = sa.select(*columns).where(old).limit(BATCH_ROWS)
                gone = connection.execute(sa.delete(table).where(key.in_(some))).rowcount
            total += gone
            if gone < BATCH_ROWS:
                return total

    def _cut_logs(self, before: datetime) -> int:
        """Take the ends of logs out of old measurements; status and cause stay."""
        table, last, total = tables.measurements, "", 0
        holds_log = table.c.measurement["log_tail"].as_string() != ""
        while True:
            with self._writing() as connection:
                query = sa.select(table.c.id, table.c.measurement).where(
                    table.c.status != "ok", table.c.created_at < before, table.c.id > last, holds_log
                )
                rows = connection.execute(query.order_by(table.c.id).limit(BATCH_ROWS)).all()
                for row in rows:
                    cut = row.measurement | {"log_tail": None}
                    connection.execute(sa.update(table).where(table.c.id == row.id).values(measurement=cut))
            total += len(rows)
            if len(rows) < BATCH_ROWS:
                return total
            last = rows[-1].id
