"""Convert between the form's values and a query. `schema.parse_query` validates the query and names the field at fault."""

from __future__ import annotations

from collections.abc import Mapping
from copy import deepcopy
from typing import Any

import yaml

from hp_tool.domain.query import Kind
from hp_tool.errors import InputError
from hp_tool.queries import schema
from service.dashboard.new_search.fields import Field, fields

EXTRA = "extra"
"""The form's last field: further fields of the query, as YAML."""


def kind_of(values: Mapping[str, Any]) -> Kind:
    """Kind of query that a form or a query's mapping describes."""
    return "inference" if values.get("kind") == "inference" else "training"


def to_query(values: Mapping[str, str]) -> dict[str, Any]:
    """The form's query, not yet validated. Raises InputError for invalid YAML."""
    query: dict[str, Any] = {"kind": kind_of(values)}
    if EXTRA in values:
        query |= _extra(values[EXTRA])
    known = fields(kind_of(values))
    filled = {name: _value(known[name], text) for name, text in values.items() if name in known}
    if "cluster" in filled and any(name.startswith("cluster.") for name in filled):
        raise InputError("name a registered cluster or describe one, not both", field="cluster")
    return schema.lay(query, filled)


def to_values(query: Mapping[str, Any]) -> dict[str, str]:
    """The form's values for a query; what its fields cannot hold goes into its YAML."""
    kind = kind_of(query)
    values: dict[str, str] = {"kind": kind}
    rest = deepcopy({name: value for name, value in query.items() if name != "kind"})
    for name, field in fields(kind).items():
        text = _text(field, _at(query, name))
        if text is not None:
            values[name] = text
            _drop(rest, name)
    if rest:
        values[EXTRA] = yaml.safe_dump(rest, sort_keys=False, allow_unicode=True)
    return values


def _extra(text: str) -> dict[str, Any]:
    try:
        data = schema.read_yaml(text)
    except InputError as error:
        raise InputError(error.message, field=EXTRA, code=error.code) from None
    if not all(isinstance(name, str) for name in data):
        raise InputError("further fields are `name: value` lines of a query", field=EXTRA, code="syntax")
    return dict(data)


def _value(field: Field, text: str) -> Any:
    if field.several and "," in text:
        return [_scalar(field, part.strip()) for part in text.split(",") if part.strip()]
    return _scalar(field, text)


def _scalar(field: Field, text: str) -> Any:
    """The text as a number or boolean if the field can hold one, else unchanged."""
    if field.text:
        return text
    if text in ("true", "false"):
        return text == "true"
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            continue
    return text


def _text(field: Field, value: Any) -> str | None:
    """A value as the field shows it; None if it cannot."""
    if isinstance(value, list | tuple):
        parts = [_text(field, each) for each in value]
        return ", ".join(part for part in parts if part is not None) if field.several and value and None not in parts else None
    if value is None or isinstance(value, dict):
        return None
    return str(value).lower() if isinstance(value, bool) else str(value)


def _at(query: Mapping[str, Any], path: str) -> Any:
    node: Any = query
    for name in path.split("."):
        node = node.get(name) if isinstance(node, Mapping) else None
    return node


def _drop(query: dict[str, Any], path: str) -> None:
    """Remove a path, and mappings that become empty."""
    name, _, rest = path.partition(".")
    if rest:
        _drop(query[name], rest)
    if not rest or not query[name]:
        del query[name]
