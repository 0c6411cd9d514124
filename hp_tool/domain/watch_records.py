"""A watched job, as stored."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from datetime import datetime

from hp_tool.domain.records import JsonObject
from hp_tool.domain.webhooks import WebhookState


@dataclass(frozen=True, slots=True, kw_only=True)
class WatchRecord:
    """A stored watched job: the expected step time, the detector's state, and its webhook."""

    id: str
    name: str
    owner: str | None
    query: JsonObject | None
    """Query with the job's configuration; None: the job is compared only with its own past."""
    expected: JsonObject | None
    state: JsonObject | None
    """State of the detector; None before the first step."""
    status: str
    measurement_id: str | None = None
    """Id of the measurement stored from the job's steady pace."""
    teaching: str | None = None
    """Reason why no measurement was stored."""
    webhook: str | None = field(default=None, repr=False)
    """URL of the webhook. It may contain a secret of the receiver and is not logged."""
    webhook_state: WebhookState | None = None
    """Delivery state of the newest event; None without an event or webhook."""
    event: int = 0
    """Number of the newest event. It replaces any earlier event that was not delivered."""
    message: JsonObject | None = None
    """Message of the newest event."""
    attempts: int = 0
    next_attempt_at: datetime | None = None
    last_error: str | None = None
    created_at: datetime
    updated_at: datetime


@dataclass(frozen=True, slots=True, kw_only=True)
class WatchSource:
    """One process of a watched job, as stored."""

    source: str
    state: JsonObject


@dataclass(frozen=True, slots=True, kw_only=True)
class WatchChange:
    """Result of applying new steps to a job."""

    state: JsonObject | None
    """New state of the detector; None if unchanged."""
    source: JsonObject
    """State of the process that reported."""
    status: str
    message: JsonObject | None = None
    """Message of an event to deliver; None if there is none."""


Change = Callable[
    [WatchRecord, JsonObject | None, Callable[[], Iterable[WatchSource]]], WatchChange
]
"""Function that applies new steps. Its arguments are the locked job, the state of the reporting
process (None if new), and a function that returns the earlier states of all processes.
"""
