"""Complete the OpenAPI description: bodies that routes parse, security, and error responses."""

import json
from collections.abc import Iterator, Mapping
from http import HTTPStatus
from typing import Any

from fastapi import FastAPI
from fastapi.openapi.utils import get_openapi

from hp_tool.questions import schema
from service.api.problems import MEDIA_TYPE, Problem
from service.api.views import NDJSON
from service.http.routes import OPEN_PATHS

_REF = "#/components/schemas/{model}-Input"
_BODIES: dict[str, type] = {}
"""Body types that routes parse themselves, by name. Declaring a route adds its type."""
_METHODS = ("get", "put", "post", "delete", "patch")
_KEY = "key"
_FRAMEWORKS_OWN = ("HTTPValidationError", "ValidationError")
_HEADERS: dict[int, dict[str, Any]] = {
    401: {"WWW-Authenticate": {"required": True, "schema": {"type": "string"}}},
    429: {
        "Retry-After": {"required": True, "schema": {"type": "string"}, "description": "Seconds"}
    },
    503: {
        "Retry-After": {"required": True, "schema": {"type": "string"}, "description": "Seconds"}
    },
}


def body(kind: type, *, example: Mapping[str, Any], or_list: bool = False) -> dict[str, Any]:
    """Return `openapi_extra` for a route that parses its body itself.

    Args:
        kind: Type of the body.
        example: Example of a body.
        or_list: Also accept a list, whose entries are accepted or rejected independently.
    """
    _BODIES[kind.__name__] = kind
    schema: dict[str, Any] = {"$ref": _REF.format(model=kind.__name__)}
    if or_list:
        schema = {"anyOf": [schema, {"type": "array", "items": {}, "minItems": 1}]}
    content = {"schema": schema, "example": example}
    return {"requestBody": {"required": True, "content": {"application/json": content}}}


def lines(*, example: Mapping[str, Any]) -> dict[str, Any]:
    """Return `openapi_extra` for a route with an NDJSON body."""
    content = {"schema": {}, "example": json.dumps(example) + "\n"}
    return {"requestBody": {"content": {NDJSON: content}}}


def upload(*, example: Mapping[str, Any], max_files: int) -> dict[str, Any]:
    """Return `openapi_extra` for a form with 1 to `max_files` files `trace` and a text `query`."""
    trace = {
        "type": "array",
        "items": {"type": "string", "format": "binary"},
        "minItems": 1,
        "maxItems": max_files,
    }
    query = {
        "type": "string",
        "description": "Query of the recorded configuration, as JSON or YAML",
    }
    schema = {
        "type": "object",
        "required": ["trace"],
        "properties": {"trace": trace, "query": query},
        "additionalProperties": False,
    }
    return {
        "requestBody": {
            "required": True,
            "content": {"multipart/form-data": {"schema": schema, "example": example}},
        }
    }


def answer_lines(description: str) -> dict[int | str, dict[str, Any]]:
    """Return `responses` for a route that returns NDJSON."""
    return {200: {"description": description, "content": {NDJSON: {}}}}


def conflict(description: str) -> dict[int | str, dict[str, Any]]:
    """Return `responses` for a route that may return a conflict."""
    return {409: {"description": description}}


def install(app: FastAPI) -> None:
    """Install the generator for /openapi.json."""

    def openapi() -> dict[str, Any]:
        if app.openapi_schema is None:
            description = get_openapi(
                title=app.title, version=app.version, description=app.description, routes=app.routes
            )
            components = description.setdefault("components", {})
            schemas = components.setdefault("schemas", {})
            for name in _FRAMEWORKS_OWN:
                schemas.pop(name, None)
            schemas["Problem"] = Problem.model_json_schema()
            for name, kind in _BODIES.items():
                definition = schema.described_adapter(kind).json_schema(ref_template=_REF)
                nested = definition.pop("$defs", {})
                schemas.update(
                    {f"{key}-Input": value for key, value in {**nested, name: definition}.items()}
                )
            components["securitySchemes"] = {
                _KEY: {"type": "http", "scheme": "bearer", "description": "An API key"}
            }
            for path, item in description["paths"].items():
                for method in _METHODS:
                    if method in item:
                        _complete(item[method], method=method, path=path)
            app.openapi_schema = description
        return app.openapi_schema

    app.openapi = openapi  # type: ignore[method-assign]


def _complete(operation: dict[str, Any], *, method: str, path: str) -> None:
    """Add security and error responses to an operation, without replacing declared descriptions."""
    if path not in OPEN_PATHS:
        operation["security"] = [{_KEY: []}]
    responses = operation["responses"]
    declared = [
        int(code) for code in responses if code.isdecimal() and int(code) >= HTTPStatus.BAD_REQUEST
    ]
    for status in sorted({*declared, *_problems(operation, method=method, path=path)}):
        declaration = responses.get(str(status), {})
        # FastAPI's own description of 422 is less specific.
        own_description = (
            declaration.get("description") if status != HTTPStatus.UNPROCESSABLE_ENTITY else None
        )
        responses[str(status)] = {
            "description": own_description or HTTPStatus(status).phrase,
            "content": {MEDIA_TYPE: {"schema": {"$ref": "#/components/schemas/Problem"}}},
            **({"headers": _HEADERS[status]} if status in _HEADERS else {}),
        }
    if (
        method == "get"
        and path.startswith("/v1/")
        and "application/json" in responses.get("200", {}).get("content", {})
    ):
        responses["304"] = {"description": "Not modified: the tag in If-None-Match is current"}
    operation["responses"] = dict(sorted(responses.items()))


def _problems(operation: dict[str, Any], *, method: str, path: str) -> Iterator[int]:
    yield from (421, 422, 500, 503)
    if path not in OPEN_PATHS:
        yield from (401, 403, 429)
    if "{" in path:
        yield 404
    if "requestBody" in operation or method != "get":
        yield 413
