"""Resolve references within a YAML file in OmegaConf's syntax.

Supported are ${key.of.file}, ${.beside}, ${..above}, ${multiply:2, 3}, ${oc.select:key, default}
and ${oc.env:NAME, default}.
"""

import math
import re
from collections.abc import Mapping
from typing import Any

MAX_ROUNDS = 20
MAX_TEXT = 10_000
_INNERMOST_REFERENCE = re.compile(r"\$\{([^${}]*)\}")


def resolve_references(
    content: Mapping[str, Any], *, variables: Mapping[str, str]
) -> dict[str, Any]:
    """Return the mapping with its references resolved, except those that cannot be resolved."""

    def resolve_node(value: Any, path: tuple[str, ...]) -> Any:
        if isinstance(value, Mapping):
            return {key: resolve_node(each, (*path, str(key))) for key, each in value.items()}
        if isinstance(value, list):
            return [resolve_node(each, (*path, "")) for each in value]
        return (
            _resolve_text(value, path, content, variables)
            if isinstance(value, str) and "${" in value
            else value
        )

    result: dict[str, Any] = resolve_node(content, ())
    return result


def _resolve_text(
    text: str, path: tuple[str, ...], content: Mapping[str, Any], variables: Mapping[str, str]
) -> Any:
    """Return the text at `path` with its references resolved.

    If the text consists of one reference, return the referenced value, which may not be text.
    """
    value: Any = text
    for _ in range(MAX_ROUNDS):
        match = (
            _INNERMOST_REFERENCE.search(value)
            if isinstance(value, str) and len(value) < MAX_TEXT
            else None
        )
        if match is None:
            return value
        part = _resolve_reference(match[1].strip(), path, content, variables)
        if part is None or isinstance(part, Mapping | list):
            return value
        value = (
            part if match[0] == value else value[: match.start()] + str(part) + value[match.end() :]
        )
    return text


def _resolve_reference(
    name: str, path: tuple[str, ...], content: Mapping[str, Any], variables: Mapping[str, str]
) -> Any:
    """Return the value of one reference; None if it cannot be resolved."""
    resolver, separator, rest = name.partition(":")
    if separator:
        parts = [part.strip() for part in rest.split(",")]
        if resolver == "oc.env":
            return variables.get(parts[0], parts[1] if len(parts) > 1 else None)
        if resolver == "oc.select":
            selected = _resolve_reference(parts[0], path, content, variables)
            return parts[1] if selected is None and len(parts) > 1 else selected
        if resolver == "multiply" and all(re.fullmatch(r"\d{1,9}", part) for part in parts):
            return math.prod(int(part) for part in parts)
        return None
    up = len(name) - len(name.lstrip("."))
    node: Any = content
    for key in (*(path[:-up] if up else ()), *name.lstrip(".").split(".")):
        node = node.get(key) if isinstance(node, Mapping) else None
    return variables.get(name) if node is None else node
