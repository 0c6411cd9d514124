"""What the searches' pages show, as frozen data: the template renders it, the JSON twin is it."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import date, datetime
from typing import Any, Literal

from hp_tool.domain.query import Kind
from hp_tool.domain.records import SearchState

Tone = Literal["good", "warn", "bad", "busy", ""]
AxisValue = int | str | bool


@dataclass(frozen=True, slots=True, kw_only=True)
class SearchRow:
    """A line of the list."""

    short_id: str
    href: str
    state: SearchState
    tone: Tone
    kind: Kind
    subject: str
    """Model on cluster."""
    model: str | None
    owner: str | None
    best: str | None
    best_step_s: float | None
    """Of a way to serve: of a request, see `Quantity`."""
    profile_runs: int
    budget_runs: int
    gpu_seconds: float
    saved_gpu_seconds: float | None
    """What running every feasible configuration would have cost, less what the search did; None until it has ended."""
    created_at: datetime


@dataclass(frozen=True, slots=True, kw_only=True)
class SearchFilters:
    """What the list is narrowed to; every one given must hold."""

    state: SearchState | None
    kind: Kind | None
    model: str | None
    """As the query names it, whole: a part of a name would be looked for in every search there is."""
    owner: str | None
    """Whose; for those who may see others' searches."""
    since: date | None
    """Created on this day (UTC) or later."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SearchesPage:
    """The list of searches, newest first."""

    title: str
    json_href: str
    server: str
    """This service's own address, for the hint on how to start a search."""
    states: tuple[SearchState, ...]
    kinds: tuple[Kind, ...]
    filters: SearchFilters
    """Those in force."""
    filtered: bool
    """Something is asked for."""
    sees_others: bool
    """Searches of several owners may be among them."""
    gpu_seconds: float
    """Spent by the searches of this page."""
    saved_gpu_seconds: float
    """By those of them that have ended."""
    live: bool
    """Something on it may still change."""
    rows: tuple[SearchRow, ...]
    next_href: str | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Quantity:
    """What a search's runs are compared by: seconds of one thing, and a rate."""

    seconds: str
    """Step time; of a way to serve, the latency of a request under the whole load."""
    charged: bool
    """Missed targets are charged for on top of it: what a search for a way to serve minimises where it has targets."""
    rate: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Latency:
    """One latency of a way to serve."""

    name: str
    measured_s: float | None
    predicted_s: float | None
    """By the cost model alone."""
    target_s: float | None
    """At most; None where the query gives none."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Best:
    """The best configuration: of those measured so far, and in the end the one recommended, which may be a mere prediction."""

    arithmetic: str
    details: str
    measured: bool
    step_s: float | None
    """Measured, or predicted where it is not."""
    tokens_per_second_per_gpu: float | None
    peak_memory_bytes: int | None = None
    predicted_step_s: float | None = None
    """By the cost model alone."""
    calibrated_step_s: float | None = None
    """By the cost model and what was measured."""
    predicted_memory_bytes: float | None = None
    latencies: tuple[Latency, ...] = ()
    """Of a way to serve, under the whole load."""
    predicted_tokens_per_second_per_gpu: float | None = None
    """Of a way to serve."""
    misses: tuple[str, ...] = ()
    """Targets that it was seen to miss."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Action:
    """A button that posts."""

    label: str
    href: str
    tone: Literal["primary", "danger", ""] = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class SearchPage:
    """One search. Its trials, which may be many, stand in a document of their own."""

    id: str
    kind: Kind
    title: str
    json_href: str
    quantity: Quantity
    trials_href: str
    """The trials, see `TrialTable`."""
    logs_href: str
    """Followed by a run's id: the end of its log."""
    export_href: str | None
    """Followed by ?format=: the best configuration in another tool's words; None while there is none."""
    export_formats: tuple[str, ...]
    events_href: str | None
    """Where changes are announced; None once nothing changes any more."""
    state: SearchState
    tone: Tone
    ended: bool
    requested: str | None
    actions: tuple[Action, ...]
    error: dict[str, Any] | None
    best: Best | None
    profile_runs: int
    budget_runs: int
    seconds_left: float | None
    """At most, at the pace so far, until a budget is used up."""
    gpu_seconds: float
    grid_gpu_seconds: float | None
    """What running every feasible configuration would cost."""
    expected_gain_fraction: float | None
    """What another run is expected to win."""
    waiting_for: str | None
    """What keeps its runs from starting: the trouble with their folder."""
    stopped_because: str | None
    worker: str | None
    created_at: datetime
    finished_at: datetime | None
    query_text: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Axis:
    """One thing on which the trials differ."""

    name: str
    """The field of `parallel`."""
    label: str
    values: tuple[AxisValue, ...]
    """By trial."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ServingColumns:
    """What the trials of a way to serve say of requests under the whole load, by trial; absent figures are None."""

    targets: dict[str, float]
    """Seconds at most, by the name of the latency: ttft_s, tpot_s, request_latency_s."""
    ttft_s: tuple[float | None, ...]
    """Measured, as are the others that are not called predicted."""
    tpot_s: tuple[float | None, ...]
    request_latency_s: tuple[float | None, ...]
    misses: tuple[tuple[str, ...], ...]
    """Targets that it was seen to miss, in words."""
    predicted_ttft_s: tuple[float | None, ...]
    """By the cost model alone, as the others that are called predicted."""
    predicted_tpot_s: tuple[float | None, ...]
    predicted_tokens_per_second_per_gpu: tuple[float | None, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class TrialTable:
    """A search's profile runs, column by column: the n-th of each column is the n-th trial.

    Small to send, quick to filter and to draw. Absent figures are None.
    """

    quantity: Quantity
    axes: tuple[Axis, ...]
    tones: dict[str, Tone]
    """Of each state."""
    best: int | None
    """Index of the best configuration's trial."""
    run_id: tuple[str, ...]
    number: tuple[int, ...]
    arithmetic: tuple[str, ...]
    details: tuple[str, ...]
    state: tuple[str, ...]
    cause: tuple[str | None, ...]
    predicted_step_s: tuple[float | None, ...]
    """By the cost model alone; seconds of `quantity`, as all that are called step."""
    calibrated_step_s: tuple[float | None, ...]
    """By all that was known when the run was chosen, where that was kept; otherwise by all that the search learnt."""
    calibrated_low_s: tuple[float | None, ...]
    calibrated_high_s: tuple[float | None, ...]
    measured_step_s: tuple[float | None, ...]
    reduced: tuple[bool, ...]
    """Measured on less than the whole, and extrapolated."""
    tokens_per_second_per_gpu: tuple[float | None, ...]
    peak_memory_bytes: tuple[int | None, ...]
    predicted_memory_bytes: tuple[float | None, ...]
    serving: ServingColumns | None = None
    """None for a training."""
    logs: dict[str, str] | None = None
    """Ends of logs by run, where the table stands alone in a file; None where they can be asked for."""
