"""/configurations and /compare: the question stands in the address."""

from __future__ import annotations

from typing import Annotated

from fastapi import APIRouter, Query

from hp_tool.errors import HpToolError
from service.api.dependencies import CalibrationsDep, FindDep
from service.api.queries import read_query
from service.dashboard.configuration.building import configuration_page
from service.dashboard.configuration.comparing import compare_page, failed_comparison
from service.dashboard.configuration.contexts import ComparePage, ConfigurationPage
from service.dashboard.links import MAX_QUERY
from service.dashboard.twins import answered, page_at

router = APIRouter(tags=["dashboard"])

Text = Annotated[str, Query(max_length=MAX_QUERY, description="A query of one configuration, as JSON or YAML")]


@page_at(router, "/configurations", template="configuration.html", section="Explorer", status=answered)
def configuration_context(query: Text, calibrations: CalibrationsDep, find: FindDep) -> ConfigurationPage:
    """One configuration as its page shows it."""
    try:
        return configuration_page(read_query(query.encode(), find=find), calibrations=calibrations)
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


@page_at(router, "/compare", template="compare.html", section="Explorer", status=answered)
def compare_context(first: Text, second: Text, calibrations: CalibrationsDep, find: FindDep) -> ComparePage:
    """Two configurations as their page shows them."""
    try:
        one, two = (read_query(text.encode(), find=find) for text in (first, second))
        return compare_page(one, two, calibrations=calibrations)
    except HpToolError as error:
        return failed_comparison(error)
