"""What each page shows, as frozen data: the template renders it, the JSON twin is it."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime
from typing import Any, Literal

from hp_tool.domain.records import SearchState

Tone = Literal["good", "warn", "bad", "busy", ""]


@dataclass(frozen=True, slots=True, kw_only=True)
class SearchRow:
    """A line of the list."""

    short_id: str
    href: str
    state: SearchState
    tone: Tone
    subject: str
    """Model on cluster."""
    best: str | None
    best_step_s: float | None
    profile_runs: int
    budget_runs: int
    gpu_seconds: float
    created_at: datetime


@dataclass(frozen=True, slots=True, kw_only=True)
class SearchesPage:
    """The list of searches, newest first."""

    title: str
    json_href: str
    server: str
    """This service's own address, for the hint on how to start a search."""
    states: tuple[SearchState, ...]
    state: SearchState | None
    """The filter in force."""
    rows: tuple[SearchRow, ...]
    next_href: str | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Best:
    """The best configuration: of those measured so far, and in the end the one recommended, which may be a mere prediction."""

    arithmetic: str
    details: str
    measured: bool
    step_s: float | None
    tokens_per_second_per_gpu: float | None
    peak_memory_bytes: int | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Action:
    """A button that posts."""

    label: str
    href: str
    tone: Literal["primary", "danger", ""]


@dataclass(frozen=True, slots=True, kw_only=True)
class TrialRow:
    """A profile run: predicted before, predicted after calibration, measured. Errors are predicted / measured - 1."""

    run_id: str
    number: int
    arithmetic: str
    details: str
    state: str
    tone: Tone
    chosen: bool
    faded: bool
    """It cannot be chosen: it failed or was abandoned."""
    predicted_step_s: float | None
    calibrated_step_s: float | None
    measured_step_s: float | None
    error_before: float | None
    error_after: float | None
    tokens_per_second_per_gpu: float | None
    peak_memory_bytes: int | None
    cause: str | None
    log_tail: str | None


@dataclass(frozen=True, slots=True, kw_only=True)
class SearchPage:
    """One search."""

    id: str
    title: str
    json_href: str
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
    gpu_seconds: float
    grid_gpu_seconds: float | None
    """What running every feasible configuration would cost."""
    stopped_because: str | None
    trials: tuple[TrialRow, ...]
    worker: str | None
    created_at: datetime
    finished_at: datetime | None
    query_text: str
