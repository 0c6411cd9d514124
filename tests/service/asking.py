"""Every way in which a route of the application takes a query, so that a value can be put at each
place of one.
"""

from __future__ import annotations

import dataclasses
import json
import types
from collections.abc import Callable, Iterator
from typing import Any, Union, get_args, get_origin, get_type_hints
from urllib.parse import urlencode

import httpx
from fastapi import FastAPI
from fastapi.testclient import TestClient

from hp_tool.domain.query import Query
from hp_tool.domain.sizing import SizingQuery
from service.api import catalog, estimates, explanations, measurements, searches
from tests.service.routes import Address, every_route

Json = dict[str, Any]
TRAINING: Json = searches.EXAMPLE | {"parallel": {}}
SERVING: Json = {
    "kind": "inference",
    "model": "qwen3-32b",
    "cluster": {"gpu": "h200-sxm-141gb", "num_gpus": 8},
    "inference": {
        "input_length": 4000,
        "output_length": 1000,
        "concurrency": 8,
        "precision": "fp8",
    },
}
FORM = {"Content-Type": "application/x-www-form-urlencoded"}
QUERIES = ("query", "first", "second", "more")
"""Parameters of addresses that hold a whole query."""
WITHOUT = frozenset(
    {
        *("/v1/searches/{search_id}", "/v1/keys", "/v1/calibrations"),
        *(
            f"{prefix}/searches/{{search_id}}/{act}"
            for prefix in ("", "/v1")
            for act in ("cancel", "pause", "resume", "clone")
        ),
        "/searches/{search_id}/longer",
        *("/v1/measurements/{measurement_id}", "/measurements/{measurement_id}"),
        *("/searches/{search_id}/label", "/v1/searches/{search_id}/label"),
        *(
            "/searches/{search_id}/budget",
            "/keys",
            "/keys/{key_id}/revoke",
            "/calibration",
            "/models",
            "/clusters",
        ),
        *(
            "/models/{name}/remove",
            "/clusters/{name}/remove",
            "/v1/models/{name}",
            "/v1/clusters/{name}",
            "/v1/keys/{key_id}",
        ),
        *("/v1/traces/{name}", "/v1/watches/{watch_id}", "/v1/watches/{watch_id}/steps"),
        "/watches/{watch_id}/delete",
    }
)
"""Changing routes that take no query."""
LABELS = frozenset(
    {
        *(
            "a",
            "after",
            "b",
            "calibration",
            "cluster_key",
            "cursor",
            "download",
            "format",
            "framework",
            "from",
            "gpu",
            "kind",
        ),
        *(
            "limit",
            "model",
            "model_family",
            "order",
            "owner",
            "search_id",
            "since",
            "source",
            "state",
            "status",
            "until",
        ),
        *("lost_nodes", "page", "q", "ranked", "rerank", "run", "search", "words"),
        "wait_s",
    }
)
"""Parameters of addresses that hold one value: each is tried with it."""


def asked(place: str, value: object) -> Json:
    """A query with the value at this place."""
    base = SERVING if place.startswith(("inference", "targets")) else TRAINING
    return laid(base, place, value)


def laid(data: Json, place: str, value: object) -> Json:
    """A copy with the value at a dotted place; where a value stands above it, that one gives
    way.
    """
    name, _, rest = place.partition(".")
    if not rest:
        return data | {name: value}
    below = data.get(name)
    given = laid(below if isinstance(below, dict) else {}, rest, value)
    return data | {name: [given, given] if name == "stages" else given}


def text_places(kind: type[Any], prefix: str = "") -> Iterator[str]:
    """Dotted places of a query that hold text of the sender's own."""
    for name, hint in get_type_hints(kind).items():
        if name.startswith("__"):
            continue
        kinds = set(_alternatives(hint))
        if str in kinds:
            yield f"{prefix}{name}"
        for each in kinds:
            if dataclasses.is_dataclass(each):
                yield from text_places(each, f"{prefix}{name}.")


def _alternatives(hint: Any) -> Iterator[Any]:
    """The types that a value may have, those inside of lists included."""
    if get_origin(hint) in (Union, types.UnionType, tuple, list):
        for each in get_args(hint):
            yield from _alternatives(each)
    else:
        yield hint


def _query(place: str, value: str) -> Iterator[Json]:
    yield {"json": asked(place, value)}


def _lines(place: str, value: str) -> Iterator[Json]:
    yield {"content": json.dumps(asked(place, value))}


def _report(place: str, value: str) -> Iterator[Json]:
    one = measurements.EXAMPLE | {"query": asked(place, value)}
    yield {"json": one}
    yield {"json": [one]}


def _export(place: str, value: str) -> Iterator[Json]:
    query, config = asked(place, value), {"parallel": {"tensor_parallel_size": 2}}
    format = "vllm" if query["kind"] == "inference" else "megatron-lm"
    for result in (query, {"query": query, "recommendations": [config]}):
        yield {"json": {"result": result, "format": format}}
    if place == "model":
        yield {"json": estimates.EXPORT_EXAMPLE | {"format": value}}


def _import(place: str, value: str) -> Iterator[Json]:
    given = estimates.IMPORT_EXAMPLE["overrides"]
    yield {"json": estimates.IMPORT_EXAMPLE | {"overrides": given | {place: value}}}
    yield {"json": estimates.IMPORT_EXAMPLE | {"overrides": given | laid({}, place, value)}}
    if place != "model":
        return
    torchtitan = f'[model]\nname = "{value}"\nflavor = "{value}"\n'
    deepspeed = json.dumps({"train_batch_size": 8, "hostfile": value})
    megatron = (
        f"{estimates.IMPORT_EXAMPLE['command']} --tokenizer-model {value} --yaml-cfg "
        f"{value} --data-path {value}"
    )
    for command in (value, megatron, torchtitan, deepspeed):
        yield {"json": estimates.IMPORT_EXAMPLE | {"command": command}}
    yield {"json": estimates.IMPORT_EXAMPLE | {"format": value}}
    yield {"json": estimates.IMPORT_EXAMPLE | {"log": value}}


def _sizing(place: str, value: str) -> Iterator[Json]:
    yield {
        "json": laid({"tokens": 1e12, "cluster": estimates.SIZING_EXAMPLE["cluster"]}, place, value)
    }


def _upload(place: str, value: str) -> Iterator[Json]:
    (trace,) = explanations.EXAMPLE["trace"]
    yield {"files": [("trace", (value, trace)), ("query", (None, json.dumps(asked(place, value))))]}


def _registration(place: str, value: str) -> Iterator[Json]:
    if place == "model":
        for new in (catalog.MODEL_EXAMPLE, catalog.CLUSTER_EXAMPLE):
            yield {"json": new | {"spec": new["spec"] | {"gpu": value, "source": value}}}


def _form(place: str, value: str) -> Iterator[Json]:
    query = asked(place, value)
    given = {
        f"{name}.{key}": one
        for name, part in query.items()
        if isinstance(part, dict)
        for key, one in part.items()
    }
    flat = {name: part for name, part in query.items() if not isinstance(part, dict)}
    for fields in (flat | given | {place: value}, {"kind": "training", "extra": json.dumps(query)}):
        yield {"content": urlencode(fields), "headers": FORM}


def _tool(place: str, value: str) -> Iterator[Json]:
    call = {"name": "estimate", "arguments": {"query": asked(place, value)}}
    yield {
        "json": {"jsonrpc": "2.0", "id": 1, "method": "tools/call", "params": call},
        "headers": {"Accept": "application/json, text/event-stream"},
    }


def _watch(place: str, value: str) -> Iterator[Json]:
    yield {"json": {"query": asked(place, value)}}


BODIES: dict[str, Callable[[str, str], Iterator[Json]]] = {
    **dict.fromkeys(
        ("/v1/estimates", "/v1/recommendations", "/v1/searches", "/v1/plans", "/v1/lost-nodes"),
        _query,
    ),
    "/v1/batch": _lines,
    "/v1/measurements": _report,
    "/v1/measurements/bulk": _report,
    "/v1/exports": _export,
    "/v1/imports": _import,
    **dict.fromkeys(("/v1/explanations", "/explain"), _upload),
    "/v1/sizings": _sizing,
    "/v1/watches": _watch,
    "/mcp": _tool,
    **dict.fromkeys(("/v1/models", "/v1/clusters", "/v1/traces"), _registration),
    "/searches/new": _form,
}
"""How each changing route is given a query with a value at a place."""


def unknown_routes(app: FastAPI) -> list[str]:
    """Routes of which nobody said here whether, and how, they take a query."""
    return [
        f"{route.method} {route.pattern}"
        for route in every_route(app)
        if (route.method == "GET" and route.parameters - LABELS - {*QUERIES})
        or (route.method != "GET" and route.pattern not in BODIES and route.pattern not in WITHOUT)
    ]


def answers(http: TestClient, route: Address, place: str, value: str) -> Iterator[httpx.Response]:
    """What a route answers to the value at this place of a query, in every form that it takes
    one.
    """
    if route.method == "GET":
        for name in sorted(route.parameters & {*QUERIES}):
            whole = dict.fromkeys(route.parameters & {*QUERIES}, json.dumps(TRAINING))
            yield http.get(route.pattern, params=whole | {name: json.dumps(asked(place, value))})
            if place == "model":
                yield http.get(route.pattern, params=whole | {name: value})
        if route.pattern.startswith(("/searches/new", "/explorer")):
            yield http.get(
                route.pattern, params={"kind": asked(place, value)["kind"], place: value}
            )
        elif place.rpartition(".")[2] in route.parameters:
            yield http.get(route.pattern, params={place.rpartition(".")[2]: value})
        if "{name}" in route.pattern and place == "model":
            yield http.get(route.at(name=value))
    elif route.pattern in BODIES:
        for form in BODIES[route.pattern](place, value):
            yield http.request(route.method, route.pattern, **form)


PLACES = sorted({*text_places(Query), *text_places(SizingQuery)})
"""Of all that arrives, as the declarations say it."""
