"""One context, two answers: a page, and at the same URL + `.json` its twin, what the page's template renders."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any, TypeVar, get_type_hints

from fastapi import APIRouter, Depends
from fastapi.responses import HTMLResponse
from starlette.status import HTTP_200_OK, HTTP_422_UNPROCESSABLE_CONTENT

from service.dashboard.rendering import render

Context = TypeVar("Context", bound=Callable[..., Any])


def page_at(
    router: APIRouter,
    path: str,
    *,
    template: str,
    section: str,
    status: Callable[[Any], int] = lambda context: HTTP_200_OK,
    home: bool = False,
) -> Callable[[Context], Context]:
    """Answer `path` and its twin with what the dependency below returns; its docstring describes the twin in the API.

    `status` is the page's, told from its context. `home`: the page is the dashboard's front page too.
    """

    def register(context: Context) -> Context:
        made = Depends(context)

        def twin(shown: Any = made) -> Any:
            return shown

        def html(shown: Any = made) -> HTMLResponse:
            return render(template, page=shown, section=section, status=status(shown))

        name = context.__name__.removesuffix("_context")
        # The twin first: where the path ends in a parameter, the page's would match it too.
        router.add_api_route(
            f"{path}.json",
            twin,
            name=f"{name}_json",
            description=inspect.getdoc(context),
            response_model=get_type_hints(context)["return"],
        )
        for address in (path, "/") if home else (path,):
            router.add_api_route(address, html, name=f"{name}_html", response_class=HTMLResponse, include_in_schema=False)
        return context

    return register


def answered(context: Any) -> int:
    """The status of pages that also say why a question cannot be answered."""
    return HTTP_200_OK if context.error is None else HTTP_422_UNPROCESSABLE_CONTENT
