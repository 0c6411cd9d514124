"""Who may do what in the service, what they may use up, and what was done: keys, limits, the audit log."""

from __future__ import annotations

from dataclasses import dataclass, field
from datetime import datetime
from enum import IntEnum

from hp_tool.domain.records import RunState, SearchState
from hp_tool.domain.webhooks import WebhookState

ANY_KEY = None
"""In a limit: it holds for all searches together."""


class Scope(IntEnum):
    """What a key allows; each includes the ones before it."""

    READ = 1
    """Ask for predictions, and look at what is one's own."""
    SUBMIT = 2
    """Spend GPU time: submit and steer searches; report measurements."""
    ADMIN = 3
    """Everything of everybody; keys and the audit log."""


@dataclass(frozen=True, slots=True, kw_only=True)
class NewKey:
    """An API key on its way into the store. The secret itself is nowhere: it is shown once, when the key is made."""

    id: str
    """Public; the first part of the key that its owner sends."""
    owner: str
    """Whose it is. Keys of one owner see the same searches, so a key can be replaced by the next."""
    scope: Scope
    secret_sha256: str = field(repr=False)
    requests_per_second: float | None = None
    """None: the service's default."""
    gpu_seconds_per_day: float | None = None
    """What searches submitted with it may spend in a day (UTC); None: no quota."""


@dataclass(frozen=True, slots=True, kw_only=True)
class KeyRecord(NewKey):
    """A stored API key."""

    created_at: datetime
    expires_at: datetime | None = None
    revoked_at: datetime | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuSecondsLimit:
    """GPU-seconds that profile runs may take in one day (UTC)."""

    per_day: float
    api_key_id: str | None = ANY_KEY
    """Whose searches count; ANY_KEY: everybody's."""
    cluster: str | None = None
    """Only those on this registered cluster; None: wherever."""


@dataclass(frozen=True, slots=True, kw_only=True)
class OpenRunsLimit:
    """Profile runs that may be open at a time, of all searches on a registered cluster."""

    cluster: str
    runs: int


@dataclass(frozen=True, slots=True, kw_only=True)
class AuditRecord:
    """Something that was changed, or refused: who, when, what, and how it ended."""

    id: str
    created_at: datetime
    owner: str | None
    """None: the operator, who needs no stored key."""
    api_key_id: str | None
    action: str
    """Method and route: `POST /v1/searches/{search_id}/cancel`."""
    resource: str
    """The path that was asked for."""
    outcome: str
    """The HTTP status, or `ok` for the command line."""
    request_id: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Usage:
    """The store at a glance."""

    searches: dict[SearchState, int]
    """How many of each state, zeros included."""
    runs: dict[RunState, int]
    gpu_seconds: float
    """Devices x seconds of all profile runs ever."""
    oldest_queued_s: float
    """How long the search that waits longest has been in the queue; 0: none waits."""
    expired_leases: int
    """Running searches that no worker has taken over from one that fell silent."""
    webhooks: dict[WebhookState, int]
    """How many ends of searches are yet to be told, were told, and were given up."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DatabaseState:
    """A database that answers, as it was found."""

    revision: str | None
    """Of its schema; None: there is none of ours."""
    needed_revision: str
    """This version's."""
    clock_offset_s: float
    """The database's clock minus this host's; 0 for SQLite, which runs inside its users."""
    read_only: bool
    overdue_webhooks: int = 0
    """Ends of searches that should have been told OVERDUE_S ago."""
