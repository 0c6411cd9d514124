"""The one door for queries: JSON or YAML in, a strictly validated Query out; and results back to JSON.

The declaration is the domain's dataclasses; nothing is said twice. An unknown key, a wrong type or a missing field is
an InputError that names the field, the value and the mend.
"""

from __future__ import annotations

import difflib
import functools
import json
import threading
from collections.abc import Mapping
from typing import Any

import yaml
from pydantic import TypeAdapter, ValidationError
from pydantic_core import ErrorDetails

from hp_tool.documents import load_yaml
from hp_tool.domain.parallel import ParallelQuery
from hp_tool.domain.query import Query, Targets
from hp_tool.domain.reliability import ReliabilitySpec
from hp_tool.errors import InputError

MAX_QUERY_BYTES = 1_000_000
"""A query is small; anything larger is a mistake or an attack."""


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


def parse(kind: type[Any], data: Mapping[str, Any] | str | bytes) -> Any:
    """`data` as the domain type `kind`, strictly: no coercion, no unknown key. Raises InputError."""
    text = data if isinstance(data, str | bytes) else _dump(data)
    if len(text) > MAX_QUERY_BYTES:
        raise InputError(f"the input has {len(text):,} bytes; at most {MAX_QUERY_BYTES:,} are read", code="too_large")
    try:
        return adapter(kind).validate_json(text, strict=True)
    except ValidationError as error:
        if data is text and any(details["type"] == "json_invalid" for details in error.errors(include_url=False)):
            return parse(kind, _load_yaml(text))
        raise _input_error(error, kind) from None


def parse_mapping(text: str | bytes) -> dict[str, Any]:
    """The mapping a JSON or YAML text holds, not yet validated. Raises InputError."""
    try:
        data = json.loads(text)
    except (ValueError, RecursionError):
        return dict(_load_yaml(text))
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
        return json.dumps(data, allow_nan=False)
    except (TypeError, ValueError, RecursionError) as error:
        raise InputError(f"the query holds a value that JSON does not know: {error}") from None


def _load_yaml(text: str | bytes) -> Mapping[str, Any]:
    try:
        data = load_yaml(text)
    except (yaml.YAMLError, RecursionError, ValueError) as error:
        where = getattr(error, "problem_mark", None)
        place = f" at line {where.line + 1}" if where is not None else ""
        raise InputError(f"neither JSON nor YAML{place}: {getattr(error, 'problem', None) or error}", code="syntax") from None
    if not isinstance(data, dict):
        raise InputError("a query is a mapping of keys to values (kind, model, cluster, ...)", code="syntax")
    return data


def _input_error(error: ValidationError, kind: type[Any]) -> InputError:
    """The most telling of pydantic's complaints, in our words."""
    problems = error.errors(include_url=False)
    deepest = max(
        problems, key=lambda p: (p["type"] == "unexpected_keyword_argument", len(_path(p["loc"])), p["type"] != "string_type")
    )
    path = _path(deepest["loc"])
    field = ".".join(path) or None
    if deepest["type"] == "unexpected_keyword_argument":
        known = _known_keys(kind, deepest["loc"])
        near = difflib.get_close_matches(path[-1], known, n=1, cutoff=0.5)
        hint = f"did you mean {near[0]}?" if near else f"known keys: {', '.join(known)}"
        return InputError(f"unknown key {field}; {hint}", field=field, code="unknown_key")
    if deepest["type"] in ("missing", "missing_argument", "missing_keyword_only_argument"):
        return InputError(f"{field} is missing; add it", field=field, code="missing_field")
    value = json.dumps(deepest.get("input"), default=str)
    return InputError(
        f"{field or 'the query'}: {_expectation(problems, path)}, got {value[:80]}", field=field, code="invalid_value"
    )


def _expectation(problems: list[ErrorDetails], path: tuple[str, ...]) -> str:
    """What would have been accepted: a value that several types may take lists them all."""
    messages = [p["msg"].removeprefix("Input should be ") for p in problems if _path(p["loc"]) == path]
    return "expected " + " or ".join(dict.fromkeys(messages))


def _path(loc: tuple[int | str, ...]) -> tuple[str, ...]:
    """Keys as the user wrote them; pydantic also names the branch of a union, which nobody wrote."""
    return tuple(str(part) for part in loc if isinstance(part, int) or not _is_branch(part))


def _is_branch(part: str) -> bool:
    return part in ("str", "int", "bool", "float") or "[" in part or part[:1].isupper()


def _known_keys(kind: Any, loc: tuple[int | str, ...]) -> list[str]:
    """The keys accepted where an unknown one stood, found by walking the JSON schema along the path."""
    schema = _json_schema(kind)
    definitions = schema.get("$defs", {})
    nodes = [schema]
    for part in loc[:-1]:
        nodes = [child for node in nodes for child in _children(node, part, definitions)]
    keys = {key for node in nodes for option in _options(node, definitions) for key in option.get("properties", {})}
    return sorted(keys)


@functools.cache
def _json_schema(kind: Any) -> dict[str, Any]:
    """Made once: it takes longer than anything else about a query."""
    return adapter(kind).json_schema()


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


_COUNT = (1, 1 << 31)
_AMOUNT = (1e-9, 1e18)
_FRACTION = (0.0, 0.99)
_RANGES: dict[str, dict[str, tuple[float, float]]] = {
    "training": {
        "sequence_length": _COUNT,
        "decoder_sequence_length": _COUNT,
        "global_batch_size": _COUNT,
        "total_tokens": (1.0, 1e18),
        "dropout": _FRACTION,
        "offload_fraction": (1e-3, 1.0),
        "expert_imbalance": (1.0, 1e6),
        "expert_capacity_factor": (1e-3, 1e6),
    },
    "inference": {
        "input_length": _COUNT,
        "output_length": _COUNT,
        "concurrency": _COUNT,
        "request_rate_per_second": _AMOUNT,
        "prefix_cache_hit_rate": _FRACTION,
    },
    "inference.disaggregated": {"prefill_replicas": _COUNT, "decode_replicas": _COUNT},
    "inference.speculative": {
        "num_speculative_tokens": (1, 64),
        "acceptance_rate": (0.0, 1.0),
        "draft_cost_fraction": (0.0, 10.0),
    },
    "constraints": {"max_days": _AMOUNT, "max_cost": _AMOUNT, "memory_headroom_fraction": _FRACTION},
    "search": {
        "budget_runs": (1, 100_000),
        "budget_gpu_seconds": _AMOUNT,
        "run_timeout_s": (1e-3, 1e7),
        "steps": (1, 100_000),
        "warmup_steps": (0, 100_000),
        "step_tolerance_fraction": _FRACTION,
        "hopeless_factor": (1.0, 1e6),
        "parallel_runs": (1, 64),
        "min_gain_fraction": _FRACTION,
        "seed": (0, (1 << 32) - 1),
    },
    "targets": dict.fromkeys(Targets.__slots__, _AMOUNT),
}
"""Smallest and largest value: wide enough for anyone's work, narrow enough that no formula overflows."""
BUDGET_RANGES = {name: _RANGES["search"][name] for name in ("budget_runs", "budget_gpu_seconds")}
"""Of what may change while a search runs."""
_PARALLEL_SIZE = (1, 1 << 20)
_PARALLEL_RANGES: dict[str, tuple[float, float]] = {
    **dict.fromkeys((name for name in ParallelQuery.__slots__ if name.endswith("_size")), _PARALLEL_SIZE),
    **dict.fromkeys(("max_num_seqs", "max_num_batched_tokens"), _PARALLEL_SIZE),
    "zero_stage": (0, 3),
    "data_parallel_shard_size": (0, _PARALLEL_SIZE[1]),
}


def _check(query: Query) -> None:
    """Rules that types cannot say."""
    if query.kind == "training" and query.training is None:
        raise InputError(
            "training is missing; a query of kind training describes its batch there", field="training", code="missing_field"
        )
    if query.kind == "inference" and query.inference is None:
        raise InputError(
            "inference is missing; a query of kind inference describes its load there", field="inference", code="missing_field"
        )
    for section, ranges in _RANGES.items():
        values: Any = query
        for name in section.split("."):
            values = getattr(values, name, None)
        for name, limits in ranges.items() if values is not None else ():
            if (value := getattr(values, name)) is not None:
                check_range(value, limits, field=f"{section}.{name}")
    if query.training is not None and query.training.reliability is not None:
        check_reliability(query.training.reliability, field="training.reliability")
    check_parallel(query.parallel)


def check_range(value: float | None, limits: tuple[float, float], *, field: str) -> None:
    """Raises InputError where a value is given and outside."""
    low, high = limits
    if value is not None and not low <= value <= high:  # not: NaN is in no range
        ends = " to ".join(f"{end:,}" if isinstance(end, int) else f"{end:g}" for end in limits)
        raise InputError(f"{field} must be from {ends}, got {value}", field=field, code="invalid_value")


_RELIABILITY = {
    "mtbf_per_gpu_hours": (1e-3, 1e12),
    "checkpoint_s": (1e-3, 1e7),
    "checkpoint_interval_s": (1e-3, 1e9),
    "restart_s": (0.0, 1e7),
}


def check_reliability(reliability: ReliabilitySpec, *, field: str) -> None:
    """Raises InputError where a time is outside of what formulas take."""
    for name, limits in _RELIABILITY.items():
        check_range(getattr(reliability, name), limits, field=f"{field}.{name}")


def check_parallel(parallel: ParallelQuery) -> None:
    """Sizes in range, no empty list. Raises InputError."""
    for name in parallel.__slots__:
        value = getattr(parallel, name)
        if value is None:
            continue
        if value == ():
            raise InputError(
                f"parallel.{name} is an empty list; give values or leave it out", field=f"parallel.{name}", code="invalid_value"
            )
        if (limits := _PARALLEL_RANGES.get(name)) is None:
            continue
        for one in value if isinstance(value, tuple) else (value,):
            check_range(one, limits, field=f"parallel.{name}")
