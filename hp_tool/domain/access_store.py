"""The port through which a service keeps its keys and its audit log: a store that can do that too."""

from __future__ import annotations

from collections.abc import Collection
from typing import Protocol, Unpack

from hp_tool.domain.access import ANY_KEY, AuditRecord, DatabaseState, KeyRecord, NewKey, Usage
from hp_tool.domain.ports import Store
from hp_tool.domain.records import JsonObject, Page, Paging, RunRecord, SearchRecord
from hp_tool.domain.webhooks import WebhookRecord


class AccessStore(Store, Protocol):
    """The store with what only a service needs. Each method is one transaction, as all of a Store's."""

    def add_key(self, *, key: NewKey, lifetime_s: float | None = None) -> KeyRecord:
        """Store a new key, which expires `lifetime_s` from now by the database's clock; None: never."""

    def get_key(self, *, key_id: str) -> KeyRecord: ...

    def list_keys(self, *, limit: int = 50, **paging: Unpack[Paging]) -> Page[KeyRecord]:
        """Newest first, revoked and expired ones too."""

    def revoke_key(self, *, key_id: str) -> KeyRecord:
        """Make it worthless for ever; revoking twice is harmless and keeps the first instant."""

    def gpu_seconds_today(self, *, api_key_id: str | None = ANY_KEY) -> float:
        """What ended runs took since midnight UTC, and what searches that have not ended may still take."""

    def add_audit(
        self,
        *,
        owner: str | None,
        api_key_id: str | None,
        action: str,
        resource: str,
        outcome: str,
        request_id: str | None = None,
    ) -> None: ...

    def audit(self, *, owner: str | None = None, limit: int = 50, **paging: Unpack[Paging]) -> Page[AuditRecord]:
        """Newest first."""

    def prune(self, *, older_than_days: float) -> dict[str, int]:
        """Forget what is older, in small steps: events of ended searches, audit rows, idempotency keys, ends of logs of failed
        runs. Searches, runs, measurements and calibrations stay. How many of each.
        """

    def claim_webhook(self) -> tuple[WebhookRecord, SearchRecord] | None:
        """Begin the next attempt that is due to tell of a search's end, and put off the one after; None: nothing is due.

        Two callers never get the same attempt. One that is not settled is followed by the next.
        """

    def settle_webhook(self, *, webhook: WebhookRecord, error: str | None) -> None:
        """What came of a claimed attempt; None: it was taken. Nothing, where a later attempt has begun."""

    def engines_in_use(self) -> dict[str, JsonObject]:
        """A query for each cluster (as `SearchRecord.cluster` names it) that has open runs or had some in the last day."""

    def stray_runs(self, *, cluster: str, job_names: Collection[str]) -> list[RunRecord]:
        """Runs whose jobs no live search owns: of these names those that ended, or whose search did; and those that were
        abandoned on the cluster in the last day, which may have cost more than was known."""

    def book_stray(self, *, run_id: str, gpu_seconds: float) -> None:
        """What the job of a stray run took by its own account, where that is more than was booked. An open run of an ended
        search is abandoned; one whose search was taken up again stays as it is."""

    def usage(self) -> Usage:
        """Searches and runs by state, GPU-seconds, and how long the queue is."""

    def state(self) -> DatabaseState:
        """Schema, clock, and whether writing works; StoreError where the database does not answer."""
