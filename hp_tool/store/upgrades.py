"""Safe upgrades and downgrades: check for users, back up SQLite files, refuse to lose data."""

import logging
from datetime import UTC, datetime, timedelta
from pathlib import Path

import sqlalchemy as sa
from alembic.script import ScriptDirectory
from alembic.script.revision import RevisionError
from alembic.util import CommandError

from hp_tool.domain.states import SearchState
from hp_tool.errors import ConflictError, InputError
from hp_tool.store import maintenance, schema
from hp_tool.store.base import now, transaction
from hp_tool.store.columns import UtcDateTime
from hp_tool.store.engine import masked, opened, parse_url
from hp_tool.store.workers import WORKER_TIMEOUT_S

log = logging.getLogger(__name__)
# As in the first schema that had them, because the database may have any later version.
WORKER = sa.table("hp_workers", sa.column("holder"), sa.column("seen_at", UtcDateTime()))
SEARCH = sa.table(
    "hp_searches",
    sa.column("state"),
    sa.column("lease_holder"),
    sa.column("lease_expires_at", UtcDateTime()),
)
LOSS_QUERIES_NAME = "LOST_BY_DOWNGRADE"
"""Name in a migration module of a mapping: description -> query that counts rows that a downgrade
loses.
"""


def upgrade(url: str, *, while_in_use: bool = False) -> None:
    """Upgrade a database to the newest revision.

    An older SQLite file is copied to a backup first, and a warning names the copy.

    Args:
        url: Database URL.
        while_in_use: Upgrade although a worker or `tune` uses the SQLite file.

    Raises:
        ConflictError: A worker or `tune` uses the SQLite file (`database_in_use`).
        StoreError: The database has a newer revision.
    """
    with schema.exclusive_access(url, lock=schema.UPGRADE_LOCK):
        revision = schema.current(url)
        if revision is not None and revision > schema.HEAD:
            raise schema.newer_schema_error(revision, where=f"database {masked(url)}")
        if _is_file(url) and revision not in (None, schema.HEAD):
            if not while_in_use:
                check_unused(url, fix="stop it, then run `hp-tool db upgrade`")
            _back_up_file(url, revision)
        schema.migrate(url, to="head")


def downgrade(url: str, *, to: str) -> None:
    """Downgrade a database to an older revision if no data is lost; back up a SQLite file first.

    Raises:
        InputError: The revision is unknown or newer.
        ConflictError: The downgrade would lose data (`data_would_be_lost`, names the migrations),
            or a worker or `tune` uses the database (`database_in_use`).
    """
    with schema.exclusive_access(url, lock=schema.UPGRADE_LOCK):
        revision = schema.current(url)
        if revision == to:
            return
        lost = find_losses(url, to=to)
        if lost:
            raise ConflictError(
                f"Schema {to} cannot store all data of {masked(url)}: {'; '.join(lost)}. Remove "
                "it first, or restore a backup of that version.",
                code="data_would_be_lost",
            )
        check_unused(url, fix="stop it first")
        if _is_file(url):
            _back_up_file(url, revision)
        schema.migrate(url, to=to, down=True)


def find_losses(url: str, *, to: str) -> list[str]:
    """List the data that schema `to` cannot hold, by migration, newest first.

    Example of an entry: `0012: 3 calibrations of owners`.
    """
    scripts = ScriptDirectory.from_config(schema.alembic_config())
    current = schema.current(url)
    if current is None:
        raise InputError(f"{masked(url)} has no hp-tool schema.", field="revision")
    try:
        steps = list(scripts.iterate_revisions(current, to))
    except (CommandError, RevisionError) as error:
        raise InputError(
            f"Cannot downgrade schema {current} to {to!r}: {error}", field="revision"
        ) from None
    with opened(url) as engine, transaction(engine) as connection:
        counted = (
            (step.revision, connection.execute(sa.text(query)).scalar_one(), what)
            for step in steps
            for what, query in getattr(step.module, LOSS_QUERIES_NAME).items()
        )
        return [f"{revision}: {number} {what}" for revision, number, what in counted if number]


def check_unused(url: str, *, fix: str) -> None:
    """Raise ConflictError `database_in_use` if a worker or `tune` uses the database."""
    if holders := live_holders(url):
        raise ConflictError(
            f"{masked(url)} has schema {schema.current(url)} and is in use by "
            f"{', '.join(holders)}: {fix}",
            code="database_in_use",
        )


def live_holders(url: str) -> list[str]:
    """Return live workers and lease holders of a database of any schema version."""
    with opened(url) as engine, transaction(engine) as connection:
        tables, at = set(sa.inspect(connection).get_table_names()), now(connection)
        queries = {
            WORKER: sa.select(WORKER.c.holder).where(
                WORKER.c.seen_at >= at - timedelta(seconds=WORKER_TIMEOUT_S)
            ),
            SEARCH: sa.select(SEARCH.c.lease_holder).where(
                SEARCH.c.state == SearchState.RUNNING, SEARCH.c.lease_expires_at > at
            ),
        }
        holders = (
            connection.scalars(query) for table, query in queries.items() if table.name in tables
        )
        return sorted({holder for names in holders for holder in names if holder})


def _is_file(url: str) -> bool:
    return parse_url(url).get_backend_name() == "sqlite"


def _back_up_file(url: str, revision: str | None) -> None:
    """Copy a SQLite file to FILE.schema-REVISION.TIME.backup, and log a warning with its path."""
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
