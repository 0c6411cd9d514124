"""Types that several pages share. A page's context is frozen data: its template renders it, and it is the page's JSON."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Tone = Literal["good", "warn", "bad", "busy", ""]
ErrorFields = dict[str, str | None]
"""{code, message, field} of an error."""


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
