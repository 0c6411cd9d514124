"""The one door for queries: JSON or YAML in, a strictly validated Query out; and results back to JSON.

A query that comes through it names nothing but the catalogue's entries, unless its asker is let read files (parse_own_query).

The declaration is the domain's dataclasses; nothing is said twice. An unknown key, a wrong type or a missing field is
an InputError that names the field, the value and the mend.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Mapping
from dataclasses import replace
from typing import Any, TypeVar

import yaml
from pydantic import TypeAdapter, ValidationError

from hp_tool import bounds
from hp_tool.documents import load_yaml
from hp_tool.domain.parallel import ParallelQuery
from hp_tool.domain.query import OwnFile, Query
from hp_tool.domain.sizing import SizingQuery
from hp_tool.domain.workload import DisaggregationSpec
from hp_tool.errors import InputError
from hp_tool.queries.messages import input_error

MAX_QUERY_BYTES = 1_000_000
"""A query is small; anything larger is a mistake or an attack."""


Q = TypeVar("Q", Query, SizingQuery)

_ADAPTERS: dict[type[Any], TypeAdapter[Any]] = {}
_BUILDING = threading.Lock()
"""One at a time: building parses docstrings, which Python 3.11 cannot do in two threads at once."""


def adapter(kind: type[Any]) -> TypeAdapter[Any]:
    """The (expensive to build) validator of a domain type, built once."""
    if kind not in _ADAPTERS:
        with _BUILDING:
            _ADAPTERS.setdefault(kind, TypeAdapter(kind))
    return _ADAPTERS[kind]


def parse_query(data: Mapping[str, Any] | str | bytes) -> Query:
    """A validated query from a mapping, or from JSON or YAML text. Raises InputError."""
    query: Query = parse(Query, data)
    _check(query)
    return query


def parse_own_query(data: Mapping[str, Any] | str | bytes) -> Query:
    """The same for whoever may read this machine's files: its names may be paths. Not for what arrives from elsewhere."""
    return with_own_files(parse_query(data))


def with_own_files(query: Q) -> Q:
    """The query as the command line and the Python API ask it: its model and its distribution of lengths may be files."""
    if isinstance(query.model, str):
        query = replace(query, model=OwnFile(query.model))
    if isinstance(query, Query) and query.training is not None and query.training.sequence_lengths is not None:
        lengths = OwnFile(query.training.sequence_lengths)
        query = replace(query, training=replace(query.training, sequence_lengths=lengths))
    return query


def parse(kind: type[Any], data: Mapping[str, Any] | str | bytes) -> Any:
    """`data` as the domain type `kind`, strictly: no coercion, no unknown key. Raises InputError."""
    text = data if isinstance(data, str | bytes) else _dump(data)
    if len(text) > MAX_QUERY_BYTES:
        raise InputError(f"the input has {len(text):,} bytes; at most {MAX_QUERY_BYTES:,} are read", code="too_large")
    try:
        return adapter(kind).validate_json(text, strict=True)
    except ValidationError as error:
        if data is text and error.error_count() == 1 and error.errors(include_url=False)[0]["type"] == "json_invalid":
            return parse(kind, read_yaml(text))
        raise input_error(error, adapter=adapter(kind)) from None


def parse_mapping(text: str | bytes) -> dict[str, Any]:
    """The mapping a JSON or YAML text holds, not yet validated. Raises InputError."""
    try:
        data = json.loads(text)
    except (ValueError, RecursionError):
        return dict(read_yaml(text))
    if not isinstance(data, dict):
        raise InputError("a query is a mapping of keys to values (kind, model, cluster, ...)", code="syntax")
    return data


def to_json(value: object, *, indent: int | None = None) -> str:
    """A domain object, or a structure of them, as JSON text."""
    return adapter(type(value)).dump_json(value, indent=indent).decode()


def to_dict(value: object) -> Any:
    """A domain object as plain JSON-ready Python values."""
    return adapter(type(value)).dump_python(value, mode="json")


def query_mapping(query: Query) -> dict[str, Any]:
    """A query as the mapping it was written as: what stands at its default is left out. Valid input again."""
    mapping: dict[str, Any] = adapter(Query).dump_python(query, mode="json", exclude_defaults=True)
    return mapping


def lay(data: dict[str, Any], given: Mapping[str, Any]) -> dict[str, Any]:
    """`data` with the values at dotted paths laid over it, in place. Raises InputError where a path goes through a value."""
    for dotted, value in given.items():
        *parents, last = dotted.split(".")
        node = data
        for name in parents:
            child = node.setdefault(name, {})
            if not isinstance(child, dict):
                raise InputError(f"{dotted} cannot be set: {name} is not a mapping in this query", field=dotted)
            node = child
        node[last] = value
    return data


def _dump(data: Mapping[str, Any]) -> str:
    try:
        return json.dumps(data)
    except (TypeError, ValueError, RecursionError) as error:
        raise InputError(f"the query holds a value that JSON does not know: {error}") from None


def read_yaml(text: str | bytes) -> Mapping[str, Any]:
    """The mapping that a YAML text holds, not yet validated. Raises InputError."""
    bounds.check_yaml(len(text))
    try:
        data = load_yaml(text)
    except (yaml.YAMLError, RecursionError, ValueError) as error:
        where = getattr(error, "problem_mark", None)
        place = f" at line {where.line + 1}" if where is not None else ""
        raise InputError(f"neither JSON nor YAML{place}: {getattr(error, 'problem', None) or error}", code="syntax") from None
    if not isinstance(data, dict):
        raise InputError("a query is a mapping of keys to values (kind, model, cluster, ...)", code="syntax")
    return data


def _check(query: Query) -> None:
    """Raise InputError where a section is missing or an axis too long; types say everything else."""
    if query.kind == "training" and query.training is None:
        raise InputError(
            "training is missing; a query of kind training describes its batch there", field="training", code="missing_field"
        )
    if query.kind == "inference" and query.inference is None:
        raise InputError(
            "inference is missing; a query of kind inference describes its load there", field="inference", code="missing_field"
        )
    check_axes(query.parallel, field="parallel")
    if query.inference is not None and query.inference.disaggregated is not None:
        check_axes(query.inference.disaggregated, field="inference.disaggregated")


def check_axes(axes: ParallelQuery | DisaggregationSpec, *, field: str) -> None:
    """Raises InputError where an axis lists more values than one request may."""
    for name in axes.__slots__:
        if isinstance(values := getattr(axes, name), tuple):
            bounds.check_values(len(values), field=f"{field}.{name}")
