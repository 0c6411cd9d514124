"""Upgrade a database safely: check that it is not in use, and back up SQLite files."""

import logging
from datetime import UTC, datetime, timedelta
from pathlib import Path

import sqlalchemy as sa

from hp_tool.domain.states import SearchState
from hp_tool.errors import ConflictError
from hp_tool.store import maintenance, schema
from hp_tool.store.base import now, transaction
from hp_tool.store.columns import UtcDateTime
from hp_tool.store.engine import mask_password, open_engine, parse_url
from hp_tool.store.workers import WORKER_TIMEOUT_S

log = logging.getLogger(__name__)
# Defined as in schema OLDEST, because the database may have any later version.
WORKER = sa.table("hp_workers", sa.column("holder"), sa.column("seen_at", UtcDateTime()))
SEARCH = sa.table(
    "hp_searches",
    sa.column("state"),
    sa.column("lease_holder"),
    sa.column("lease_expires_at", UtcDateTime()),
)


def upgrade(url: str, *, while_in_use: bool = False) -> None:
    """Upgrade a database to the newest revision.

    An older SQLite file is backed up first, and a warning names the backup.

    Args:
        url: Database URL.
        while_in_use: Upgrade even if a worker or `tune` is using the SQLite file.

    Raises:
        ConflictError: A worker or `tune` is using the SQLite file (`database_in_use`).
        StoreError: The schema was written by a newer hp-tool or by a preview.
    """
    with schema.exclusive_access(url, lock=schema.UPGRADE_LOCK):
        revision = schema.read(url, schema.check_known)
        if _is_file(url) and revision not in (None, schema.HEAD):
            if not while_in_use:
                check_unused(url)
            _back_up_file(url, revision)
        schema.migrate(url)


def check_unused(url: str) -> None:
    """Raise ConflictError `database_in_use` if a worker or `tune` is using the database."""
    if holders := live_holders(url):
        raise ConflictError(
            f"{mask_password(url)} has schema {schema.current(url)} and is in use by "
            f"{', '.join(holders)}: stop it, then run `hp-tool db upgrade`",
            code="database_in_use",
        )


def live_holders(url: str) -> list[str]:
    """Return the live workers and lease holders of a database of any schema version."""
    with open_engine(url) as engine, transaction(engine) as connection:
        at = now(connection)
        queries = (
            sa.select(WORKER.c.holder).where(
                WORKER.c.seen_at >= at - timedelta(seconds=WORKER_TIMEOUT_S)
            ),
            sa.select(SEARCH.c.lease_holder).where(
                SEARCH.c.state == SearchState.RUNNING, SEARCH.c.lease_expires_at > at
            ),
        )
        return sorted(
            {holder for query in queries for holder in connection.scalars(query) if holder}
        )


def _is_file(url: str) -> bool:
    return parse_url(url).get_backend_name() == "sqlite"


def _back_up_file(url: str, revision: str | None) -> None:
    """Copy a SQLite file to FILE.schema-REVISION.TIME.backup. Log a warning with its path."""
    file = Path(parse_url(url).database or "").absolute()
    path = file.with_name(
        f"{file.name}.schema-{revision}.{datetime.now(UTC):%Y%m%dT%H%M%S%fZ}.backup"
    )
    maintenance.backup(url=url, path=path)
    log.warning(
        "Changing the schema of database %s (now %s); backup: %s",
        file,
        revision,
        path,
    )
