"""Which edition of hp-tool this is, as stored with each search: a worker leaves alone what a newer
one stored.
"""

import functools
from collections.abc import Iterator
from typing import Any

from hp_tool.catalog import library
from hp_tool.domain.query import Query
from hp_tool.questions.schema import adapter


@functools.cache
def edition() -> int:
    """Return the number of words that queries of this hp-tool know: keys, choices, and names of the
    built-in catalogue.

    Words are added and never taken away, so of two editions the one with more words reads what both
    store.
    """
    return len(set(_words(adapter(Query).json_schema(), ()))) + library.number_of_built_in_names()


def _words(node: Any, path: tuple[str, ...]) -> Iterator[tuple[str, ...]]:
    """Yield each key and each choice of a JSON schema with its path."""
    if isinstance(node, list):
        for each in node:
            yield from _words(each, path)
    elif isinstance(node, dict):
        choices = [*node.get("enum", ()), *([node["const"]] if "const" in node else ())]
        yield from ((*path, "choice", str(choice)) for choice in choices)
        for name, value in node.items():
            if name == "properties":
                yield from ((*path, "key", key) for key in value)
            if name != "default":
                yield from _words(value, (*path, name))
