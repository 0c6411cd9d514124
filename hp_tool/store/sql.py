"""The store on SQLAlchemy: its parts put together, and the door to it."""

from hp_tool.domain.access import DatabaseState
from hp_tool.errors import HpToolError, StoreError
from hp_tool.store import database_url, schema
from hp_tool.store.access import Access
from hp_tool.store.base import transaction
from hp_tool.store.coordination import Coordination
from hp_tool.store.engine import create_engine, masked
from hp_tool.store.knowledge import Knowledge
from hp_tool.store.measurements import Measurements
from hp_tool.store.retention import Forgetting
from hp_tool.store.runs import Runs
from hp_tool.store.searches import Searches
from hp_tool.store.strays import Strays
from hp_tool.store.watches import Watches
from hp_tool.store.webhooks import Deliveries
from hp_tool.store.workers import Workers


class SqlStore(
    Searches,
    Coordination,
    Runs,
    Measurements,
    Knowledge,
    Access,
    Forgetting,
    Deliveries,
    Strays,
    Watches,
    Workers,
):
    """`AccessStore` (hp_tool.domain) on SQLite or PostgreSQL; safe to share between threads, opened
    anew in each process.
    """

    def state(self) -> DatabaseState:
        with self._reading() as connection:
            return schema.state_of(connection)

    def close(self) -> None:
        self._engine.dispose()


def open_store(url: str | None = None) -> SqlStore:
    """The store at a URL, by default `database_url()`; close() it in the end.

    A SQLite file is created or upgraded on the way; an older one is copied beside itself first, and
    left alone with a ConflictError while a worker is at work on it. PostgreSQL is shared by many
    hosts, so only `hp-tool db upgrade` changes its schema; a StoreError says so.
    """
    url = database_url(url)
    engine = create_engine(url)
    try:
        with transaction(engine) as connection:
            revision = schema.check_known(connection)
    except StoreError:
        engine.dispose()
        raise
    if revision != schema.HEAD:
        if engine.dialect.name == "sqlite":
            from hp_tool.store import upgrades  # with Alembic, which nobody else needs

            try:
                upgrades.upgrade(url)
            except HpToolError:
                engine.dispose()
                raise
        else:
            state = (
                "has no hp-tool schema"
                if revision is None
                else f"has schema {revision}, this version needs {schema.HEAD}"
            )
            engine.dispose()
            raise StoreError(
                f"database {masked(url)} {state}: run `hp-tool db upgrade`", code="schema_outdated"
            )
    return SqlStore(engine=engine)
