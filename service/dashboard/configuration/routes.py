"""/configurations and /compare: the question stands in the address."""

from __future__ import annotations

from typing import Annotated

from fastapi import APIRouter, Depends, Query
from fastapi.responses import HTMLResponse
from starlette.status import HTTP_200_OK, HTTP_422_UNPROCESSABLE_CONTENT

from hp_tool.errors import HpToolError
from service.api.dependencies import CorrectionsDep, FindDep
from service.api.queries import read_query
from service.dashboard.configuration.building import configuration_page
from service.dashboard.configuration.comparing import compare_page, failed_comparison
from service.dashboard.configuration.contexts import ComparePage, ConfigurationPage
from service.dashboard.links import MAX_QUERY
from service.dashboard.rendering import render

router = APIRouter(tags=["dashboard"])

Text = Annotated[str, Query(max_length=MAX_QUERY, description="A query of one configuration, as JSON or YAML")]


def configuration_context(query: Text, corrections: CorrectionsDep, find: FindDep) -> ConfigurationPage:
    """What cannot be answered is a page too, which says why."""
    try:
        return configuration_page(read_query(query.encode(), find=find), corrections=corrections)
    except HpToolError as error:
        return ConfigurationPage(
            title="A configuration",
            json_href="/configurations.json",
            view=None,
            schedule=None,
            bubble_fraction=None,
            placement=None,
            explorer_href=None,
            compare_href=None,
            error=error.as_dict(),
        )


def compare_context(first: Text, second: Text, corrections: CorrectionsDep, find: FindDep) -> ComparePage:
    """As configuration_context."""
    try:
        one, two = (read_query(text.encode(), find=find) for text in (first, second))
        return compare_page(one, two, corrections=corrections)
    except HpToolError as error:
        return failed_comparison(error)


ConfigurationContext = Annotated[ConfigurationPage, Depends(configuration_context)]
CompareContext = Annotated[ComparePage, Depends(compare_context)]


@router.get("/configurations.json")
def configuration_json(page: ConfigurationContext) -> ConfigurationPage:
    """One configuration as its page shows it."""
    return page


@router.get("/compare.json")
def compare_json(page: CompareContext) -> ComparePage:
    """Two configurations as their page shows them."""
    return page


@router.get("/configurations", response_class=HTMLResponse, include_in_schema=False)
def configuration_html(page: ConfigurationContext) -> HTMLResponse:
    return render("configuration.html", page=page, section="Explorer", status=_status(page.error))


@router.get("/compare", response_class=HTMLResponse, include_in_schema=False)
def compare_html(page: CompareContext) -> HTMLResponse:
    return render("compare.html", page=page, section="Explorer", status=_status(page.error))


def _status(error: dict[str, str | None] | None) -> int:
    return HTTP_200_OK if error is None else HTTP_422_UNPROCESSABLE_CONTENT
