"""Every route of the application, pages included, as the framework itself knows them: a new one
cannot be left out.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from fastapi import FastAPI
from fastapi.dependencies.models import Dependant
from fastapi.routing import APIRoute, iter_route_contexts
from starlette.routing import Mount


@dataclass(frozen=True, slots=True, kw_only=True)
class Address:
    """One method of one route."""

    method: str
    pattern: str
    """As `/v1/searches/{search_id}`."""
    parameters: frozenset[str]
    """Those of the query string, its dependencies' included."""

    def at(self, **values: str) -> str:
        """The path with these values; KeyError where the pattern has a parameter that is not
        given.
        """
        return self.pattern.format(**values)


def every_route(app: FastAPI) -> Iterator[Address]:
    """Each method of each route; of static files, which are everybody's, only those that are
    routes.
    """
    for context in iter_route_contexts(app.routes):
        route = context.original_route
        if isinstance(route, Mount):
            continue
        assert context.path_format is not None
        parameters = (
            frozenset(_parameters(route.dependant)) if isinstance(route, APIRoute) else frozenset()
        )
        for method in sorted((context.methods or set()) - {"HEAD"}):
            yield Address(method=method, pattern=context.path_format, parameters=parameters)


def _parameters(dependant: Dependant) -> set[str]:
    return {field.alias for field in dependant.query_params}.union(
        *map(_parameters, dependant.dependencies)
    )
