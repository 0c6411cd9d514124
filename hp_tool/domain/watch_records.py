"""A watched job as it is stored."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from datetime import datetime

from hp_tool.domain.records import JsonObject
from hp_tool.domain.webhooks import WebhookState


@dataclass(frozen=True, slots=True, kw_only=True)
class WatchRecord:
    """A watched job: what is expected of it, what its detector remembers, and its webhook."""

    id: str
    name: str
    owner: str | None
    query: JsonObject | None
    """Of its one configuration; None: nothing is expected of it, and it is held against itself
    alone.
    """
    expected: JsonObject | None
    state: JsonObject | None
    """Everything that its detector remembers; None before its first step."""
    status: str
    measurement_id: str | None = None
    """What its steady pace taught the calibration."""
    teaching: str | None = None
    """Why it taught nothing."""
    webhook: str | None = field(default=None, repr=False)
    """May hold a token of the receiver's, so it stays out of logs."""
    webhook_state: WebhookState | None = None
    """Of the newest event; None: there was none, or nobody to tell."""
    event: int = 0
    """Number of the newest event; one that comes before the last was delivered takes its place."""
    message: JsonObject | None = None
    """What the newest event tells."""
    attempts: int = 0
    next_attempt_at: datetime | None = None
    last_error: str | None = None
    created_at: datetime
    updated_at: datetime


@dataclass(frozen=True, slots=True, kw_only=True)
class WatchSource:
    """One process of a watched job as it is stored."""

    source: str
    state: JsonObject


@dataclass(frozen=True, slots=True, kw_only=True)
class WatchChange:
    """What new steps make of a job."""

    state: JsonObject | None
    """None: as it was."""
    source: JsonObject
    """State of the process that reported."""
    status: str
    message: JsonObject | None = None
    """An event to tell."""


Change = Callable[
    [WatchRecord, JsonObject | None, Callable[[], Iterable[WatchSource]]], WatchChange
]
"""From a locked job, the state of the process that reports (None: it is new) and, where they are
needed, the states of all processes as they were before, to what new steps make of them.
"""
