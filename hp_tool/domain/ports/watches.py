"""Port to a store of watched jobs."""

from collections.abc import Collection, Iterator
from typing import Protocol, Unpack

from hp_tool.domain.records import JsonObject, Page, Paging
from hp_tool.domain.watch_records import Change, WatchRecord, WatchSource


class WatchStore(Protocol):
    """Watched jobs; each method is one transaction."""

    def create_watch(
        self,
        *,
        name: str,
        query: JsonObject | None,
        expected: JsonObject | None,
        webhook: str | None = None,
        owner: str | None = None,
        idempotency_key: str | None = None,
    ) -> WatchRecord:
        """Create a watch; a repeated idempotency key returns the first one.

        Raises:
            ConflictError: The key was used for another job, or the owner has too many (`too_many`).
        """

    def get_watch(self, *, watch_id: str) -> WatchRecord: ...

    def watch_sources(self, *, watch_id: str) -> Iterator[WatchSource]:
        """Yield the reporting processes by name, lazily because a large job has many."""

    def list_watches(
        self, *, owner: str | None = None, limit: int = 50, **paging: Unpack[Paging]
    ) -> Page[WatchRecord]:
        """List watches, newest first, of one owner or all."""

    def change_watch(
        self, *, watch_id: str, source: str, change: Change, max_processes: int | None = None
    ) -> WatchRecord:
        """Lock a watch and store the result of `change` for it and for the process `source`.

        Raises:
            ConflictError: The job or its owner (`max_processes`) has too many processes
                (`too_many`).
        """

    def note_teaching(self, *, watch_id: str, measurement_id: str | None, why: str | None) -> None:
        """Store the id of the measurement made from the job's step time, or why there is none."""

    def delete_watch(self, *, watch_id: str) -> None:
        """Delete a watch and its processes."""

    def claim_watch_event(self, *, except_of: Collection[str | None] = ()) -> WatchRecord | None:
        """Claim the next due delivery of an event, except those of some owners, or None."""

    def settle_watch_event(self, *, watch: WatchRecord, error: str | None) -> None:
        """Store the outcome of a claimed delivery (error None: success), unless a newer attempt has
        begun.
        """
