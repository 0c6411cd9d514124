"""The API description's request bodies. Routes parse bodies themselves (strictly, naming the nearest key), so FastAPI knows
nothing of their schemas; they are added here from the same dataclasses."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from fastapi import FastAPI
from fastapi.openapi.utils import get_openapi
from pydantic import TypeAdapter

_REF = "#/components/schemas/{model}-Input"


def body(name: str) -> dict[str, Any]:
    """`openapi_extra` of a route whose body is the type that `install` is given under this name."""
    return {"requestBody": {"required": True, "content": {"application/json": {"schema": {"$ref": _REF.format(model=name)}}}}}


def install(app: FastAPI, *, bodies: Mapping[str, type]) -> None:
    """Make /openapi.json complete: `bodies` are the types that routes parse themselves, by name."""

    def openapi() -> dict[str, Any]:
        if app.openapi_schema is None:
            description = get_openapi(title=app.title, version=app.version, description=app.description, routes=app.routes)
            schemas = description.setdefault("components", {}).setdefault("schemas", {})
            for name, kind in bodies.items():
                definition = TypeAdapter(kind).json_schema(ref_template=_REF)
                nested = definition.pop("$defs", {})
                schemas.update({f"{key}-Input": value for key, value in {**nested, name: definition}.items()})
            app.openapi_schema = description
        return app.openapi_schema

    app.openapi = openapi  # type: ignore[method-assign]
