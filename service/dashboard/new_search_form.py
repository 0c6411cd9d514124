"""Convert between queries and the values of forms and URLs, which are texts by path."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import yaml

from hp_tool.domain.frameworks import FRAMEWORKS as FRAMEWORKS
from hp_tool.domain.query import Kind
from hp_tool.errors import InputError
from hp_tool.questions import schema
from hp_tool.questions.form_fields import RECOMPUTE, Field, form_fields
from hp_tool.questions.training.recipes import list_recipes
from service.dashboard.formats import dotted


@dataclass(frozen=True, slots=True, kw_only=True)
class RecipeChoice:
    """A recipe that a query may name."""

    name: str
    description: str


MAX_DIGITS = 10
"""Maximum number of digits of a layer count."""
EXTRA = "extra"
"""Last field of the form: further fields of the query, as YAML."""


def recipe_choices() -> tuple[RecipeChoice, ...]:
    """Return all recipes in the catalogue."""
    return tuple(
        RecipeChoice(name=recipe.name, description=recipe.description) for recipe in list_recipes()
    )


def kind_of(values: Mapping[str, Any]) -> Kind:
    """Return the kind of a query, given as form values or as a mapping."""
    return "inference" if values.get("kind") == "inference" else "training"


def check_names(values: Mapping[str, str], *, own: Iterable[str] = ()) -> None:
    """Reject names in a URL that are neither query paths nor the page's parameters (`own`).

    Raises:
        InputError: The URL has such a name.
    """
    known = {"kind", EXTRA, *own, *form_fields("training"), *form_fields("inference")}
    for name in values:
        if name not in known and "." not in name:
            near = next((path for path in sorted(known) if path.endswith(f".{name}")), None)
            raise InputError(
                f"Unknown parameter {name[:100]!r}" + (f"; did you mean {near}?" if near else ""),
                field=name[:100],
                code="unknown_key",
            )


def to_query(values: Mapping[str, str]) -> dict[str, Any]:
    """Return the form's query as a mapping that is not validated yet.

    Raises:
        InputError: The YAML is invalid.
    """
    query: dict[str, Any] = {"kind": kind_of(values)}
    if EXTRA in values:
        query |= _extra(values[EXTRA])
    known, others = (
        form_fields(kind_of(values)),
        form_fields("training" if kind_of(values) == "inference" else "inference"),
    )
    filled = {name: _value(known[name], text) for name, text in values.items() if name in known}
    if "cluster" in filled and any(name.startswith("cluster.") for name in filled):
        raise InputError(
            "Select a registered cluster or describe a cluster, not both.", field="cluster"
        )
    # A URL may contain any query path, including leftover fields from the tab of the other kind.
    unlisted = {
        name: _any_value(name, text)
        for name, text in values.items()
        if "." in name and name not in known | others
    }
    return schema.set_paths(schema.set_paths(query, filled), unlisted)


def to_values(query: Mapping[str, Any], known: Mapping[str, Field] | None = None) -> dict[str, str]:
    """Return a query's form values. Values that the form's fields cannot express go into its YAML.

    `known` contains the form's fields by path.
    """
    leaves = dotted({name: value for name, value in query.items() if name != "kind"})
    parallel = query.get("parallel")
    if isinstance(parallel, Mapping) and isinstance(
        recompute := parallel.get("recompute"), Mapping
    ):  # This is a value, not a section.
        leaves = {
            path: value for path, value in leaves.items() if not path.startswith(f"{RECOMPUTE}.")
        } | {RECOMPUTE: recompute}
    known = form_fields(kind_of(query)) if known is None else known
    texts = {name: _text(known[name], value) for name, value in leaves.items() if name in known}
    values = {
        "kind": kind_of(query),
        **{name: text for name, text in texts.items() if text is not None},
    }
    if rest := schema.set_paths(
        {}, {path: value for path, value in leaves.items() if path not in values}
    ):
        values[EXTRA] = yaml.safe_dump(rest, sort_keys=False, allow_unicode=True)
    return values


def _extra(text: str) -> dict[str, Any]:
    try:
        data = schema.read_yaml(text)
    except InputError as error:
        raise InputError(error.message, field=EXTRA, code=error.code) from None
    if not all(isinstance(name, str) for name in data):
        raise InputError(
            "Other fields must be lines of the form `name: value`.", field=EXTRA, code="syntax"
        )
    return dict(data)


def _any_value(name: str, text: str) -> Any:
    """Parse the value of a field that the form does not list, as YAML."""
    try:
        return schema.read_yaml(f"value: {text}").get("value")
    except InputError as error:
        raise InputError(error.message, field=name, code=error.code) from None


def _value(field: Field, text: str) -> Any:
    if field.several and "," in text:
        return [_scalar(field, part.strip()) for part in text.split(",") if part.strip()]
    return _scalar(field, text)


def _scalar(field: Field, text: str) -> Any:
    """Parse a number, boolean or detailed recomputation, if the field accepts it.

    Other text is returned unchanged.
    """
    if field.text:
        return text
    if field.name == RECOMPUTE:
        return recompute_value(text)
    if text in ("true", "false"):
        return text == "true"
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            continue
    return text


def _text(field: Field, value: Any) -> str | None:
    """Format a value for the field; None if the field cannot express it."""
    text = (
        ", ".join(map(_scalar_text, value))
        if isinstance(value, list | tuple)
        else _scalar_text(value)
    )
    if field.options and not field.several and text not in field.options:
        return None
    # An input contains one line without surrounding spaces. If it is empty, the field is omitted.
    return (
        text
        if text.strip() == text and text and text.isprintable() and _value(field, text) == value
        else None
    )


def _scalar_text(value: Any) -> str:
    if isinstance(value, Mapping):
        return recompute_text(value)
    return str(value).lower() if isinstance(value, bool) else str(value)


def recompute_text(value: Mapping[str, Any]) -> str:
    """Return a recomputation mapping on one line, as `recompute_value` parses it."""
    parts = (part for part in value.values() if part is not None)
    return " ".join(
        "+".join(map(str, part)) if isinstance(part, list) else str(part) for part in parts
    )


def recompute_value(text: str) -> str | dict[str, Any]:
    """Parse texts such as `selective layernorm+mlp` and `full block 4` into mappings.

    A single word is returned unchanged.
    """
    words = text.split()
    if len(words) < 2:
        return text
    value: dict[str, Any] = {"granularity": words[0]}
    for word in words[1:]:
        if word.isdecimal() and len(word) < MAX_DIGITS:
            value["num_layers"] = int(word)
        elif word in ("uniform", "block"):
            value["method"] = word
        else:
            value["modules"] = word.split("+")
    return value
