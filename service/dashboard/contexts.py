"""Types that several pages share. A page's context is frozen data: its template renders it, and it is the page's JSON."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any, Literal, Self

Tone = Literal["good", "warn", "bad", "busy", ""]
ErrorFields = dict[str, str | None]
"""{code, message, field} of an error."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """Records as a page shows them: some fields are the records' own, the page computes the others."""

    @classmethod
    def of(cls, *records: object, **computed: Any) -> Self:
        """The row of `records`. A field missing in `computed` is copied from the first record that has it."""
        values = computed
        for record in records:
            values = {field.name: getattr(record, field.name) for field in fields(cls) if hasattr(record, field.name)} | values
        return cls(**values)


@dataclass(frozen=True, slots=True, kw_only=True)
class Page:
    """What every page has."""

    title: str
    json_href: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Fact:
    """A named value in words."""

    name: str
    value: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Quantity:
    """What the runs of a search are compared by: a time and a rate."""

    seconds: str
    """Name of the time: step time, or for serving the latency of a request under the full load."""
    charged: bool
    """The search minimises this time plus a penalty for missed targets."""
    rate: str
