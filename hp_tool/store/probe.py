"""What state a database is in, found without changing or locking anything."""

from __future__ import annotations

import os
from datetime import UTC, datetime, timedelta
from pathlib import Path

import sqlalchemy as sa

from hp_tool.domain.access import DatabaseState
from hp_tool.domain.webhooks import OVERDUE_S
from hp_tool.store import schema
from hp_tool.store.base import now, translated_errors
from hp_tool.store.engine import create_engine, parse_url
from hp_tool.store.webhooks import HOOK, SEARCH, untold


def probe(url: str) -> DatabaseState | None:
    """The state of the database at a URL; None for a SQLite file that is not there, which asking does not make.

    Raises StoreError where it does not answer, InputError for a URL that cannot be read.
    """
    parsed = parse_url(url)
    if parsed.get_backend_name() == "sqlite" and not Path(parsed.database or "").is_file():
        return None
    engine = create_engine(url)
    try:
        with translated_errors(engine), engine.begin() as connection:
            return state_of(connection)
    finally:
        engine.dispose()


def state_of(connection: sa.Connection) -> DatabaseState:
    """The state of the database behind a connection."""
    before = datetime.now(UTC)
    offset = now(connection) - before
    return DatabaseState(
        revision=schema.revision(connection),
        needed_revision=schema.HEAD,
        clock_offset_s=offset.total_seconds(),
        read_only=_read_only(connection),
        overdue_webhooks=_overdue_webhooks(connection),
    )


def _overdue_webhooks(connection: sa.Connection) -> int:
    if not sa.inspect(connection).has_table(HOOK.name):  # of an older version, or of nobody's yet
        return 0
    # The first attempt is due as the search ends, though `next_attempt_at` says when it was submitted.
    before = now(connection) - timedelta(seconds=OVERDUE_S)
    late = HOOK.c.next_attempt_at <= before, SEARCH.c.finished_at <= before
    number: int = connection.execute(untold(sa.func.count()).where(*late)).scalar_one()
    return number


def _read_only(connection: sa.Connection) -> bool:
    """Whether writing would fail: a standby server, or a file that this user may not write."""
    if connection.dialect.name == "postgresql":
        answer: str = connection.execute(sa.text("SHOW transaction_read_only")).scalar_one()
        return answer == "on"
    file = Path(connection.engine.url.database or "")
    return not (os.access(file, os.W_OK) and os.access(file.parent, os.W_OK))  # WAL needs the folder too
