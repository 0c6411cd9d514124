"""How values are stored: column types, ids, and domain values as JSON."""

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
    """An instant. SQLite knows no time zones, so it gets UTC without one and gives it back with
    it.
    """

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
"""A way to serve is stored with all of its fields, of which none but its sizes is one of
training's.
"""


def encode(value: Any, *, field: str) -> JsonObject:
    """A dataclass or mapping as a JSON object. InputError names `field` where it holds NaN,
    infinity or no JSON at all.
    """
    try:
        encoded = to_jsonable_python(value, inf_nan_mode="constants")
        text = json.dumps(encoded, allow_nan=False)
    except ValueError as error:  # covers pydantic's serialization error
        raise InputError(f"{field} cannot be stored as JSON: {error}", field=field) from error
    if not isinstance(encoded, dict):
        raise InputError(f"{field} must be a JSON object, not {type(value).__name__}", field=field)
    return _storable(encoded) if "\\u0000" in text else encoded


def storable(text: str) -> str:
    """Text from outside, such as a log, with NUL replaced: PostgreSQL cannot store that
    character.
    """
    return text.replace("\0", "\ufffd")


def _storable(value: Any) -> Any:
    """Return a JSON value with NUL replaced in all its text: PostgreSQL would store it, but fail to
    read any text of it.
    """
    if isinstance(value, str):
        return storable(value)
    if isinstance(value, dict):
        return {storable(name): _storable(each) for name, each in value.items()}
    return [_storable(each) for each in value] if isinstance(value, list) else value


def decode(kind: type[T], value: JsonObject | str) -> T:
    """A stored JSON object, or its text, as the dataclass it was; fields that a newer version added
    are passed over.
    """
    adapter: TypeAdapter[T] = ADAPTERS[kind]
    return _decoded(adapter, value)


def decode_configuration(value: JsonObject | str) -> RunConfig:
    """A stored configuration, a JSON object or its text, as what it is: a way to train or a way to
    serve.
    """
    return _decoded(CONFIGURATIONS, value)


def _decoded(adapter: TypeAdapter[T], value: JsonObject | str) -> T:
    if isinstance(value, str):  # without the detour over Python's own objects
        return adapter.validate_json(value, extra="ignore")
    return adapter.validate_python(value, extra="ignore")
