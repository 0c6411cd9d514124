"""The port of a store that keeps watched jobs."""

from collections.abc import Collection, Iterator
from typing import Protocol, Unpack

from hp_tool.domain.records import JsonObject, Page, Paging
from hp_tool.domain.watch_records import Change, WatchRecord, WatchSource


class WatchStore(Protocol):
    """Watched jobs. Each method is one transaction."""

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
        """Begin to watch a job; an idempotency key that came before answers what it made then.

        Raises ConflictError where the key came with another job, and `too_many` above what an owner
        may have.
        """

    def get_watch(self, *, watch_id: str) -> WatchRecord: ...

    def watch_sources(self, *, watch_id: str) -> Iterator[WatchSource]:
        """Processes that reported, by name, read as they are asked for: those of a large job fill
        memory.
        """

    def list_watches(
        self, *, owner: str | None = None, limit: int = 50, **paging: Unpack[Paging]
    ) -> Page[WatchRecord]:
        """Newest first; of one owner, or all."""

    def change_watch(
        self, *, watch_id: str, source: str, change: Change, max_processes: int | None = None
    ) -> WatchRecord:
        """Lock the job, and store what `change` makes of it and of the process `source`; two
        callers take turns.

        Raises ConflictError `too_many` for one process more than a job may have, or all jobs of its
        owner (`max_processes`).
        """

    def note_teaching(self, *, watch_id: str, measurement_id: str | None, why: str | None) -> None:
        """Store what the job's pace taught, or why nothing."""

    def delete_watch(self, *, watch_id: str) -> None:
        """Forget the job and its processes."""

    def claim_watch_event(self, *, except_of: Collection[str | None] = ()) -> WatchRecord | None:
        """Begin the next attempt that is due to tell of an event, of all owners but these, and put
        off the one after.
        """

    def settle_watch_event(self, *, watch: WatchRecord, error: str | None) -> None:
        """What came of a claimed attempt; None: it was taken. Nothing, where a later event or
        attempt has begun.
        """
