"""Read forms that browsers post."""

from __future__ import annotations

from typing import Annotated, Any
from urllib.parse import parse_qsl

from fastapi import Depends, Request
from pydantic import GetCoreSchemaHandler, GetJsonSchemaHandler
from pydantic.json_schema import JsonSchemaValue
from pydantic_core import CoreSchema, core_schema

from hp_tool.errors import InputError
from service.api.bodies import read_body

MAX_FIELDS = 100


def none_if_blank(text: object) -> object:
    """The text without surrounding spaces; None if nothing is left."""
    return text.strip() or None if isinstance(text, str) else text


class _BlankIsNone:
    """Reads blank text as None, and says in the schema that blank text is accepted."""

    def __get_pydantic_core_schema__(self, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        return core_schema.no_info_before_validator_function(none_if_blank, handler(source))

    def __get_pydantic_json_schema__(self, schema: CoreSchema, handler: GetJsonSchemaHandler) -> JsonSchemaValue:
        return {"anyOf": [handler(schema), {"type": "string", "const": ""}]}


BLANK_IS_NONE = _BlankIsNone()
"""For filters in an address: a form sends those not set as empty text."""


def read_form(text: str | bytes) -> dict[str, str]:
    """Values by name, without blank ones; the last value of a repeated name counts. Raises InputError."""
    try:
        pairs = parse_qsl(text if isinstance(text, str) else text.decode(), max_num_fields=MAX_FIELDS)
    except ValueError:
        raise InputError("the form is not URL-encoded or has too many fields", code="bad_request") from None
    return {name: value.strip() for name, value in pairs if value.strip()}


async def _fields(request: Request) -> dict[str, str]:
    return await read_body(request, read_form)


Form = Annotated[dict[str, str], Depends(_fields)]
"""Fields of the posted form. The gate has checked its size and, by the Origin header, that our own page sent it."""
