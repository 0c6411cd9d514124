"""What pydantic complains of, in our words: the field as the user wrote it, the value, and what would be accepted."""

from __future__ import annotations

import difflib
import functools
import json
from typing import Any

from pydantic import TypeAdapter, ValidationError
from pydantic_core import ErrorDetails

from hp_tool.errors import InputError

MOST_WEIGHED = 1_000
"""Complaints that are looked at: a long list of wrong values has one of each, several where types may differ."""


def input_error(error: ValidationError, *, adapter: TypeAdapter[Any]) -> InputError:
    """The most telling of pydantic's complaints about what `adapter` validates, in our words."""
    problems = error.errors(include_url=False)[:MOST_WEIGHED]
    deepest = max(
        problems, key=lambda p: (p["type"] == "unexpected_keyword_argument", len(_path(p["loc"])), p["type"] != "string_type")
    )
    if deepest["type"] == "unexpected_keyword_argument":
        return _unknown_key(deepest["loc"], adapter)
    path = _path(deepest["loc"])
    field = ".".join(path) or None
    if deepest["type"] in ("missing", "missing_argument", "missing_keyword_only_argument"):
        return InputError(f"{field} is missing; add it", field=field, code="missing_field")
    value = json.dumps(deepest.get("input"), default=str)
    return InputError(
        f"{field or 'the query'}: {_expectation(problems, path)}, got {value[:80]}", field=field, code="invalid_value"
    )


def _unknown_key(loc: tuple[int | str, ...], adapter: TypeAdapter[Any]) -> InputError:
    key, known = str(loc[-1])[:100], _known_keys(adapter, loc)  # the user's own word, whatever it looks like
    near = difflib.get_close_matches(key.lower(), known, n=1, cutoff=0.5)
    hint = f"did you mean {near[0]}?" if near else f"known keys: {', '.join(known)}"
    field = ".".join((*_path(loc[:-1]), key)) or None
    return InputError(f"unknown key {field or repr(key)}; {hint}", field=field, code="unknown_key")


def _expectation(problems: list[ErrorDetails], path: tuple[str, ...]) -> str:
    """What would have been accepted: a value that several types may take lists them all."""
    messages = [p["msg"].removeprefix("Input should be ") for p in problems if _path(p["loc"]) == path]
    return "expected " + " or ".join(dict.fromkeys(messages))


def _path(loc: tuple[int | str, ...]) -> tuple[str, ...]:
    """Keys as the user wrote them; pydantic also names the branch of a union, which nobody wrote."""
    return tuple(str(part) for part in loc if isinstance(part, int) or not _is_branch(part))


def _is_branch(part: str) -> bool:
    return part in ("str", "int", "bool", "float") or "[" in part or part[:1].isupper()


def _known_keys(adapter: TypeAdapter[Any], loc: tuple[int | str, ...]) -> list[str]:
    """The keys accepted where an unknown one stood, found by walking the JSON schema along the path."""
    schema = _json_schema(adapter)
    definitions = schema.get("$defs", {})
    nodes = [schema]
    for part in loc[:-1]:
        nodes = [child for node in nodes for child in _children(node, part, definitions)]
    keys = {key for node in nodes for option in _options(node, definitions) for key in option.get("properties", {})}
    return sorted(keys)


@functools.cache
def _json_schema(adapter: TypeAdapter[Any]) -> dict[str, Any]:
    """Made once: it takes longer than anything else about a query."""
    return adapter.json_schema()


def _children(node: dict[str, Any], part: int | str, definitions: dict[str, Any]) -> list[dict[str, Any]]:
    options = _options(node, definitions)
    if isinstance(part, int):
        return [option["items"] for option in options if isinstance(option.get("items"), dict)]
    if _is_branch(part):
        return [option for option in options if "properties" in option or "items" in option]
    return [option["properties"][part] for option in options if part in option.get("properties", {})]


def _options(node: dict[str, Any], definitions: dict[str, Any]) -> list[dict[str, Any]]:
    if "$ref" in node:
        return _options(definitions[node["$ref"].rsplit("/", 1)[-1]], definitions)
    if "anyOf" in node:
        return [option for child in node["anyOf"] for option in _options(child, definitions)]
    return [node]
