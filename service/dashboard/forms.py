"""Forms as browsers post them."""

from __future__ import annotations

from typing import Annotated
from urllib.parse import parse_qs

from fastapi import Depends, Request

from hp_tool.errors import InputError

MAX_FIELDS = 50


async def _fields(request: Request) -> dict[str, str]:
    """Names to values, the last where one is given twice; empty ones are left out. The gate has bounded the size."""
    try:
        found = parse_qs((await request.body()).decode(), max_num_fields=MAX_FIELDS)
    except ValueError:
        raise InputError("the form is no URL-encoded text, or has too many fields", code="bad_request") from None
    return {name: values[-1] for name, values in found.items()}


Form = Annotated[dict[str, str], Depends(_fields)]
