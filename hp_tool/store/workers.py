"""Live workers and the devices that they provide."""

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
WORKER_TIMEOUT_S = 30.0
"""Seconds after its last heartbeat when a worker counts as dead."""


class Workers(StoreBase):
    """Live workers and their heartbeats."""

    def announce_worker(self, *, holder: str, offers: Sequence[Offer]) -> None:
        with self._writing(durable=False) as connection:
            at = now(connection)
            changed: dict[str, Any] = {
                "offers": [asdict(offer) for offer in offers],
                "seen_at": at,
            }
            update = sa.update(WORKER).where(WORKER.c.holder == holder).values(**changed)
            if connection.execute(update).rowcount == 0:
                # Killed workers cannot deregister, so each new worker deletes their rows.
                connection.execute(
                    sa.delete(WORKER).where(
                        WORKER.c.seen_at < at - timedelta(seconds=WORKER_TIMEOUT_S)
                    )
                )
                insert_if_new(connection, WORKER, {"holder": holder, "started_at": at, **changed})

    def retire_worker(self, *, holder: str) -> None:
        with self._writing() as connection:
            connection.execute(sa.delete(WORKER).where(WORKER.c.holder == holder))

    def live_workers(self) -> list[WorkerRecord]:
        with self._reading() as connection:
            alive = WORKER.c.seen_at >= now(connection) - timedelta(seconds=WORKER_TIMEOUT_S)
            rows = connection.execute(
                sa.select(WORKER).where(alive).order_by(WORKER.c.started_at, WORKER.c.holder)
            ).all()
        return [
            WorkerRecord(
                **row_dict(row) | {"offers": tuple(Offer(**offer) for offer in row.offers)}
            )
            for row in rows
        ]
