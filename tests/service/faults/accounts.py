"""What the store says of its searches, held against its own runs and against what their owners were
told.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from datetime import UTC, datetime, time
from typing import Any

from hp_tool.domain.access import AccessStore
from hp_tool.domain.records import SearchRecord
from tests.promises.audit import events_are_in_order
from tests.service.faults.receiver import Message


def searches(store: AccessStore) -> Iterator[SearchRecord]:
    """All of them, with their results."""
    cursor = None
    while True:
        page = store.list_searches(limit=100, cursor=cursor)
        yield from (store.get_search(search_id=each.id) for each in page.items)
        if (cursor := page.next_cursor) is None:
            return


def wrong_sums(store: AccessStore) -> Iterator[str]:
    """Sums of GPU-seconds that are not those of the runs: on a search's page, in its result, in
    metrics and in quotas.
    """
    total = today = 0.0
    for search in searches(store):
        runs = store.runs(search_id=search.id)
        spent = sum(run.gpu_seconds or 0.0 for run in runs)
        result = (search.result or {"search": {"gpu_seconds": spent}})["search"]["gpu_seconds"]
        for place, shown in {
            "page": search.progress.get("gpu_seconds", 0.0),
            "result": result,
        }.items():
            if abs(shown - spent) > 1e-6:
                yield (
                    f"search {search.id} shows {shown} GPU-seconds in its {place}; its runs took "
                    f"{spent}"
                )
        midnight = datetime.combine(datetime.now(UTC), time(), UTC)
        today += sum(
            run.gpu_seconds or 0.0
            for run in runs
            if run.finished_at is not None and run.finished_at >= midnight
        )
        total += spent
    for place, shown, spent in (
        ("the metrics", store.usage().gpu_seconds, total),
        ("today's quota", store.gpu_seconds_today(), today),
    ):
        if abs(shown - spent) > 1e-6:
            yield f"{place}: {shown} GPU-seconds; all runs took {spent}"


def wrong_order(store: AccessStore) -> Iterator[str]:
    """Breaches of the promise that events are in order, and last states that are not their
    searches'.
    """
    world: Any = _World(store)
    yield from events_are_in_order(world)
    for search in world.searches():
        states = [
            event.payload.get("state") for event in world.events(search.id) if event.kind == "state"
        ]
        if [each for each in states if each][-1:] != [search.state]:
            yield f"search {search.id} is {search.state}; its events end with {states[-1:]}"


def untold(
    store: AccessStore, *, accepted: Collection[str], told: Sequence[Message]
) -> Iterator[str]:
    """Searches whose end the receiver does not know as it was; the same message may arrive
    again.
    """
    for search in searches(store):
        heard = {message for message in told if message.search_id == search.id}
        if search.id in accepted and [message.state for message in heard] != [search.state]:
            yield f"search {search.id} is {search.state}; its receiver was told {sorted(heard)}"


class _World:
    """A store as the audit of simulated histories reads it."""

    def __init__(self, store: AccessStore) -> None:
        self._store = store

    def searches(self) -> list[SearchRecord]:
        return list(searches(self._store))

    def events(self, search_id: str) -> list[Any]:
        return self._store.events(search_id=search_id, limit=10_000)
