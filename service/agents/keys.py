"""List the query keys of each section, from the schema that validates queries."""

from typing import Any, Literal

from hp_tool.domain.query import Query
from hp_tool.domain.sizing import SizingQuery
from hp_tool.questions import schema

Section = Literal[
    "top",
    "model",
    "cluster",
    "training",
    "inference",
    "parallel",
    "constraints",
    "targets",
    "search",
    "sizing",
]


def keys_of(section: Section) -> dict[str, Any]:
    """Return the types and descriptions of a section's keys, by key."""
    adapter = schema.described_adapter(SizingQuery if section == "sizing" else Query)
    path = () if section in ("top", "sizing") else (section,)
    meanings: dict[str, Any] = {}
    for node in schema.schemas_at(adapter, path):
        for option in schema.union_branches(adapter, node):
            for name, declared in option.get("properties", {}).items():
                meanings.setdefault(
                    name,
                    _in_words(
                        declared,
                        [
                            kind
                            for branch in schema.union_branches(adapter, declared)
                            for kind in _types(branch)
                        ],
                    ),
                )
    return meanings


def _types(option: dict[str, Any]) -> list[str]:
    if "enum" in option or "const" in option:
        return [str(value) for value in option.get("enum", [option.get("const")])]
    bounds = [f"{option[end]:g}" for end in ("minimum", "maximum") if end in option]
    kind = (
        f"list of {option['items'].get('type', 'values')}"
        if "items" in option
        else str(option.get("type", "any"))
    )
    return [f"{kind} {' to '.join(bounds)}".strip()]


def _in_words(declared: dict[str, Any], types: list[str]) -> str:
    """Describe a key: `integer or null, default 1: Sequences per replica`."""
    kinds = " or ".join(dict.fromkeys(kind for kind in types if kind != "null"))
    default = declared.get("default")
    words = (
        f", default {default}"
        if default is not None and not isinstance(default, dict | list)
        else ""
    )
    meaning = " ".join(declared.get("description", "").split())
    return f"{kinds}{words}: {meaning}".removesuffix(": ")
