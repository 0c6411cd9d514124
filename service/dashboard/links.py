"""Addresses of pages. An address holds the whole state of its page, so a link can be shared."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any
from urllib.parse import urlencode

from hp_tool.domain.parallel import ParallelConfig
from hp_tool.domain.query import Query
from hp_tool.domain.records import Page
from hp_tool.domain.serving import ServingConfig
from hp_tool.queries import schema

MAX_QUERY = 20_000
"""Characters of a query in an address."""
IRRELEVANT = ("search", "id")
"""Fields of a query that do not describe its configuration."""


def address(path: str, parameters: Mapping[str, object]) -> str:
    """`path` with its query string; parameters that are None or empty are left out."""
    kept = {name: value for name, value in parameters.items() if value not in (None, "")}
    return f"{path}?{urlencode(kept)}" if kept else path


def next_href(path: str, page: Page[Any], filters: Mapping[str, object] | None = None) -> str | None:
    """Address of the part of a list that follows `page`; None on the last one."""
    return address(path, {**(filters or {}), "cursor": page.next_cursor}) if page.next_cursor else None


def json_href(href: str) -> str:
    """Address of the JSON of the page at `href`."""
    path, question_mark, parameters = href.partition("?")
    return f"{path}.json{question_mark}{parameters}"


def configuration_href(query: Query | Mapping[str, Any], *, parallel: ParallelConfig | ServingConfig | None = None) -> str:
    """Page of a query's configuration, or of `parallel` in its place."""
    return address("/configurations", {"query": configuration_text(query, parallel=parallel)})


def compare_href(first: str, second: str) -> str:
    """Page that compares two configurations, each given as `configuration_text`."""
    return address("/compare", {"first": first, "second": second})


def configuration_text(query: Query | Mapping[str, Any], *, parallel: ParallelConfig | ServingConfig | None = None) -> str:
    """Query of one configuration, as compact JSON."""
    mapping = schema.query_mapping(query) if isinstance(query, Query) else dict(query)
    if parallel is not None:
        values = schema.to_dict(parallel)
        mapping["parallel"] = {name: value for name, value in values.items() if value is not None}
    kept = {name: value for name, value in mapping.items() if name not in IRRELEVANT}
    return json.dumps(kept, separators=(",", ":"), ensure_ascii=False)
