"""Compute the edition number of this hp-tool. Each search stores it, and workers skip searches of
newer editions.
"""

import functools
from collections.abc import Iterator
from typing import Any

from hp_tool.catalog import library
from hp_tool.domain.query import Query
from hp_tool.questions.schema import adapter


@functools.cache
def count_query_terms() -> int:
    """Return the number of query terms that this hp-tool supports: keys, choices, and names in the
    built-in catalogue.

    Terms are never removed, so the edition with more terms can run the searches of both.
    """
    return (
        len(set(_schema_terms(adapter(Query).json_schema(), ())))
        + library.number_of_built_in_names()
    )


def _schema_terms(node: Any, path: tuple[str, ...]) -> Iterator[tuple[str, ...]]:
    """Yield the path of each key and each choice in a JSON schema."""
    if isinstance(node, list):
        for each in node:
            yield from _schema_terms(each, path)
    elif isinstance(node, dict):
        choices = [*node.get("enum", ()), *([node["const"]] if "const" in node else ())]
        yield from ((*path, "choice", str(choice)) for choice in choices)
        for name, value in node.items():
            if name == "properties":
                yield from ((*path, "key", key) for key in value)
            if name != "default":
                yield from _schema_terms(value, (*path, name))
