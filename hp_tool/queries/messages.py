"""Pydantic's complaints as errors that name the field as the user wrote it, the value, and what is accepted."""

from __future__ import annotations

import difflib
import functools
import json
from collections.abc import Sequence
from typing import Any

from pydantic import TypeAdapter, ValidationError
from pydantic_core import ErrorDetails

from hp_tool.domain.fields import out_of_bounds
from hp_tool.errors import InputError

MAX_COMPLAINTS = 1_000
"""Complaints that are looked at: a long list of wrong values has one of each, several where types may differ."""
_BOUNDS = ("greater_than_equal", "less_than_equal")


def input_error(error: ValidationError, *, adapter: TypeAdapter[Any]) -> InputError:
    """The most telling of pydantic's complaints about what `adapter` validates, as our error."""
    problems = error.errors(include_url=False)[:MAX_COMPLAINTS]
    deepest = max(
        problems,
        key=lambda p: (
            p["type"] == "unexpected_keyword_argument",
            len(_path(p["loc"])),
            p["type"] in ("too_short", *_BOUNDS),
            p["type"] != "string_type",
        ),
    )
    if deepest["type"] == "unexpected_keyword_argument":
        return _unknown_key(deepest["loc"], adapter)
    path = _path(deepest["loc"])
    field = ".".join(path) or None
    if deepest["type"] in ("missing", "missing_argument", "missing_keyword_only_argument"):
        return InputError(f"{field} is missing; add it", field=field, code="missing_field")
    if deepest["type"] == "too_short":
        return InputError(f"{field} is an empty list; give values or leave it out", field=field, code="invalid_value")
    if deepest["type"] in _BOUNDS and (bounds := _bounds(adapter, deepest["loc"])) is not None:
        whole = ".".join(path[:-1] if isinstance(deepest["loc"][-1], int) else path)
        return out_of_bounds(deepest["input"], bounds, field=whole)
    value = json.dumps(deepest.get("input"), default=str)
    return InputError(
        f"{field or 'the query'}: {_expectation(problems, path)}, got {value[:80]}", field=field, code="invalid_value"
    )


def _bounds(adapter: TypeAdapter[Any], loc: tuple[int | str, ...]) -> tuple[float, float] | None:
    """Smallest and largest value of the number at a path."""
    options = (option for node in declarations(adapter, loc) for option in branches(adapter, node))
    return next(((option["minimum"], option["maximum"]) for option in options if "maximum" in option), None)


def _unknown_key(loc: tuple[int | str, ...], adapter: TypeAdapter[Any]) -> InputError:
    key, known = str(loc[-1])[:100], _known_keys(adapter, loc)  # as the user wrote it
    near = difflib.get_close_matches(key.lower(), known, n=1, cutoff=0.5)
    hint = f"did you mean {near[0]}?" if near else f"known keys: {', '.join(known)}"
    field = ".".join((*_path(loc[:-1]), key)) or None
    return InputError(f"unknown key {field or repr(key)}; {hint}", field=field, code="unknown_key")


def _expectation(problems: list[ErrorDetails], path: tuple[str, ...]) -> str:
    """What is accepted; all types of a value that may have several."""
    messages = [p["msg"].removeprefix("Input should be ") for p in problems if _path(p["loc"]) == path]
    return "expected " + " or ".join(dict.fromkeys(messages))


def _path(loc: tuple[int | str, ...]) -> tuple[str, ...]:
    """Keys as the user wrote them; pydantic also names the branch of a union, which nobody wrote."""
    return tuple(str(part) for part in loc if isinstance(part, int) or not _is_branch(part))


def _is_branch(part: str) -> bool:
    return part.removeprefix("constrained-") in ("str", "int", "bool", "float") or "[" in part or part[:1].isupper()


def _known_keys(adapter: TypeAdapter[Any], loc: tuple[int | str, ...]) -> list[str]:
    """The keys accepted where an unknown one stood."""
    options = (option for node in declarations(adapter, loc[:-1]) for option in branches(adapter, node))
    return sorted({key for option in options for key in option.get("properties", {})})


def declarations(adapter: TypeAdapter[Any], loc: Sequence[int | str]) -> list[dict[str, Any]]:
    """The JSON schemas of what stands at a path, one for each branch of a union on the way that has it."""
    nodes = [_json_schema(adapter)]
    for part in loc:
        if isinstance(part, int) or not _is_branch(part):
            options = [option for node in nodes for option in branches(adapter, node)]
            nodes = [child for option in options if (child := _child(option, part)) is not None]
    return nodes


def branches(adapter: TypeAdapter[Any], node: dict[str, Any]) -> list[dict[str, Any]]:
    """The branches of a union, references followed; of anything else itself."""
    if "$ref" in node:
        return branches(adapter, _json_schema(adapter)["$defs"][node["$ref"].rsplit("/", 1)[-1]])
    return [option for child in node["anyOf"] for option in branches(adapter, child)] if "anyOf" in node else [node]


@functools.cache
def _json_schema(adapter: TypeAdapter[Any]) -> dict[str, Any]:
    """Made once: it takes longer than anything else about a query."""
    return adapter.json_schema()


def _child(node: dict[str, Any], part: int | str) -> dict[str, Any] | None:
    """The schema of an item or of a key's value."""
    if isinstance(part, int):
        child = node.get("items")
    else:
        child = node.get("properties", {}).get(part, node.get("additionalProperties"))
    return child if isinstance(child, dict) else None
