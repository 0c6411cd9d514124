"""What happens around a change of the schema: who works on the database, a copy of a SQLite file
beside it, and what the way back would lose.
"""

import logging
from datetime import UTC, datetime, timedelta
from pathlib import Path

import sqlalchemy as sa
from alembic.script import ScriptDirectory
from alembic.script.revision import RevisionError
from alembic.util import CommandError

from hp_tool.domain.records import SearchState
from hp_tool.errors import ConflictError, InputError
from hp_tool.store import maintenance, schema
from hp_tool.store.base import now, transaction
from hp_tool.store.columns import UtcDateTime
from hp_tool.store.engine import masked, opened, parse_url
from hp_tool.store.workers import SILENT_S

log = logging.getLogger(__name__)
# As they were in the first schema that had them: the database may be of any version since.
WORKER = sa.table("hp_workers", sa.column("holder"), sa.column("seen_at", UtcDateTime()))
SEARCH = sa.table(
    "hp_searches",
    sa.column("state"),
    sa.column("lease_holder"),
    sa.column("lease_expires_at", UtcDateTime()),
)
LOST = "LOST_BY_DOWNGRADE"
"""Of a migration: queries that count what only its schema can hold, by what that is."""


def upgrade(url: str, *, under_workers: bool = False) -> None:
    """Bring a database to the newest revision; a SQLite file of an older one is copied beside
    itself first, with a warning that names the copy.

    Raises ConflictError `database_in_use` where a SQLite file is older and a worker or `tune` is at
    work on it, unless `under_workers`; StoreError for a newer revision.
    """
    with schema.alone(url, lock=schema.UPGRADE_LOCK):
        revision = schema.current(url)
        if revision is not None and revision > schema.HEAD:
            raise schema.newer(revision, where=f"database {masked(url)}")
        if _is_file(url) and revision not in (None, schema.HEAD):
            if not under_workers:
                check_unused(url, fix="stop it, then run `hp-tool db upgrade`")
            _keep_beside(url, revision)
        schema.migrate(url, to="head")


def downgrade(url: str, *, to: str) -> None:
    """Take a database back to an older revision where nothing is lost; a SQLite file is copied
    beside itself first.

    Raises InputError for a revision that is unknown or newer, ConflictError `data_would_be_lost`
    naming the migrations that cannot be undone without loss, and `database_in_use` where a worker
    or `tune` is at work.
    """
    with schema.alone(url, lock=schema.UPGRADE_LOCK):
        revision = schema.current(url)
        if revision == to:
            return
        lost = losses(url, to=to)
        if lost:
            raise ConflictError(
                f"schema {to} cannot hold what is in {masked(url)}: {'; '.join(lost)}. Restore a "
                "backup of that version, or "
                "remove these first",
                code="data_would_be_lost",
            )
        check_unused(url, fix="stop it first")
        if _is_file(url):
            _keep_beside(url, revision)
        schema.migrate(url, to=to, down=True)


def losses(url: str, *, to: str) -> list[str]:
    """What each migration holds that the schema `to` cannot, newest first: `0012: 3 calibrations of
    owners`.
    """
    scripts = ScriptDirectory.from_config(schema.alembic_config())
    current = schema.current(url)
    if current is None:
        raise InputError(f"{masked(url)} has no hp-tool schema", field="revision")
    try:
        steps = list(scripts.iterate_revisions(current, to))
    except (CommandError, RevisionError) as error:
        raise InputError(
            f"there is no way back from schema {current} to {to!r}: {error}", field="revision"
        ) from None
    with opened(url) as engine, transaction(engine) as connection:
        counted = (
            (step.revision, connection.execute(sa.text(query)).scalar_one(), what)
            for step in steps
            for what, query in getattr(step.module, LOST).items()
        )
        return [f"{revision}: {number} {what}" for revision, number, what in counted if number]


def check_unused(url: str, *, fix: str) -> None:
    """Raise ConflictError `database_in_use` where somebody is at work on the database."""
    if holders := live_holders(url):
        raise ConflictError(
            f"{masked(url)} has schema {schema.current(url)} and is in use by "
            f"{', '.join(holders)}: {fix}",
            code="database_in_use",
        )


def live_holders(url: str) -> list[str]:
    """Workers with a heartbeat, and whoever holds the lease of a search, of a database of any
    version.
    """
    with opened(url) as engine, transaction(engine) as connection:
        tables, at = set(sa.inspect(connection).get_table_names()), now(connection)
        queries = {
            WORKER: sa.select(WORKER.c.holder).where(
                WORKER.c.seen_at >= at - timedelta(seconds=SILENT_S)
            ),
            SEARCH: sa.select(SEARCH.c.lease_holder).where(
                SEARCH.c.state == SearchState.RUNNING, SEARCH.c.lease_expires_at > at
            ),
        }
        holders = (
            connection.scalars(query) for table, query in queries.items() if table.name in tables
        )
        return sorted({holder for each in holders for holder in each if holder})


def _is_file(url: str) -> bool:
    return parse_url(url).get_backend_name() == "sqlite"


def _keep_beside(url: str, revision: str | None) -> None:
    """Copy a SQLite file to FILE.schema-REVISION.TIME.backup."""
    file = Path(parse_url(url).database or "").absolute()
    path = file.with_name(
        f"{file.name}.schema-{revision}.{datetime.now(UTC):%Y%m%dT%H%M%S%fZ}.backup"
    )
    maintenance.backup(url=url, path=path)
    log.warning(
        "the database %s has schema %s, which changes now: a copy as it was is %s",
        file,
        revision,
        path,
    )
