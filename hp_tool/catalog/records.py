"""Convert plain mappings to frozen dataclasses and check them strictly, using only the standard
library.

Queries use Pydantic, but importing it here would take longer than a lookup in the catalogue.
"""

import dataclasses
import difflib
import functools
import types
import typing
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TypeVar

from hp_tool.domain.fields import check_bounds
from hp_tool.errors import InputError

T = TypeVar("T")


def build(
    cls: Callable[..., T], mapping: Mapping[str, Any], *, field: str, origin: Path | None = None
) -> T:
    """Return an instance of a dataclass with the mapping's values.

    Args:
        field: Dotted path of the mapping in the query.
        origin: File that contains the mapping, if any.

    Raises:
        InputError: A key is unknown, or a value is missing, has the wrong type or is out of bounds.
    """
    prefix = ": ".join((str(origin), *filter(None, [mapping.get("name")]), "")) if origin else ""
    hints, required = _expected_type(cls)
    try:
        for key in mapping:
            if key not in hints:
                hint = nearest(key, hints) or f"; known keys: {', '.join(hints)}"
                raise InputError(
                    f"unknown key {key!r}{hint}", field=f"{field}.{key}", code="unknown_key"
                )
        if missing := sorted(required - mapping.keys()):
            raise InputError(f"missing {', '.join(missing)}", field=f"{field}.{missing[0]}")
        values = {
            key: _check_value(value, hints[key], f"{field}.{key}") for key, value in mapping.items()
        }
        check_bounds(cls, values, field=field)
        return cls(**values)
    except InputError as error:
        raise InputError(f"{prefix}{error.message}", field=error.field, code=error.code) from None


def nearest(name: str, known: typing.Iterable[str]) -> str:
    """Return `; did you mean 'x', 'y'?`, or an empty string if no known name is similar."""
    close = difflib.get_close_matches(name, list(known), n=3, cutoff=0.5)
    return f"; did you mean {', '.join(map(repr, close))}?" if close else ""


@functools.cache
def _expected_type(cls: Any) -> tuple[dict[str, Any], frozenset[str]]:
    """Return (the types of a dataclass's fields, the names of the fields without a default)."""
    hints = typing.get_type_hints(cls)
    fields = dataclasses.fields(cls)
    missing = dataclasses.MISSING
    required = frozenset(
        f.name for f in fields if f.default is missing and f.default_factory is missing
    )
    return {f.name: hints[f.name] for f in fields}, required


def _check_value(value: Any, hint: Any, field: str) -> Any:
    """Return the value, converted to the expected type. Integers are accepted as floats, and floats
    without a fractional part as integers.
    """
    is_union = typing.get_origin(hint) in (types.UnionType, typing.Union)
    options = typing.get_args(hint) if is_union else (hint,)
    for option in options:
        if option is typing.Any:
            return value
        if option is types.NoneType and value is None:
            return None
        if typing.get_origin(option) is typing.Literal and value in typing.get_args(option):
            return value
        if dataclasses.is_dataclass(option) and isinstance(value, Mapping):
            return build(option, value, field=field)  # type: ignore[arg-type]
        if typing.get_origin(option) is dict and isinstance(value, Mapping):
            key_hint, value_hint = typing.get_args(option)
            return {
                _check_value(k, key_hint, field): _check_value(v, value_hint, f"{field}.{k}")
                for k, v in value.items()
            }
        if typing.get_origin(option) is tuple and isinstance(value, (list, tuple)):
            return tuple(_check_value(each, typing.get_args(option)[0], field) for each in value)
        if option is float and isinstance(value, (int, float)) and not isinstance(value, bool):
            return float(value)
        if option is int and isinstance(value, float) and value.is_integer():
            return int(value)
        if isinstance(option, type) and type(value) is option:
            return value
    raise InputError(
        f"{field.rsplit('.', 1)[-1]} {value!r} is not {_describe(options)}", field=field
    )


def _describe(options: tuple[Any, ...]) -> str:
    words = {
        int: "a whole number",
        float: "a number",
        bool: "true or false",
        str: "text",
        types.NoneType: "null",
    }
    parts = []
    for option in options:
        if typing.get_origin(option) is typing.Literal:
            parts.append("one of " + ", ".join(map(str, typing.get_args(option))))
        else:
            parts.append(words.get(option, "a mapping"))
    return " or ".join(parts)
