"""Port to a store of watched jobs."""

from collections.abc import Collection, Iterator
from typing import Protocol, Unpack

from hp_tool.domain.records import JsonObject, Page, Paging
from hp_tool.domain.watch_records import Change, WatchRecord, WatchSource


class WatchStore(Protocol):
    """Store of watched jobs. Each method is one transaction."""

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
        """Create a watch. A repeated idempotency key returns the first watch.

        Raises:
            ConflictError: The key was used for another job, or the owner has too many watches
                (`too_many`).
        """

    def get_watch(self, *, watch_id: str) -> WatchRecord: ...

    def watch_sources(self, *, watch_id: str) -> Iterator[WatchSource]:
        """Yield the reporting processes by name. They are loaded lazily, because a large job has
        many.
        """

    def list_watches(
        self, *, owner: str | None = None, limit: int = 50, **paging: Unpack[Paging]
    ) -> Page[WatchRecord]:
        """List the watches of one owner or of all, newest first."""

    def change_watch(
        self, *, watch_id: str, source: str, change: Change, max_processes: int | None = None
    ) -> WatchRecord:
        """Lock a watch, and store the result of `change` for the watch and its process `source`.

        Raises:
            ConflictError: The job has too many processes, or its owner already has `max_processes`
                (`too_many`).
        """

    def note_teaching(self, *, watch_id: str, measurement_id: str | None, why: str | None) -> None:
        """Store the id of the measurement made from the job's step time, or the reason why there is
        none.
        """

    def delete_watch(self, *, watch_id: str) -> None:
        """Delete a watch and its processes."""

    def claim_watch_event(self, *, except_of: Collection[str | None] = ()) -> WatchRecord | None:
        """Claim the next due delivery of an event, except those of the owners in `except_of`; None
        if nothing is due.
        """

    def settle_watch_event(self, *, watch: WatchRecord, error: str | None) -> None:
        """Store the outcome of a claimed delivery, unless a newer attempt has begun. `error` is
        None for a success.
        """
