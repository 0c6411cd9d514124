"""What every page has: its context, which its template renders and which is its JSON; its two routes; and its template."""

from __future__ import annotations

import hashlib
import inspect
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, TypeVar, get_type_hints

from fastapi import APIRouter, Depends
from fastapi.responses import HTMLResponse
from jinja2 import Environment, PackageLoader, StrictUndefined, select_autoescape
from starlette.status import HTTP_200_OK, HTTP_422_UNPROCESSABLE_CONTENT

from service.dashboard import formats, plotly

ContextFunction = TypeVar("ContextFunction", bound=Callable[..., Any])
Tone = Literal["good", "warn", "bad", "busy", ""]
ErrorFields = dict[str, str | None]
"""{code, message, field} of an error."""

STATIC = Path(__file__).parent / "static"
SECTIONS = (
    ("Searches", "/"),
    ("New search", "/searches/new"),
    ("Explorer", "/explorer"),
    ("Calibration", "/calibration"),
    ("Models", "/models"),
    ("GPUs", "/gpus"),
    ("Clusters", "/clusters"),
    ("Keys", "/keys"),
)
"""The navigation bar: name and address."""
ASSETS = hashlib.sha256(b"".join(path.read_bytes() for path in sorted(STATIC.iterdir()))).hexdigest()[:12]
"""Digest of the static files. It is part of their URLs, so they can be cached forever."""

_environment = Environment(
    loader=PackageLoader("service.dashboard"),
    autoescape=select_autoescape(default=True, default_for_string=True),
    # A misspelt field fails a test instead of leaving an empty cell.
    undefined=StrictUndefined,
    trim_blocks=True,
    lstrip_blocks=True,
)
_environment.globals |= {"assets": ASSETS, "sections": SECTIONS, "plotly_href": plotly.HREF}
_environment.globals["plotly_styles"] = " ".join(plotly.style_ids())
_environment.filters |= dict(inspect.getmembers(formats, inspect.isfunction))


@dataclass(frozen=True, slots=True, kw_only=True)
class Page:
    """What every page has."""

    title: str
    json_href: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Fact:
    """A named value in words."""

    name: str
    value: str


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


def rendered(template: str, **variables: Any) -> str:
    """HTML of `template` with these variables."""
    return _environment.get_template(template).render(variables)


def render(template: str, *, page: Any, section: str | None = None, status: int = 200) -> HTMLResponse:
    """HTML response of `template` with the context `page`; `section` is marked in the navigation bar."""
    return HTMLResponse(rendered(template, page=page, section=section), status_code=status)
