"""Column types and ids."""

from __future__ import annotations

import secrets
from datetime import UTC, datetime
from typing import Any

import sqlalchemy as sa
from sqlalchemy.engine import Dialect


class UtcDateTime(sa.types.TypeDecorator[datetime]):
    """An instant. SQLite knows no time zones, so it gets UTC without one and gives it back with it."""

    impl = sa.DateTime(timezone=True)
    cache_ok = True

    def process_bind_param(self, value: datetime | None, dialect: Dialect) -> datetime | None:
        if value is None:
            return None
        if value.tzinfo is None:
            raise ValueError("a stored instant needs a time zone")
        value = value.astimezone(UTC)
        return value.replace(tzinfo=None) if dialect.name == "sqlite" else value

    def process_result_value(self, value: datetime | None, dialect: Dialect) -> datetime | None:
        if value is None:
            return None
        return value.replace(tzinfo=UTC) if value.tzinfo is None else value.astimezone(UTC)


def json_column() -> sa.JSON:
    """JSON kept as text: the order of keys survives. None is SQL's NULL, not JSON's null."""
    return sa.JSON(none_as_null=True)


def new_id() -> str:
    """64 random bits in hex: short enough to type, part of job names, harmless in a URL."""
    return secrets.token_hex(8)


def row_dict(row: sa.Row[Any]) -> dict[str, Any]:
    """A row's columns by name, to be picked apart by a record's constructor."""
    return dict(row._mapping)
