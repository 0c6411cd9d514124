"""The store on SQLAlchemy: its parts put together."""

from __future__ import annotations

from hp_tool.domain.access import DatabaseState
from hp_tool.store.access import Access
from hp_tool.store.coordination import Coordination
from hp_tool.store.deliveries import Deliveries
from hp_tool.store.knowledge import Knowledge
from hp_tool.store.measurements import Measurements
from hp_tool.store.probe import state_of
from hp_tool.store.registrations import Registrations
from hp_tool.store.retention import Retention
from hp_tool.store.runs import Runs
from hp_tool.store.searches import Searches
from hp_tool.store.strays import Strays
from hp_tool.store.usage import UsageOf


class SqlStore(
    Searches, Coordination, Runs, Measurements, Knowledge, Registrations, Access, UsageOf, Retention, Deliveries, Strays
):
    """`AccessStore` (hp_tool.domain) on SQLite or PostgreSQL; safe to share between threads, opened anew in each process."""

    def state(self) -> DatabaseState:
        with self._reading() as connection:
            return state_of(connection)

    def close(self) -> None:
        self._engine.dispose()
