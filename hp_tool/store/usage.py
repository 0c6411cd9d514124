"""The store at a glance, for whoever watches over it."""

from __future__ import annotations

import sqlalchemy as sa

from hp_tool.domain.access import Usage
from hp_tool.domain.records import RunState, SearchState
from hp_tool.domain.webhooks import WebhookState
from hp_tool.store import tables
from hp_tool.store.base import StoreBase, now
from hp_tool.store.webhooks import HOOK, untold

SEARCH, RUN = tables.searches, tables.runs


class UsageOf(StoreBase):
    """The part of `AccessStore` that counts."""

    def usage(self) -> Usage:
        by_state = sa.select(SEARCH.c.state, sa.func.count()).group_by(SEARCH.c.state)
        runs_by_state = sa.select(RUN.c.state, sa.func.count(), sa.func.sum(RUN.c.gpu_seconds)).group_by(RUN.c.state)
        with self._reading() as connection:
            at = now(connection)
            searches = {row[0]: row[1] for row in connection.execute(by_state)}
            runs = connection.execute(runs_by_state).all()
            next_in_line = sa.select(SEARCH.c.updated_at).where(SEARCH.c.state == SearchState.QUEUED)
            oldest = connection.execute(next_in_line.order_by(SEARCH.c.updated_at).limit(1)).scalar_one_or_none()
            expired = SEARCH.c.state == SearchState.RUNNING, SEARCH.c.lease_expires_at < at
            left_alone = connection.execute(sa.select(sa.func.count()).where(*expired)).scalar_one()
            settled = sa.select(HOOK.c.state, sa.func.count()).where(HOOK.c.state != WebhookState.PENDING)
            webhooks = {row[0]: row[1] for row in connection.execute(settled.group_by(HOOK.c.state))}
            webhooks[WebhookState.PENDING] = connection.execute(untold(sa.func.count())).scalar_one()
        counted = {row[0]: row[1] for row in runs}
        return Usage(
            searches={state: searches.get(state, 0) for state in SearchState},
            runs={state: counted.get(state, 0) for state in RunState},
            gpu_seconds=float(sum(row[2] or 0.0 for row in runs)),
            oldest_queued_s=0.0 if oldest is None else max((at - oldest).total_seconds(), 0.0),
            expired_leases=left_alone,
            webhooks={state: webhooks.get(state, 0) for state in WebhookState},
        )
