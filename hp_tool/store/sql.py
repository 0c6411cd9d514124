"""The SQLAlchemy store, which combines the classes of this package."""

from hp_tool.domain.access import DatabaseState
from hp_tool.errors import HpToolError, StoreError
from hp_tool.store import database_url, schema
from hp_tool.store.access import Access
from hp_tool.store.base import transaction
from hp_tool.store.coordination import Coordination
from hp_tool.store.engine import create_engine, mask_password
from hp_tool.store.knowledge import Knowledge
from hp_tool.store.measurements import Measurements
from hp_tool.store.retention import Retention
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
    Retention,
    Deliveries,
    Strays,
    Watches,
    Workers,
):
    """`AccessStore` on SQLite or PostgreSQL.

    An instance can be shared between threads, but not between processes.
    """

    def state(self) -> DatabaseState:
        with self._reading() as connection:
            return schema.state_of(connection)

    def close(self) -> None:
        self._engine.dispose()


def open_store(url: str | None = None) -> SqlStore:
    """Open the store at a URL, by default `database_url()`. Call `close()` when done.

    A SQLite file is created or upgraded automatically, after a backup of an older file. A
    PostgreSQL schema is changed only by `hp-tool db upgrade`, because many hosts may use the
    database.

    Raises:
        ConflictError: The SQLite file needs an upgrade, but a worker is using it.
        StoreError: The PostgreSQL schema is not current.
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
            from hp_tool.store import upgrades  # imports Alembic

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
                f"database {mask_password(url)} {state}: run `hp-tool db upgrade`",
                code="schema_outdated",
            )
    return SqlStore(engine=engine)
