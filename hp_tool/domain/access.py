"""Access control of the service: API keys, scopes, the audit log, and the port to their store."""

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from enum import IntEnum
from typing import NotRequired, Protocol, TypedDict, Unpack

from hp_tool.domain.ports import Store, WatchStore
from hp_tool.domain.records import ANY_KEY, JsonObject, Offer, Page, Paging, RunRecord, SearchRecord
from hp_tool.domain.retention import EndedRun, RetainedData
from hp_tool.domain.states import RunState, SearchState
from hp_tool.domain.webhooks import WebhookRecord, WebhookState


class Scope(IntEnum):
    """Permissions of a key; each scope includes the ones before it."""

    READ = 1
    """Predict, and read one's own searches and measurements."""
    SUBMIT = 2
    """Submit and control searches, which uses GPU time; report measurements."""
    ADMIN = 3
    """Access all owners' data, keys and the audit log."""


@dataclass(frozen=True, slots=True, kw_only=True)
class NewKey:
    """An API key to store. The secret is shown to the user once; only its hash is stored."""

    id: str
    """Public first part of the key."""
    owner: str
    """User or team; all keys of an owner give access to the same searches."""
    scope: Scope
    secret_sha256: str = field(repr=False)
    requests_per_second: float | None = None
    """Rate limit; None for the service's default."""
    gpu_seconds_per_day: float | None = None
    """Quota per day (UTC) for searches submitted with the key; None for no quota."""


@dataclass(frozen=True, slots=True, kw_only=True)
class KeyRecord(NewKey):
    """A stored API key."""

    created_at: datetime
    expires_at: datetime | None = None
    revoked_at: datetime | None = None


class NewAudit(TypedDict):
    """Fields of an AuditRecord that the caller sets."""

    owner: str | None
    api_key_id: str | None
    action: str
    resource: str
    outcome: str
    request_id: NotRequired[str]


@dataclass(frozen=True, slots=True, kw_only=True)
class AuditRecord:
    """Audit log entry for a change or a rejected request."""

    id: str
    created_at: datetime
    owner: str | None
    """None for the operator, who has no stored key."""
    api_key_id: str | None
    action: str
    """Method and route: `POST /v1/searches/{search_id}/cancel`."""
    resource: str
    """Requested path, or the path of the created resource."""
    outcome: str
    """HTTP status, or `ok` for the command line."""
    request_id: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Usage:
    """Searches, runs, webhooks and GPU time over the whole store."""

    searches: dict[SearchState, int]
    """Number of searches by state, including states with 0."""
    runs: dict[RunState, int]
    gpu_seconds: float
    """GPU-seconds (devices x seconds) of all profile runs."""
    oldest_queued_s: float
    """Age of the oldest queued search; 0 if the queue is empty."""
    expired_leases: int
    """Number of running searches whose lease has expired and that no worker has claimed."""
    webhooks: dict[WebhookState, int]
    """Webhooks by delivery state."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DatabaseState:
    """State of a reachable database."""

    revision: str | None
    """Schema revision; None if the database has no hp_tool schema."""
    needed_revision: str
    """Schema revision that this version requires."""
    clock_offset_s: float
    """Database clock minus this host's; 0 for SQLite, which has no clock of its own."""
    read_only: bool
    free_bytes: int | None = None
    """Free disk space in bytes for a SQLite file; None for a server."""
    overdue_webhooks: int = 0
    """Number of webhook deliveries that are overdue by more than OVERDUE_S."""


class AccessStore(Store, WatchStore, Protocol):
    """Store methods that only a service needs. Each method is one transaction."""

    def add_key(self, *, key: NewKey, lifetime_s: float | None = None) -> KeyRecord:
        """Store a key that expires after `lifetime_s` seconds by the database's clock; None:
        never.
        """

    def get_key(self, *, key_id: str) -> KeyRecord: ...

    def list_keys(self, *, limit: int = 50, **paging: Unpack[Paging]) -> Page[KeyRecord]:
        """List keys, newest first, including revoked and expired ones."""

    def revoke_key(self, *, key_id: str) -> KeyRecord:
        """Revoke a key permanently. Revoking it again does not change the revocation time."""

    def gpu_seconds_today(self, *, api_key_id: str | None = ANY_KEY) -> float:
        """Return the GPU-seconds used since midnight UTC plus those reserved by open searches."""

    def add_audit(self, **entry: Unpack[NewAudit]) -> None: ...

    def audit(
        self, *, owner: str | None = None, limit: int = 50, **paging: Unpack[Paging]
    ) -> Page[AuditRecord]:
        """List audit records, newest first."""

    def prune(self, *, older_than_days: float, dry_run: bool = False) -> dict[str, int]:
        """Delete details older than a given age, in small transactions. Return the number of
        deleted rows by kind.

        Deletes events of ended searches, audit records, idempotency keys, log tails of failed runs,
        and measurements in state `deleted`. Keeps searches, runs, other measurements and
        calibrations. With `dry_run`, only counts the rows.
        """

    def prune_measurements(self, *, older_than_days: float, dry_run: bool = False) -> int:
        """Delete measurements older than a given age, in any state. Return the number deleted."""

    def prune_watches(self, *, older_than_days: float, dry_run: bool = False) -> int:
        """Delete watches whose last report is older than a given age. Return the number deleted."""

    def old_searches(
        self, *, older_than_days: float | None = None, keep: int | None = None
    ) -> list[str]:
        """Return the ids of ended searches that are older than a given age or not among the `keep`
        newest.

        Excludes searches that ended less than a day ago or have an open run.
        """

    def delete_searches(self, *, search_ids: Sequence[str]) -> int:
        """Delete ended searches with their runs and events, in small transactions. Return the
        number deleted.

        The measurements of these searches are kept.
        """

    def ended_runs(self, *, job_names: Collection[str]) -> dict[str, EndedRun]:
        """Return the ended runs with these job names, if their searches have ended too."""

    def retained_data(self) -> RetainedData:
        """Return the number of ended searches in the database, and the size of the database."""

    def announce_worker(self, *, holder: str, offers: Sequence[Offer]) -> None:
        """Store a worker's heartbeat and the devices that it offers. Workers call this every few
        seconds.
        """

    def retire_worker(self, *, holder: str) -> None:
        """Delete a worker's record."""

    def claim_webhook(
        self, *, except_of: Collection[str | None] = ()
    ) -> tuple[WebhookRecord, SearchRecord] | None:
        """Claim the next due webhook delivery for an ended search, except deliveries of the owners
        in `except_of`.

        No two callers get the same attempt. If an attempt is never settled, another attempt becomes
        due. Returns None if nothing is due.
        """

    def settle_webhook(self, *, webhook: WebhookRecord, error: str | None) -> None:
        """Store the outcome of a claimed delivery, unless a newer attempt has begun. `error` is
        None for a success.
        """

    def engines_in_use(self) -> dict[str, JsonObject]:
        """Return one query per cluster that has runs which are open or ended in the last day."""

    def stray_runs(self, *, cluster: str, job_names: Collection[str]) -> list[RunRecord]:
        """Return runs without a live search whose jobs may have used more GPU time than is
        recorded.

        Includes runs with these job names that ended or whose search ended, open runs of ended
        searches on the cluster, and runs on the cluster that ended in the last day without a
        recorded time.
        """

    def book_stray(self, *, run_id: str, gpu_seconds: float) -> None:
        """Record the cost of a stray run's job if it exceeds the recorded cost.

        An open run of an ended search is abandoned. If the search was resumed, its run does not
        change.
        """

    def usage(self) -> Usage:
        """Return the numbers of searches and webhooks by state, GPU-seconds, and the age of the
        queue.
        """

    def state(self) -> DatabaseState:
        """Return the schema revision, clock offset and free space of the database.

        Raises:
            StoreError: The database cannot be reached.
        """
