"""What the new search's page and its preview show."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from service.dashboard.new.fields import Kind, Section


@dataclass(frozen=True, slots=True, kw_only=True)
class NewSearchPage:
    """The form."""

    title: str
    json_href: str
    kind: Kind
    sections: tuple[Section, ...]
    suggestions: dict[str, tuple[str, ...]]
    """Names that a field may take, by what they name."""
    values: dict[str, str]
    """What is filled in, by field."""
    error: dict[str, str | None] | None
    """{code, message, field}: why it was not accepted."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PreviewRow:
    """A configuration by the cost model. Of training the step, of serving the latencies."""

    rank: int
    arithmetic: str
    details: str
    href: str
    """Where to look closer."""
    step_s: float | None = None
    tokens_per_second_per_gpu: float | None = None
    mfu: float | None = None
    ttft_s: float | None = None
    tpot_s: float | None = None
    memory_bytes: float | None = None
    capacity_bytes: float | None = None
    reasons: tuple[str, ...] = ()
    """Of one that is not acceptable: what it lacks."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Command:
    """The same question as text."""

    label: str
    text: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Preview:
    """The cost model's answer to what is filled in so far."""

    kind: Kind
    error: dict[str, str | None] | None
    """{code, message, field}: what is wrong or missing; then the rest is empty."""
    rows: tuple[PreviewRow, ...] = ()
    misses: tuple[PreviewRow, ...] = ()
    """Where nothing is acceptable: what comes nearest."""
    legal: int = 0
    feasible: int = 0
    seconds: float = 0.0
    rejections: tuple[tuple[str, int], ...] = ()
    """Why candidates were left out, and how many."""
    figure: dict[str, Any] | None = None
    """In Plotly's words, see plot.js."""
    unsearchable: str | None = None
    """Why no real runs can search this; the prediction stands."""
    commands: tuple[Command, ...] = ()
