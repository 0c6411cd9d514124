"""Who may do what in the service, and what was done: keys, the audit log, and the port of a store
that keeps them.
"""

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from enum import IntEnum
from typing import NotRequired, Protocol, TypedDict, Unpack

from hp_tool.domain.ports import Store, WatchStore
from hp_tool.domain.records import (
    ANY_KEY,
    JsonObject,
    Offer,
    Page,
    Paging,
    RunRecord,
    RunState,
    SearchRecord,
    SearchState,
)
from hp_tool.domain.retention import EndedRun, Kept
from hp_tool.domain.webhooks import WebhookRecord, WebhookState


class Scope(IntEnum):
    """What a key allows; each scope includes those before it."""

    READ = 1
    """Predict, and read one's own searches and measurements."""
    SUBMIT = 2
    """Spend GPU time: submit and control searches; report measurements."""
    ADMIN = 3
    """Everything of all owners; keys and the audit log."""


@dataclass(frozen=True, slots=True, kw_only=True)
class NewKey:
    """An API key on its way into the store. Its secret is not stored; it is shown once, when the
    key is made.
    """

    id: str
    """Public; the first part of the key that its owner sends."""
    owner: str
    """Keys of one owner see the same searches, so a key can be replaced."""
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


class NewAudit(TypedDict):
    """The fields of an AuditRecord that its writer knows."""

    owner: str | None
    api_key_id: str | None
    action: str
    resource: str
    outcome: str
    request_id: NotRequired[str]


@dataclass(frozen=True, slots=True, kw_only=True)
class AuditRecord:
    """A change or a refusal: who, when, what, and its outcome."""

    id: str
    created_at: datetime
    owner: str | None
    """None: the operator, who needs no stored key."""
    api_key_id: str | None
    action: str
    """Method and route: `POST /v1/searches/{search_id}/cancel`."""
    resource: str
    """The path that was asked for, or of what the request made."""
    outcome: str
    """The HTTP status, or `ok` for the command line."""
    request_id: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Usage:
    """Counts of a whole store."""

    searches: dict[SearchState, int]
    """How many of each state, zeros included."""
    runs: dict[RunState, int]
    gpu_seconds: float
    """Devices x seconds of all profile runs ever."""
    oldest_queued_s: float
    """Age of the oldest queued search; 0: the queue is empty."""
    expired_leases: int
    """Running searches that no worker has taken over from one that fell silent."""
    webhooks: dict[WebhookState, int]
    """Webhooks by state of their delivery."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DatabaseState:
    """Schema, clock and access of a reachable database."""

    revision: str | None
    """Of its schema; None: it has no schema of hp_tool."""
    needed_revision: str
    """This version's."""
    clock_offset_s: float
    """The database's clock minus this host's; 0 for SQLite, which runs inside its users."""
    read_only: bool
    free_bytes: int | None = None
    """Room on the disk of a SQLite file; None: a server's own matter."""
    overdue_webhooks: int = 0
    """Deliveries that should have been made OVERDUE_S ago."""


class AccessStore(Store, WatchStore, Protocol):
    """The store with what only a service needs. Each method is one transaction, as all of a
    Store's.
    """

    def add_key(self, *, key: NewKey, lifetime_s: float | None = None) -> KeyRecord:
        """Store a new key, which expires `lifetime_s` from now by the database's clock; None:
        never.
        """

    def get_key(self, *, key_id: str) -> KeyRecord: ...

    def list_keys(self, *, limit: int = 50, **paging: Unpack[Paging]) -> Page[KeyRecord]:
        """Newest first, revoked and expired ones too."""

    def revoke_key(self, *, key_id: str) -> KeyRecord:
        """Revoke it for good; revoking twice keeps the first instant."""

    def gpu_seconds_today(self, *, api_key_id: str | None = ANY_KEY) -> float:
        """What ended runs took since midnight UTC, and what searches that have not ended may still
        take.
        """

    def add_audit(self, **entry: Unpack[NewAudit]) -> None: ...

    def audit(
        self, *, owner: str | None = None, limit: int = 50, **paging: Unpack[Paging]
    ) -> Page[AuditRecord]:
        """Newest first."""

    def prune(self, *, older_than_days: float, dry_run: bool = False) -> dict[str, int]:
        """Forget what is older, in small steps: events of ended searches, audit rows, idempotency
        keys, ends of logs of failed runs, deleted measurements. Searches, runs, other measurements
        and calibrations stay. How many of each; `dry_run`: only count them.
        """

    def prune_measurements(self, *, older_than_days: float, dry_run: bool = False) -> int:
        """Delete measurements of whatever state that are older; their number."""

    def prune_watches(self, *, older_than_days: float, dry_run: bool = False) -> int:
        """Forget watched jobs that reported, or were begun, longer ago; their number."""

    def old_searches(
        self, *, older_than_days: float | None = None, keep: int | None = None
    ) -> list[str]:
        """Ids of searches that ended longer ago, or that are not among the `keep` that ended last;
        none that ended within a day, or has an open run.
        """

    def delete_searches(self, *, search_ids: Sequence[str]) -> int:
        """Delete those of them that have ended, with their runs and events, in small steps; their
        number. Measurements stay, without their search.
        """

    def ended_runs(self, *, job_names: Collection[str]) -> dict[str, EndedRun]:
        """Return the runs of these names that ended, of searches that have too."""

    def kept(self) -> Kept:
        """Ended searches and the size of the database."""

    def announce_worker(self, *, holder: str, offers: Sequence[Offer]) -> None:
        """Say that this worker is alive and what it can run; said anew every few seconds."""

    def retire_worker(self, *, holder: str) -> None:
        """Take leave."""

    def claim_webhook(
        self, *, except_of: Collection[str | None] = ()
    ) -> tuple[WebhookRecord, SearchRecord] | None:
        """Begin the next attempt that is due to tell of a search's end, of all owners but these,
        and put off the one after; None: nothing is due.

        Two callers never get the same attempt. One that is not settled is followed by the next.
        """

    def settle_webhook(self, *, webhook: WebhookRecord, error: str | None) -> None:
        """What came of a claimed attempt; None: it was taken. Nothing, where a later attempt has
        begun.
        """

    def engines_in_use(self) -> dict[str, JsonObject]:
        """A query for each cluster (as `SearchRecord.cluster` names it) that has open runs or had
        some in the last day.
        """

    def stray_runs(self, *, cluster: str, job_names: Collection[str]) -> list[RunRecord]:
        """Runs whose jobs no live search owns: of these names those that ended, or whose search
        did; and on the cluster those that an ended search left open, and of the last day those that
        were abandoned, or failed without a word of the time they took: they may have cost more than
        was known.
        """

    def book_stray(self, *, run_id: str, gpu_seconds: float) -> None:
        """What the job of a stray run took by its own account, where that is more than was booked.
        An open run of an ended search is abandoned; one whose search was taken up again stays as it
        is.
        """

    def usage(self) -> Usage:
        """Searches and runs by state, GPU-seconds, and how long the queue is."""

    def state(self) -> DatabaseState:
        """Schema, clock, and whether writing works; StoreError where the database does not
        answer.
        """
