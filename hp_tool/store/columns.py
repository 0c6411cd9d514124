"""Column types, ids, and conversion between domain values and JSON."""

import json
import secrets
from datetime import UTC, datetime
from typing import Annotated, Any, TypeVar

import sqlalchemy as sa
from pydantic import Discriminator, Tag, TypeAdapter
from pydantic_core import to_jsonable_python
from sqlalchemy.engine import Dialect

from hp_tool.domain.measurement import Fidelity, Measurement
from hp_tool.domain.parallel import ParallelConfig
from hp_tool.domain.records import JsonObject
from hp_tool.domain.serving import RunConfig, ServingConfig
from hp_tool.errors import InputError


class UtcDateTime(sa.types.TypeDecorator[datetime]):
    """A timestamp with a time zone. SQLite has no time zones, so it stores UTC without one."""

    impl = sa.DateTime(timezone=True)
    cache_ok = True

    def process_bind_param(self, value: datetime | None, dialect: Dialect) -> datetime | None:
        if value is None:
            return None
        if value.tzinfo is None:
            raise ValueError("A stored timestamp needs a time zone.")
        value = value.astimezone(UTC)
        return value.replace(tzinfo=None) if dialect.name == "sqlite" else value

    def process_result_value(self, value: datetime | None, dialect: Dialect) -> datetime | None:
        if value is None:
            return None
        return value.replace(tzinfo=UTC) if value.tzinfo is None else value.astimezone(UTC)


def json_column() -> sa.JSON:
    """Return a JSON column that preserves key order. None is stored as SQL NULL."""
    return sa.JSON(none_as_null=True)


def new_id() -> str:
    """Return 64 random bits in hexadecimal, which is safe in job names and URLs."""
    return secrets.token_hex(8)


def row_dict(row: sa.Row[Any]) -> dict[str, Any]:
    """Return a row as a dict by column name."""
    return dict(row._mapping)


T = TypeVar("T")
ADAPTERS: dict[type[Any], TypeAdapter[Any]] = {
    kind: TypeAdapter(kind) for kind in (Fidelity, Measurement)
}
CONFIGURATIONS: TypeAdapter[RunConfig] = TypeAdapter(
    Annotated[
        Annotated[ParallelConfig, Tag("training")] | Annotated[ServingConfig, Tag("serving")],
        Discriminator(lambda value: "serving" if "max_num_seqs" in value else "training"),
    ]
)
"""Adapters of stored configurations. Serving configurations are stored with all fields, so that
`max_num_seqs` distinguishes them from training configurations.
"""


def encode(value: Any, *, field: str) -> JsonObject:
    """Convert a dataclass or mapping to a JSON object.

    Raises:
        InputError: The value contains NaN or infinity, or is not JSON. The error names `field`.
    """
    try:
        encoded = to_jsonable_python(value, inf_nan_mode="constants")
        text = json.dumps(encoded, allow_nan=False)
    except ValueError as error:  # includes pydantic's serialization error
        raise InputError(f"Cannot store {field} as JSON: {error}", field=field) from error
    if not isinstance(encoded, dict):
        raise InputError(f"{field} must be a JSON object, not {type(value).__name__}", field=field)
    return _storable_json(encoded) if "\\u0000" in text else encoded


def storable(text: str) -> str:
    """Replace NUL characters in external text such as logs; PostgreSQL cannot store them."""
    return text.replace("\0", "\ufffd")


def _storable_json(value: Any) -> Any:
    """Replace NUL characters in a JSON value; PostgreSQL stores but cannot return them."""
    if isinstance(value, str):
        return storable(value)
    if isinstance(value, dict):
        return {storable(name): _storable_json(item) for name, item in value.items()}
    return [_storable_json(item) for item in value] if isinstance(value, list) else value


def decode(kind: type[T], value: JsonObject | str) -> T:
    """Decode a stored JSON object, or its text, to a dataclass. Ignore unknown fields."""
    adapter: TypeAdapter[T] = ADAPTERS[kind]
    return _decode(adapter, value)


def decode_configuration(value: JsonObject | str) -> RunConfig:
    """Decode a stored configuration to a ParallelConfig (training) or a ServingConfig."""
    return _decode(CONFIGURATIONS, value)


def _decode(adapter: TypeAdapter[T], value: JsonObject | str) -> T:
    if isinstance(value, str):  # Parsing to Python objects first would be slower.
        return adapter.validate_json(value, extra="ignore")
    return adapter.validate_python(value, extra="ignore")
