"""What the pages of one and of two configurations show."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from hp_tool.anatomy import Placement, Schedule
from hp_tool.domain.result import Reason
from service.dashboard.contexts import Tone
from service.dashboard.figures import Stack

MetricUnit = Literal["seconds", "bytes", "rate", "share", "change", "tflops", "days", "hours", "dollars", "joules", "count"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Metric:
    """One figure of an estimate, with the range that should hold the truth."""

    name: str
    value: float | None
    unit: MetricUnit
    low: float | None = None
    high: float | None = None
    after_calibration: float | None = None
    """The same after what was measured on this cluster; None where nothing was."""
    note: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class MendRow:
    """A change that makes an infeasible configuration feasible, and what it costs."""

    change: str
    href: str
    compare_href: str
    figures: tuple[Metric, ...]
    """The same ones of every mend."""
    remaining: tuple[str, ...]
    """Targets that it misses all the same."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Fact:
    """A line of where the numbers come from."""

    name: str
    value: str


@dataclass(frozen=True, slots=True, kw_only=True)
class ConfigurationView:
    """One configuration, predicted."""

    kind: Literal["training", "inference"]
    subject: str
    """Model on cluster."""
    heading: str
    """The arithmetic: TP 8 x PP 4 x DP 2 = 64 GPUs."""
    details: str
    verdict: str
    tone: Tone
    feasible: bool
    reasons: tuple[Reason, ...]
    mends: tuple[MendRow, ...]
    metrics: tuple[Metric, ...]
    confidence: float | None
    """Of the metrics' ranges."""
    memory: Stack | None
    """By pipeline stage."""
    shown_stages: int
    num_stages: int
    time: Stack | None
    """Of a step; serving: of a request."""
    provenance: tuple[Fact, ...]
    query_text: str
    href: str


@dataclass(frozen=True, slots=True, kw_only=True)
class ConfigurationPage:
    """One configuration in full; `view` is None where the query cannot be answered, and `error` says why."""

    title: str
    json_href: str
    view: ConfigurationView | None
    schedule: Schedule | None
    bubble_fraction: float | None
    """The bubble's share of the whole step, of which the drawing may show a part."""
    placement: Placement | None
    explorer_href: str | None
    compare_href: str | None
    """With the fastest configuration for the same question; None where this is it, or there is none."""
    error: dict[str, str | None] | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Difference:
    """A field in which two configurations differ."""

    name: str
    first: str
    second: str


@dataclass(frozen=True, slots=True, kw_only=True)
class MetricPair:
    """One figure of both; `change` is second / first - 1."""

    name: str
    unit: MetricUnit
    first: float | None
    second: float | None
    change: float | None
    better: Literal["first", "second", ""]
    measured: bool = False
    """What the row above it, of the same name, predicts."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ComparedRun:
    """A profile run of one of the configurations compared."""

    number: int
    """0-based, in its search."""
    state: str
    tone: Tone
    cause: str | None
    """Why it failed."""
    reduced: bool
    """Its seconds are extrapolated from a run of less than the whole."""
    metrics: tuple[Metric, ...]
    """What was measured, by the names of what is predicted."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ComparePage:
    """Two configurations side by side."""

    title: str
    json_href: str
    views: tuple[ConfigurationView, ...]
    """Two, or none where one cannot be answered."""
    runs: tuple[ComparedRun, ...]
    """Theirs, where two runs of a search are compared."""
    search_href: str | None
    differences: tuple[Difference, ...]
    pairs: tuple[MetricPair, ...]
    memory: Stack | None
    """The fullest stage of each."""
    time: Stack | None
    error: dict[str, str | None] | None
