"""/searches/new: the form, its preview and its submission."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated

from fastapi import APIRouter, Depends, Query, Request
from fastapi.responses import HTMLResponse, RedirectResponse
from starlette.responses import Response
from starlette.status import HTTP_422_UNPROCESSABLE_CONTENT

from hp_tool import catalog
from hp_tool.domain.ports import Store
from hp_tool.domain.query import Kind
from hp_tool.errors import HpToolError
from hp_tool.queries import schema
from hp_tool.tuning import resolve_search
from service.api.bodies import json_response
from service.api.dependencies import CalibrationsDep, FindDep, StoreDep
from service.api.queries import resolve
from service.dashboard.contexts import ErrorFields, Page
from service.dashboard.forms import Form, read_form
from service.dashboard.new_search.fields import Section, sections
from service.dashboard.new_search.form import kind_of, to_query, to_values
from service.dashboard.new_search.preview import Preview, preview
from service.dashboard.page_and_json import page_at
from service.dashboard.rendering import render

EXAMPLE = {"kind": "training", "cluster.gpus_per_node": "8"}

router = APIRouter(prefix="/searches/new", tags=["dashboard"])


@dataclass(frozen=True, slots=True, kw_only=True)
class NewSearchPage(Page):
    """The form of a new search."""

    kind: Kind
    sections: tuple[Section, ...]
    suggestions: dict[str, tuple[str, ...]]
    """Names to suggest, by what they name: models, gpus, clusters."""
    values: dict[str, str]
    """The form's values by field."""
    error: ErrorFields | None
    """Why the search was not accepted."""


@page_at(router, "", template="new_search.html", section="New search")
def form_context(
    request: Request,
    store: StoreDep,
    clone: Annotated[str | None, Query(alias="from", max_length=16, description="A search whose query fills the form")] = None,
) -> NewSearchPage:
    """Form of a new search, as shown on its page; filled with a search's query, or with the fields in the address."""
    if clone is not None:
        query = schema.query_mapping(schema.parse_query(store.get_search(search_id=clone).query))
        return form_page(to_values(query), store=store)
    return form_page(read_form(request.url.query) or EXAMPLE, store=store)


def form_page(values: Mapping[str, str], *, store: Store, error: HpToolError | None = None) -> NewSearchPage:
    """Context of the form's page with these values."""
    registered = {kind: tuple(r.name for r in store.list_registrations(kind=kind)) for kind in ("model", "cluster")}
    return NewSearchPage(
        title="New search",
        json_href="/searches/new.json",
        kind=kind_of(values),
        sections=sections(kind_of(values)),
        suggestions={
            "models": (*registered["model"], *catalog.names("models")),
            "gpus": tuple(catalog.names("gpus")),
            "clusters": registered["cluster"],
        },
        values=dict(values),
        error=error.as_dict() if error else None,
    )


def preview_context(values: Form, request: Request, find: FindDep, calibrations: CalibrationsDep) -> Preview:
    return preview(values, find=find, calibrations=calibrations, server=str(request.base_url).rstrip("/"))


PreviewContext = Annotated[Preview, Depends(preview_context)]


@router.post("/preview.json", response_model=Preview)
def preview_json(page: PreviewContext) -> Response:
    """The cost model's answer to a form, whose fields are named by their paths in a query."""
    return json_response(page)


@router.post("/preview", response_class=HTMLResponse, include_in_schema=False)
def preview_html(page: PreviewContext) -> HTMLResponse:
    return render("preview.html", page=page)


@router.post("", include_in_schema=False)
def submit(values: Form, store: StoreDep, find: FindDep) -> Response:
    """Queue the search and redirect to its page; on an error, show the form again with its message."""
    try:
        query = resolve(schema.parse_query(to_query(values)), find=find)
        resolve_search(query)
        record = store.create_search(query=schema.to_dict(query))
    except HpToolError as error:
        page = form_page(values, store=store, error=error)
        return render("new_search.html", page=page, section="New search", status=HTTP_422_UNPROCESSABLE_CONTENT)
    return RedirectResponse(f"/searches/{record.id}", status_code=303)
