"""Format names in requests. The schema describes them after all formats are registered."""

from collections.abc import Callable
from typing import Annotated, Any

from pydantic import Field

from hp_tool.formats.registry import listed_readable, listed_writable


def _described(text: Callable[[], str]) -> Any:
    return Field(json_schema_extra=lambda schema: schema.update(description=text()))


Writable = Annotated[str, _described(lambda: f"{listed_writable()}.")]
Readable = Annotated[str | None, _described(lambda: f"{listed_readable()}; detected if omitted.")]
