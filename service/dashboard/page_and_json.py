"""Routes of a page: HTML at its path, and at the same path + `.json` the context that its template renders."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any, TypeVar, get_type_hints

from fastapi import APIRouter, Depends
from fastapi.responses import HTMLResponse
from starlette.status import HTTP_200_OK, HTTP_422_UNPROCESSABLE_CONTENT

from service.dashboard.rendering import render

ContextFunction = TypeVar("ContextFunction", bound=Callable[..., Any])


def page_at(
    router: APIRouter,
    path: str,
    *,
    template: str,
    section: str,
    status: Callable[[Any], int] = lambda context: HTTP_200_OK,
    home: bool = False,
) -> Callable[[ContextFunction], ContextFunction]:
    """Register the HTML page at `path` and its JSON for the decorated function, which returns the page's context.

    The function is a FastAPI dependency; its docstring describes the JSON in the API. `status` computes the HTML response's
    status from the context. With `home`, the page is also the dashboard's front page.
    """

    def register(context_function: ContextFunction) -> ContextFunction:
        dependency = Depends(context_function)

        def json_page(context: Any = dependency) -> Any:
            return context

        def html_page(context: Any = dependency) -> HTMLResponse:
            return render(template, page=context, section=section, status=status(context))

        name = context_function.__name__.removesuffix("_context")
        # JSON first: if the path ends in a parameter, the HTML route would match its address too.
        router.add_api_route(
            f"{path}.json",
            json_page,
            name=f"{name}_json",
            description=inspect.getdoc(context_function),
            response_model=get_type_hints(context_function)["return"],
        )
        for address in (path, "/") if home else (path,):
            router.add_api_route(address, html_page, name=f"{name}_html", response_class=HTMLResponse, include_in_schema=False)
        return context_function

    return register


def error_status(context: Any) -> int:
    """422 if the context has an `error`, else 200."""
    return HTTP_200_OK if context.error is None else HTTP_422_UNPROCESSABLE_CONTENT
