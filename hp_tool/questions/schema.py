"""Parse and validate queries strictly, from JSON or YAML to domain objects, and convert results to
JSON.
"""

import difflib
import functools
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, TypeVar

import yaml
from pydantic import TypeAdapter, ValidationError

from hp_tool.catalog.documents import load_yaml
from hp_tool.domain import bounds
from hp_tool.domain.fields import bounds_error, build_validators
from hp_tool.domain.inference import DisaggregationSpec
from hp_tool.domain.parallel import ParallelQuery
from hp_tool.domain.query import Kind, OwnFile, Query
from hp_tool.errors import InputError
from hp_tool.questions.short_names import path_of_foreign_name

if TYPE_CHECKING:
    from hp_tool.domain.sizing import SizingQuery

MAX_QUERY_BYTES = 1_000_000
"""Maximum size of a query in bytes."""
MAX_ERRORS = 1_000
"""Maximum number of validation errors examined. A long list of wrong values causes at least one
error per value.
"""
RELEASES = (("training", "framework_version"), ("inference", "engine_version"))
"""Paths of releases. Releases are text, but YAML and JSON parse them as numbers if they are not
quoted.
"""
_BOUNDS = ("greater_than_equal", "less_than_equal")
_MISSING = ("missing", "missing_argument", "missing_keyword_only_argument")
_UNITS = {"k": 1e3, "m": 1e6, "b": 1e9, "t": 1e12}
_WITH_UNIT = re.compile(r"(\d{1,9}(?:\.\d{1,6})?)\s*([kmbt])", re.IGNORECASE)
"""A number with a unit suffix, such as 8k tokens or 80B parameters."""
Q = TypeVar("Q", Query, "SizingQuery")

_ADAPTERS: dict[type[Any], TypeAdapter[Any]] = {}


def adapter(kind: type[Any]) -> TypeAdapter[Any]:
    """Return the validator of a domain type. It is cached, because building it is expensive."""
    if kind not in _ADAPTERS:
        with build_validators(described=False):
            _ADAPTERS.setdefault(kind, TypeAdapter(kind))
    return _ADAPTERS[kind]


@functools.cache
def described_adapter(kind: type[Any]) -> TypeAdapter[Any]:
    """Return a validator whose schema includes field descriptions."""
    with build_validators(described=True):
        return TypeAdapter(kind)


def parse_query(data: Mapping[str, Any] | str | bytes) -> Query:
    """Return a validated query from a mapping, or from JSON or YAML text.

    Raises:
        InputError: The query is invalid.
    """
    query: Query = parse(Query, data)
    _check_query(query)
    return query


def parse_own_query(data: Mapping[str, Any] | str | bytes) -> Query:
    """Return a validated query whose model, sequence lengths and trace may be paths of local files.

    Use this function only for callers that may read files on this machine, and `parse_query` for
    all others.

    Raises:
        InputError: The query is invalid.
    """
    return allow_own_files(parse_query(data))


def allow_own_files(query: Q) -> Q:
    """Return the query with permission to read its model, sequence lengths and trace from local
    files, as for the command line and the Python API.
    """
    if isinstance(query.model, str):
        query = replace(query, model=OwnFile(query.model))
    if (
        isinstance(query, Query)
        and query.training is not None
        and query.training.sequence_lengths is not None
    ):
        lengths = OwnFile(query.training.sequence_lengths)
        query = replace(query, training=replace(query.training, sequence_lengths=lengths))
    if (
        isinstance(query, Query)
        and query.inference is not None
        and isinstance(query.inference.trace, str)
    ):
        query = replace(
            query, inference=replace(query.inference, trace=OwnFile(query.inference.trace))
        )
    return query


def parse(kind: type[Any], data: Mapping[str, Any] | str | bytes) -> Any:
    """Parse `data` strictly as the domain type `kind`: no coercion, no unknown keys.

    Raises:
        InputError: The data is invalid.
    """
    text = data if isinstance(data, str | bytes) else _to_yaml_value(_with_release_texts(data))
    if len(text) > MAX_QUERY_BYTES:
        raise InputError(
            f"the input has {len(text):,} bytes; the maximum is {MAX_QUERY_BYTES:,}",
            code="too_large",
        )
    try:
        return adapter(kind).validate_json(text, strict=True)
    except ValidationError as error:
        if data is text and _read_as_mapping(error):
            return parse(kind, parse_mapping(text))
        if _has_whole_floats(error):
            return parse(kind, _with_whole_numbers(parse_mapping(text)))
        raise _input_error(error, adapter=adapter(kind)) from None


def parse_mapping(text: str | bytes) -> dict[str, Any]:
    """Return the mapping in a JSON or YAML text, without validating it.

    Raises:
        InputError: The text is neither JSON nor YAML, or not a mapping.
    """
    try:
        return _require_mapping(json.loads(text))
    except (ValueError, RecursionError):
        return read_yaml(text)


def to_json(value: object, *, indent: int | None = None) -> str:
    """Return a domain object, or a structure of domain objects, as JSON text."""
    return adapter(type(value)).dump_json(value, indent=indent).decode()


def to_dict(value: object) -> Any:
    """Return a domain object as JSON-ready Python values."""
    return adapter(type(value)).dump_python(value, mode="json")


def query_mapping(query: Query) -> dict[str, Any]:
    """Return a query as a mapping without default values. `parse_query` accepts it."""
    mapping: dict[str, Any] = adapter(Query).dump_python(query, mode="json", exclude_defaults=True)
    return mapping


def set_paths(data: dict[str, Any], values: Mapping[str, Any]) -> dict[str, Any]:
    """Set values in `data` at dotted paths, in place.

    Raises:
        InputError: A path goes through a value that is not a mapping.
    """
    for dotted, value in values.items():
        *parents, last = dotted.split(".")
        node = data
        for name in parents:
            child = node.setdefault(name, {})
            if not isinstance(child, dict):
                raise InputError(
                    f"{dotted} cannot be set: {name} is not a mapping in this query", field=dotted
                )
            node = child
        node[last] = value
    return data


def _read_as_mapping(error: ValidationError) -> bool:
    """Return whether the text must be parsed as YAML, because it is not JSON or a release is a
    number.
    """
    problems = error.errors(include_url=False)[:MAX_ERRORS]
    not_json = len(problems) == 1 and problems[0]["type"] == "json_invalid"
    return not_json or any(
        p["loc"] in RELEASES and isinstance(p["input"], int | float) for p in problems
    )


def _has_whole_floats(error: ValidationError) -> bool:
    """Return whether an integer field has a float value without fraction, such as 2000.0."""
    problems = error.errors(include_url=False)[:MAX_ERRORS]
    return any(p["type"] == "int_type" and _is_whole_float(p["input"]) for p in problems)


def _is_whole_float(value: object) -> bool:
    return isinstance(value, float) and value.is_integer()


def _with_whole_numbers(data: Any) -> Any:
    """Return a copy with floats such as 2000.0 converted to integers; 2000.5 stays a float."""
    if isinstance(data, dict):
        return {key: _with_whole_numbers(value) for key, value in data.items()}
    if isinstance(data, list):
        return [_with_whole_numbers(value) for value in data]
    return int(data) if _is_whole_float(data) else data


def _with_release_texts(data: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return a query's mapping with numeric releases converted to text.

    Raises:
        InputError: The number may have lost a trailing zero: 26.1 may have been 26.10. This cannot
            happen for 26.06.
    """
    for section, key in RELEASES:
        values = data.get(section)
        number = values.get(key) if isinstance(values, Mapping) else None
        if (
            isinstance(values, Mapping)
            and isinstance(number, int | float)
            and not isinstance(number, bool)
        ):
            text = str(number)
            if re.fullmatch(r"\d+\.\d{2,}", text) is None:
                raise InputError(
                    f"{section}.{key} {text} is a number, which may have lost a zero; write it in "
                    f'quotes: "{text}"',
                    field=f"{section}.{key}",
                    code="invalid_value",
                )
            data = {**data, section: {**values, key: text}}
    return data


def _to_yaml_value(data: Mapping[str, Any]) -> str:
    try:
        return json.dumps(data)
    except (TypeError, ValueError, RecursionError) as error:
        raise InputError(
            f"The query contains a value that JSON does not support: {error}"
        ) from None


def read_yaml(text: str | bytes) -> dict[str, Any]:
    """Return the mapping in a YAML text, without validating it.

    Raises:
        InputError: The text is not a mapping.
    """
    bounds.check_yaml(len(text))
    try:
        data = load_yaml(text)
    except (yaml.YAMLError, RecursionError, ValueError) as error:
        where = getattr(error, "problem_mark", None)
        place = f" at line {where.line + 1}" if where is not None else ""
        raise InputError(
            f"neither JSON nor YAML{place}: {getattr(error, 'problem', None) or error}",
            code="syntax",
        ) from None
    return _require_mapping(data)


def _require_mapping(data: object) -> dict[str, Any]:
    if not isinstance(data, dict):
        raise InputError(
            "A query must be a mapping of keys to values (kind, model, cluster, ...).",
            code="syntax",
        )
    return data


_SECTION_HINTS: dict[Kind, str] = {
    "training": "its batch there: add training.sequence_length and training.global_batch_size "
    "(--sequence-length and "
    "--global-batch-size on the command line)",
    "inference": "its load there: add inference.input_length and output_length",
}


def _check_query(query: Query) -> None:
    """Check what the types do not cover: required sections, and the number of values per axis.

    Raises:
        InputError: A section is missing, or an axis has too many values.
    """
    if getattr(query, query.kind) is None:
        raise InputError(
            f"Missing `{query.kind}`. A query of kind {query.kind} describes "
            f"{_SECTION_HINTS[query.kind]}.",
            field=query.kind,
            code="missing_field",
        )
    if query.inference is not None and query.inference.trace is None:
        for name in ("input_length", "output_length"):
            if getattr(query.inference, name) == 0:
                field = f"inference.{name}"
                raise InputError(f"{field} is missing; add it", field=field, code="missing_field")
    if query.training is not None:
        for name, values in query.training.choices.items():
            bounds.check_values(len(values), field=f"training.{name}")
    check_axes(query.parallel, field="parallel")
    if query.inference is not None and query.inference.disaggregated is not None:
        check_axes(query.inference.disaggregated, field="inference.disaggregated")


def check_axes(axes: ParallelQuery | DisaggregationSpec, *, field: str) -> None:
    """Check the number of values of each axis.

    Raises:
        InputError: An axis has more values than the request's limit.
    """
    for name in axes.__slots__:
        if isinstance(values := getattr(axes, name), tuple):
            bounds.check_values(len(values), field=f"{field}.{name}")


def _input_error(error: ValidationError, *, adapter: TypeAdapter[Any]) -> InputError:
    """Return an InputError for the most informative error that pydantic reports."""
    problems = error.errors(include_url=False)[:MAX_ERRORS]
    deepest = max(
        problems,
        key=lambda p: (
            p["type"] == "unexpected_keyword_argument",
            len(_user_path(p["loc"])),
            p["type"] in ("too_short", *_BOUNDS),
            p["type"] != "string_type",
        ),
    )
    if deepest["type"] == "unexpected_keyword_argument":
        return _unknown_key_error(deepest["loc"], adapter)
    path = _user_path(deepest["loc"])
    field = ".".join(path) or None
    if deepest["type"] in _MISSING:
        missing = [_user_path(p["loc"]) for p in problems if p["type"] in _MISSING]
        names = [".".join(other) for other in missing if other[:-1] == path[:-1] or len(other) == 1]
        are = "is missing; add it" if len(names) == 1 else "are missing; add them"
        return InputError(f"{', '.join(names)} {are}", field=field, code="missing_field")
    if deepest["type"] == "too_short":
        return InputError(
            f"{field} is an empty list; add values or remove it",
            field=field,
            code="invalid_value",
        )
    if deepest["type"] == "string_pattern_mismatch":
        return InputError(
            f"{field} is empty; set its text or remove it", field=field, code="invalid_value"
        )
    if (
        deepest["type"] in _BOUNDS
        and (bounds := _number_bounds(adapter, deepest["loc"])) is not None
    ):
        whole = ".".join(path[:-1] if isinstance(deepest["loc"][-1], int) else path)
        return bounds_error(deepest["input"], bounds, field=whole)
    value = json.dumps(deepest.get("input"), default=str)
    # All branches of a field that accepts a value or a list.
    expected = " or ".join(
        dict.fromkeys(
            p["msg"].removeprefix("Input should be ")
            for p in problems
            if _user_path(p["loc"]) == path
        )
    )
    hint = _unit_hint(deepest.get("input"))
    return InputError(
        f"{field or 'the query'}: expected {expected}, got {value[:80]}{hint}",
        field=field,
        code="invalid_value",
    )


def _unit_hint(value: object) -> str:
    """Return a hint for a number with a unit, such as `; write 8192 or 8000` for 8k; empty for
    other values.
    """
    match = _WITH_UNIT.fullmatch(value) if isinstance(value, str) else None
    if match is None:
        return ""
    number, unit = float(match[1]), match[2].lower()
    binary = f"{number * 1024.0:.15g} or " if unit == "k" else ""
    return f"; write {binary}{number * _UNITS[unit]:.15g}"


def _number_bounds(
    adapter: TypeAdapter[Any], loc: tuple[int | str, ...]
) -> tuple[float, float] | None:
    """Return the minimum and maximum of the number at a path; None without bounds."""
    options = (
        option for node in schemas_at(adapter, loc) for option in union_branches(adapter, node)
    )
    return next(
        ((option["minimum"], option["maximum"]) for option in options if "maximum" in option), None
    )


def _unknown_key_error(loc: tuple[int | str, ...], adapter: TypeAdapter[Any]) -> InputError:
    key = str(loc[-1])[:100]  # In the user's notation.
    options = (
        option for node in schemas_at(adapter, loc[:-1]) for option in union_branches(adapter, node)
    )
    known = sorted({name for option in options for name in option.get("properties", {})})
    section = ".".join(_user_path(loc[:-1]))
    near = difflib.get_close_matches(key.lower(), known, n=1, cutoff=0.5)
    hint = f"did you mean {near[0]}?" if near else f"known keys: {', '.join(known)}"
    if path := path_of_foreign_name(key) or _path_in_other_section(key, adapter):
        inside, _, name = path.rpartition(".")
        hint = f"did you mean {name if inside == section else path}?"
    field = ".".join((*_user_path(loc[:-1]), key)) or None
    return InputError(f"unknown key {field or repr(key)}; {hint}", field=field, code="unknown_key")


def _path_in_other_section(key: str, adapter: TypeAdapter[Any]) -> str | None:
    """Return the dotted path of the key with this name in a top-level section; None if no section
    has such a key.
    """
    top = {
        name
        for option in union_branches(adapter, _json_schema(adapter))
        for name in option.get("properties", {})
    }
    for section in sorted(top):
        options = (
            option
            for node in schemas_at(adapter, (section,))
            for option in union_branches(adapter, node)
        )
        if any(key in option.get("properties", {}) for option in options):
            return f"{section}.{key}"
    return None


def _user_path(loc: tuple[int | str, ...]) -> tuple[str, ...]:
    """Return the keys as the user wrote them, without pydantic's names for union branches."""
    return tuple(str(part) for part in loc if isinstance(part, int) or not _is_branch(part))


def _is_branch(part: str) -> bool:
    return (
        part.removeprefix("constrained-") in ("str", "int", "bool", "float")
        or "[" in part
        or part[:1].isupper()
    )


def schemas_at(adapter: TypeAdapter[Any], loc: Sequence[int | str]) -> list[dict[str, Any]]:
    """Return the JSON schemas at a path, one for each union branch that contains the path."""
    nodes = [_json_schema(adapter)]
    for part in loc:
        if isinstance(part, int) or not _is_branch(part):
            options = [option for node in nodes for option in union_branches(adapter, node)]
            nodes = [
                child for option in options if (child := _child_schema(option, part)) is not None
            ]
    return nodes


def union_branches(adapter: TypeAdapter[Any], node: dict[str, Any]) -> list[dict[str, Any]]:
    """Return the branches of a union, with references resolved. For any other schema, return the
    schema itself.
    """
    if "$ref" in node:
        return union_branches(
            adapter, _json_schema(adapter)["$defs"][node["$ref"].rsplit("/", 1)[-1]]
        )
    union = node.get("anyOf") or node.get("oneOf")
    return (
        [option for child in union for option in union_branches(adapter, child)]
        if union
        else [node]
    )


@functools.cache
def _json_schema(adapter: TypeAdapter[Any]) -> dict[str, Any]:
    return adapter.json_schema()


def _child_schema(node: dict[str, Any], part: int | str) -> dict[str, Any] | None:
    if isinstance(part, int):
        child = node.get("items")
    else:
        child = node.get("properties", {}).get(part, node.get("additionalProperties"))
    return child if isinstance(child, dict) else None
