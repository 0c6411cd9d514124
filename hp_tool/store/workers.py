"""Workers that are alive, and what they can run."""

from collections.abc import Sequence
from dataclasses import asdict
from datetime import timedelta
from typing import Any

import sqlalchemy as sa

from hp_tool.domain.records import Offer, WorkerRecord
from hp_tool.store import tables
from hp_tool.store.base import StoreBase, insert_if_new, now
from hp_tool.store.columns import row_dict

WORKER = tables.workers
SILENT_S = 30.0
"""After so long without a word a worker counts as gone."""


class Workers(StoreBase):
    def announce_worker(self, *, holder: str, offers: Sequence[Offer]) -> None:
        with self._writing(lasting=False) as connection:
            at = now(connection)
            changed: dict[str, Any] = {"offers": [asdict(each) for each in offers], "seen_at": at}
            update = sa.update(WORKER).where(WORKER.c.holder == holder).values(**changed)
            if connection.execute(update).rowcount == 0:
                # Who was killed could not take leave; a new one clears up.
                connection.execute(
                    sa.delete(WORKER).where(WORKER.c.seen_at < at - timedelta(seconds=SILENT_S))
                )
                insert_if_new(connection, WORKER, {"holder": holder, "started_at": at, **changed})

    def retire_worker(self, *, holder: str) -> None:
        with self._writing() as connection:
            connection.execute(sa.delete(WORKER).where(WORKER.c.holder == holder))

    def live_workers(self) -> list[WorkerRecord]:
        with self._reading() as connection:
            alive = WORKER.c.seen_at >= now(connection) - timedelta(seconds=SILENT_S)
            rows = connection.execute(
                sa.select(WORKER).where(alive).order_by(WORKER.c.started_at, WORKER.c.holder)
            ).all()
        return [
            WorkerRecord(**row_dict(row) | {"offers": tuple(Offer(**each) for each in row.offers)})
            for row in rows
        ]
