"""Common parts of pages: contexts, routes, templates, forms, and URLs with a page's state."""

import hashlib
import inspect
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar, get_type_hints
from urllib.parse import parse_qsl, urlencode

from fastapi import APIRouter, Depends, Request, Response
from fastapi.responses import HTMLResponse, RedirectResponse, StreamingResponse
from jinja2 import Environment, PackageLoader, StrictUndefined, select_autoescape
from markupsafe import Markup
from pydantic import GetCoreSchemaHandler, GetJsonSchemaHandler
from pydantic.json_schema import JsonSchemaValue
from pydantic_core import CoreSchema, core_schema
from starlette.status import HTTP_200_OK, HTTP_303_SEE_OTHER, HTTP_422_UNPROCESSABLE_CONTENT

from hp_tool.domain import records, states
from hp_tool.errors import HpToolError, InputError
from hp_tool.questions import schema
from hp_tool.questions.configuration import Configuration, Row
from hp_tool.wording.rankings import Table
from hp_tool.wording.rejections import RULES
from service.api.bodies import read_body
from service.dashboard import formats
from service.dashboard.presets import QUICKSTART_HREF

P = TypeVar("P")
ContextFunction = TypeVar("ContextFunction", bound=Callable[..., Any])
Tone = states.Tone
ErrorFields = dict[str, str | None]
"""{code, message, field} of an error."""

Done = Literal["added", "changed", "learned", "removed", "revoked"]
NOTICES: dict[str, str] = {
    "added": "Added. Queries may name it now.",
    "changed": "Changed.",
    "learned": "Learned: predictions use the new calibration now.",
    "removed": "Removed.",
    "revoked": "Revoked.",
}
"""Confirmation messages, by the value of `done` in the URL."""
MAX_FIELDS = 100
"""Maximum number of fields in a form."""
MAX_QUERY = 20_000
"""Maximum length of a query in a URL, in characters."""
STATIC = Path(__file__).parent / "static"
SECTIONS = (
    ("Plan", "Ask", "/", "recommend"),
    ("Plan", "Compare", "/compare", "recommend"),
    ("Search", "Searches", "/searches", "search"),
    ("Search", "Workers", "/workers", "clusters"),
    ("Running jobs", "Watch", "/watches", "watch"),
    ("Running jobs", "Explain", "/explain", "explain"),
    ("Running jobs", "Calibration", "/calibration", "calibration"),
    ("Catalogue", "Models", "/models", "models"),
    ("Catalogue", "GPUs", "/gpus", "networks"),
    ("Catalogue", "Clusters", "/clusters", "clusters"),
    ("Service", "Keys", "/keys", "service"),
    ("Service", "Guide", "/guide", ""),
)
"""Navigation entries: group, name, path and page of the guide."""
ASSETS = hashlib.sha256(
    b"".join(path.read_bytes() for path in sorted(STATIC.iterdir()))
).hexdigest()[:12]
"""Digest of the static files. It is part of their URLs, so that they can be cached forever."""

_environment = Environment(
    loader=PackageLoader("service.dashboard"),
    autoescape=select_autoescape(default=True, default_for_string=True),
    # With StrictUndefined, a misspelt field fails a test instead of rendering as empty text.
    undefined=StrictUndefined,
    trim_blocks=True,
    lstrip_blocks=True,
    finalize=formats.visible,
)
_environment.globals |= {
    "assets": ASSETS,
    "sections": SECTIONS,
    "guides": {name: guide for _, name, _, guide in SECTIONS},
    "quickstart_href": QUICKSTART_HREF,
    "run_states": states.RUN_STATES,
    "rejection_rules": RULES,
}
_environment.filters |= dict(inspect.getmembers(formats, inspect.isfunction))


def template_filter(function: Callable[[str], Markup]) -> Callable[[str], Markup]:
    """Register a function as a template filter under its name."""
    _environment.filters[function.__name__] = function
    return function


@dataclass(frozen=True, slots=True, kw_only=True)
class Page:
    """Common fields of all pages."""

    title: str
    json_href: str

    @property
    def csv_href(self) -> str:
        """URL of the page's table as CSV."""
        return self.json_href.replace(".json", ".csv", 1)


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
    csv: bool = False,
) -> Callable[[ContextFunction], ContextFunction]:
    """Register the decorated function as the HTML page at `path` and as its JSON.

    The function returns the page's context. It is a FastAPI dependency, and its docstring describes
    the JSON in the API. `status` computes the HTTP status of the HTML page from the context. With
    `csv`, the context's `table` is also available as a CSV file.
    """

    def register(context_function: ContextFunction) -> ContextFunction:
        dependency = Depends(context_function)

        def json_page(context: Any = dependency) -> Any:
            return context

        def html_page(request: Request, context: Any = dependency) -> HTMLResponse:
            notice = NOTICES.get(request.query_params.get("done", ""))
            return render(
                template, page=context, section=section, status=status(context), notice=notice
            )

        name = context_function.__name__.removesuffix("_context")
        context_type = get_type_hints(context_function)["return"]
        # The JSON route comes first: if the path ends in a parameter, the HTML route would match
        # both URLs.
        router.add_api_route(
            f"{path}.json",
            json_page,
            name=f"{name}_json",
            description=inspect.getdoc(context_function),
            response_model=context_type,
        )
        if csv:

            def csv_page(context: Any = dependency) -> Response:
                return csv_response(context.table, name=name)

            router.add_api_route(
                f"{path}.csv", csv_page, name=f"{name}_csv", include_in_schema=False
            )
        router.add_api_route(
            path,
            html_page,
            name=f"{name}_html",
            response_class=HTMLResponse,
            include_in_schema=False,
        )
        return context_function

    return register


def csv_response(table: Table, *, name: str) -> Response:
    """Return a table as a CSV download."""
    headers = {"Content-Disposition": f'attachment; filename="{name}.csv"'}
    return Response(table.csv(), media_type="text/csv", headers=headers)


def error_status(context: Any) -> int:
    """Return 422 if the context has an `error`, else 200."""
    return HTTP_200_OK if context.error is None else HTTP_422_UNPROCESSABLE_CONTENT


def render_html(template: str, **variables: Any) -> str:
    """Render `template` to HTML with these variables."""
    variables.setdefault("notice", None)
    return _environment.get_template(template).render(variables)


def render(
    template: str,
    *,
    page: Any,
    section: str | None = None,
    status: int = 200,
    notice: str | None = None,
) -> HTMLResponse:
    """Return an HTML response with `template` and the context `page`.

    `section` is marked in the navigation bar. `notice` confirms the user's last action.
    """
    return HTMLResponse(
        render_html(template, page=page, section=section, notice=notice), status_code=status
    )


def stream_page(
    template: str,
    rest: str,
    *,
    page: P,
    whole: Callable[[], Awaitable[P]],
    section: str | None = None,
) -> StreamingResponse:
    """Stream the HTML of `template` in two parts.

    The part before `{{ rest }}` is sent immediately. The template `rest` is rendered with the
    result of `whole` and sent as soon as this result is available.
    """
    mark = Markup("<!-- the rest -->")

    async def parts() -> AsyncIterator[str]:
        before, place, after = render_html(
            template, page=page, section=section, rest=mark
        ).partition(mark)
        yield before
        if place:
            yield render_html(rest, page=await whole())
        yield after

    return StreamingResponse(parts(), media_type="text/html")


def done(href: str, what: Done) -> RedirectResponse:
    """Redirect to the page at `href`, which confirms the action."""
    return RedirectResponse(f"{href}?done={what}", status_code=HTTP_303_SEE_OTHER)


def none_if_blank(text: object) -> object:
    """Strip the text; return None if nothing is left."""
    return text.strip() or None if isinstance(text, str) else text


class _BlankIsNone:
    """Marker that converts blank text to None, and allows blank text in the schema."""

    def __get_pydantic_core_schema__(
        self, source: Any, handler: GetCoreSchemaHandler
    ) -> CoreSchema:
        return core_schema.no_info_before_validator_function(none_if_blank, handler(source))

    def __get_pydantic_json_schema__(
        self, schema: CoreSchema, handler: GetJsonSchemaHandler
    ) -> JsonSchemaValue:
        return {"anyOf": [handler(schema), {"type": "string", "const": ""}]}


BLANK_IS_NONE = _BlankIsNone()
"""For filters in a URL, because forms send unset filters as empty text."""


def read_form(text: str | bytes) -> dict[str, str]:
    """Parse a form into values by name. Blank values are omitted; the last repeated value wins.

    Raises:
        InputError: The form is malformed.
    """
    try:
        pairs = parse_qsl(
            text if isinstance(text, str) else text.decode(), max_num_fields=MAX_FIELDS
        )
    except ValueError:
        raise InputError(
            f"The form is not URL-encoded or has more than {MAX_FIELDS} fields.", code="bad_request"
        ) from None
    return {name: value.strip() for name, value in pairs if value.strip()}


async def _fields(request: Request) -> dict[str, str]:
    return await read_body(request, read_form)


Form = Annotated[dict[str, str], Depends(_fields)]
"""Fields of the posted form. Its size and its Origin header are already checked."""


def address(path: str, parameters: Mapping[str, object]) -> str:
    """Return `path` with a query string.

    Parameters that are None or empty are omitted. Parameters with several values are repeated.
    """
    kept = {name: value for name, value in parameters.items() if value not in (None, "", ())}
    return f"{path}?{urlencode(kept, doseq=True)}" if kept else path


def next_href(
    path: str, part: records.Page[Any], filters: Mapping[str, object] | None = None
) -> str | None:
    """Return the URL of the next page of a list; None on the last page."""
    return (
        address(path, {**(filters or {}), "cursor": part.next_cursor}) if part.next_cursor else None
    )


def json_href(href: str) -> str:
    """Return the URL of the JSON of the page at `href`."""
    path, question_mark, parameters = href.partition("?")
    return f"{path}.json{question_mark}{parameters}"


def configuration_href(configuration: Configuration, *, search_id: str | None = None) -> str:
    """Return the URL of a configuration's page, with the evidence of the search `search_id`."""
    return address("/configurations", {"query": configuration.text(), "search": search_id})


def compare_href(first: Configuration, second: Configuration | None = None) -> str:
    """Return the URL of a comparison with `second`, or else with the recommended configuration."""
    return address("/compare", {"first": first.text(), "second": second and second.text()})


def stored_configuration(query: Mapping[str, Any] | None, row: Row) -> Configuration | None:
    """Return the configuration in a row of a stored query; None if its version is not readable."""
    try:
        return Configuration.from_row(row, query=schema.parse_query(query)) if query else None
    except HpToolError:
        return None
