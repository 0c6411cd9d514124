"""Delete old data: search details, ended searches, and measurements."""

from collections.abc import Collection, Sequence
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any

import sqlalchemy as sa

from hp_tool.domain.records import REUSED
from hp_tool.domain.retention import MAX_DAYS, MIN_DAYS, EndedRun, RetainedData
from hp_tool.errors import InputError
from hp_tool.store import tables
from hp_tool.store.base import ENDED, OPEN_RUN, StoreBase, now

PRUNED_ROWS = 1000
"""Number of rows deleted per transaction. It is small, so that others wait only briefly for the
write lock.
"""
PRUNED_SEARCHES = 20
"""Number of searches deleted per transaction, with their runs and events."""
SEARCH, RUN, EVENT, KEY, MEASUREMENT = (
    tables.searches.c,
    tables.runs.c,
    tables.events.c,
    tables.idempotency_keys.c,
    tables.measurements.c,
)
UNFINISHED = sa.select(SEARCH.id).where(SEARCH.state.not_in(ENDED))
NOT_NEEDED = sa.and_(
    sa.or_(MEASUREMENT.search_id.is_(None), MEASUREMENT.search_id.not_in(UNFINISHED)),
    ~sa.exists().where(
        RUN.state.in_(OPEN_RUN), RUN.predicted[REUSED].as_string() == MEASUREMENT.id
    ),
)
"""Condition that no unfinished search needs a measurement, whether measured by itself or reused."""
NO_OPEN_RUN = ~sa.exists().where(SEARCH.id == RUN.search_id, RUN.state.in_(OPEN_RUN))


class Retention(StoreBase):
    """Retention methods of `AccessStore`."""

    def prune(self, *, older_than_days: float, dry_run: bool = False) -> dict[str, int]:
        older_than = self._before(older_than_days)
        of_ended_search = sa.exists().where(
            SEARCH.id == EVENT.search_id, SEARCH.state.in_(ENDED), SEARCH.finished_at < older_than
        )
        deleted = sa.and_(
            MEASUREMENT.state == "deleted", MEASUREMENT.created_at < older_than, NOT_NEEDED
        )
        return {
            "events": self._delete(tables.events, of_ended_search, dry_run=dry_run),
            "audit": self._delete(
                tables.audit, tables.audit.c.created_at < older_than, dry_run=dry_run
            ),
            "idempotency_keys": self._delete(
                tables.idempotency_keys, KEY.created_at < older_than, dry_run=dry_run
            ),
            "logs": self._cut_logs(older_than, dry_run=dry_run),
            "measurements": self._delete(tables.measurements, deleted, dry_run=dry_run),
        }

    def prune_measurements(self, *, older_than_days: float, dry_run: bool = False) -> int:
        old = sa.and_(MEASUREMENT.created_at < self._before(older_than_days), NOT_NEEDED)
        return self._delete(tables.measurements, old, dry_run=dry_run)

    def prune_watches(self, *, older_than_days: float, dry_run: bool = False) -> int:
        old = tables.watches.c.updated_at < self._before(older_than_days)
        return self._delete(tables.watches, old, dry_run=dry_run)

    def old_searches(
        self, *, older_than_days: float | None = None, keep: int | None = None
    ) -> list[str]:
        yesterday = self._before(MIN_DAYS)
        ended = (
            sa.select(SEARCH.id)
            .where(SEARCH.state.in_(ENDED))
            .order_by(SEARCH.finished_at.desc(), SEARCH.id)
        )
        deletable = SEARCH.finished_at < yesterday, NO_OPEN_RUN
        old: set[str] = set()
        with self._reading() as connection:
            if older_than_days is not None:
                older_than = self._before(older_than_days)
                old.update(
                    connection.scalars(ended.where(SEARCH.finished_at < older_than, *deletable))
                )
            if keep is not None:
                newest = ended.limit(keep).subquery()
                old.update(
                    connection.scalars(
                        ended.where(SEARCH.id.not_in(sa.select(newest.c.id)), *deletable)
                    )
                )
        return sorted(old)

    def delete_searches(self, *, search_ids: Sequence[str]) -> int:
        total = 0
        for start in range(0, len(search_ids), PRUNED_SEARCHES):
            ids = search_ids[start : start + PRUNED_SEARCHES]
            with self._writing() as connection:
                deletion = sa.delete(tables.searches).where(
                    SEARCH.id.in_(ids), SEARCH.state.in_(ENDED), NO_OPEN_RUN
                )
                deleted = list(connection.scalars(deletion.returning(SEARCH.id)))
                used = KEY.scope == "searches", KEY.resource_id.in_(deleted)
                connection.execute(sa.delete(tables.idempotency_keys).where(*used))
            total += len(deleted)
        return total

    def ended_runs(self, *, job_names: Collection[str]) -> dict[str, EndedRun]:
        names, ended = list(job_names), {}
        query = sa.select(RUN.job_name, RUN.search_id, RUN.finished_at).join(
            tables.searches, SEARCH.id == RUN.search_id
        )
        query = query.where(RUN.state.not_in(OPEN_RUN), SEARCH.state.in_(ENDED))
        with self._reading() as connection:
            at = now(connection)
            for start in range(0, len(names), PRUNED_ROWS):
                in_batch = RUN.job_name.in_(names[start : start + PRUNED_ROWS])
                for row in connection.execute(query.where(in_batch)):
                    age_s = (at - row.finished_at).total_seconds()
                    ended[row.job_name] = EndedRun(search_id=row.search_id, age_s=age_s)
        return ended

    def retained_data(self) -> RetainedData:
        with self._reading() as connection:
            return retention_state(connection)

    def _before(self, days: float) -> datetime:
        if not MIN_DAYS <= days <= MAX_DAYS:
            expected = f"Use {MIN_DAYS:g} to {MAX_DAYS:g} days."
            raise InputError(f"older_than_days is {days:g}. {expected}", field="older_than_days")
        with self._reading() as connection:
            return now(connection) - timedelta(days=days)

    def _delete(self, table: sa.Table, old: sa.ColumnElement[bool], *, dry_run: bool) -> int:
        """Delete old rows in batches, or only count them if `dry_run`. Return their number."""
        if dry_run:
            with self._reading() as connection:
                return int(
                    connection.execute(
                        sa.select(sa.func.count()).select_from(table).where(old)
                    ).scalar_one()
                )
        columns = list(table.primary_key.columns)
        key: Any = columns[0] if len(columns) == 1 else sa.tuple_(*columns)
        total = 0
        while True:
            with self._writing() as connection:
                batch = sa.select(*columns).where(old).limit(PRUNED_ROWS)
                deleted = connection.execute(sa.delete(table).where(key.in_(batch))).rowcount
            total += deleted
            if deleted < PRUNED_ROWS:
                return total

    def _cut_logs(self, before: datetime, *, dry_run: bool) -> int:
        table, last, total = tables.measurements, "", 0
        old = (
            table.c.status != "ok",
            table.c.created_at < before,
            table.c.measurement["log_tail"].as_string() != "",
        )
        if dry_run:
            with self._reading() as connection:
                return int(
                    connection.execute(
                        sa.select(sa.func.count()).select_from(table).where(*old)
                    ).scalar_one()
                )
        while True:
            with self._writing() as connection:
                query = sa.select(table.c.id, table.c.measurement).where(*old, table.c.id > last)
                rows = connection.execute(query.order_by(table.c.id).limit(PRUNED_ROWS)).all()
                for row in rows:
                    cut = row.measurement | {"log_tail": None}
                    connection.execute(
                        sa.update(table).where(table.c.id == row.id).values(measurement=cut)
                    )
            total += len(rows)
            if len(rows) < PRUNED_ROWS:
                return total
            last = rows[-1].id


def retention_state(connection: sa.Connection) -> RetainedData:
    """Return the number of ended searches and the size of the database."""
    ended = sa.select(sa.func.count(), sa.func.min(SEARCH.finished_at)).where(
        SEARCH.state.in_(ENDED)
    )
    number, oldest = connection.execute(ended).one()
    age_s = 0.0 if oldest is None else (now(connection) - oldest).total_seconds()
    return RetainedData(
        ended_searches=number, oldest_s=age_s, database_bytes=_size_bytes(connection)
    )


def _size_bytes(connection: sa.Connection) -> int:
    if connection.dialect.name == "postgresql":
        return int(
            connection.execute(
                sa.select(sa.func.pg_database_size(sa.func.current_database()))
            ).scalar_one()
        )
    return Path(connection.engine.url.database or "").stat().st_size
