"""Create, list, label, cancel, pause and resume searches."""

import re
from collections.abc import Collection, Sequence
from typing import Any, Unpack

import sqlalchemy as sa

from hp_tool.domain.digests import json_digest
from hp_tool.domain.records import (
    EventRecord,
    GpuSecondsLimit,
    Head,
    JsonObject,
    Label,
    Page,
    Paging,
    SearchRecord,
)
from hp_tool.domain.states import SearchState
from hp_tool.errors import ConflictError
from hp_tool.store import tables
from hp_tool.store.access import admit, gpu_seconds_budget
from hp_tool.store.base import (
    StoreBase,
    add_event,
    count_open_runs,
    earlier_resource_id,
    first_resource_id,
    gpu_seconds_of,
    locked_search,
    now,
    read_search,
    search_record,
    storable_values,
    update_search,
)
from hp_tool.store.columns import encode, new_id, row_dict
from hp_tool.store.coordination import cluster_of
from hp_tool.store.paging import RowList
from hp_tool.store.webhooks import add_webhook, reset_webhook

SEARCH = tables.searches
NEW_SEARCH = sa.insert(SEARCH)
WORD = tables.search_words
MAX_QUERY_WORDS = 8
"""Maximum number of search words used per query. More words would hardly narrow the result."""
MAX_WORD_LENGTH = 64
"""Maximum number of characters stored per word."""
CLEARED_OUTCOME = {"result": None, "error": None, "stopped_because": None, "finished_at": None}
"""Result columns, cleared when a failed search resumes."""


class Searches(StoreBase):
    """Searches and their events."""

    def create_search(
        self,
        *,
        query: JsonObject,
        owner: str | None = None,
        priority: int = 0,
        paused: bool = False,
        idempotency_key: str | None = None,
        api_key_id: str | None = None,
        limits: Sequence[GpuSecondsLimit] = (),
        webhook: str | None = None,
        request: JsonObject | None = None,
        edition: int | None = None,
    ) -> SearchRecord:
        query = encode(query, field="query")
        with self._writing() as connection:
            at = now(connection)
            new = new_id()
            stored_id = first_resource_id(
                connection,
                scope="searches",
                owner=owner,
                key=idempotency_key,
                fingerprint=_fingerprint(request or query, priority=priority, webhook=webhook),
                resource_id=new,
                at=at,
            )
            if stored_id != new:
                return read_search(connection, stored_id)
            admit(connection, limits, query=query, at=at)
            state = SearchState.PAUSED if paused else SearchState.QUEUED
            values = {
                "id": new,
                "state": state,
                "query": query,
                "edition": edition,
                "owner": owner,
                "api_key_id": api_key_id,
                "cluster": cluster_of(query),
                "kind": _column_text(query.get("kind"), max_length=16),
                "model": _column_text(model_of(query), max_length=200),
                "priority": priority,
                "lease_token": 0,
                "last_event": 0,
                "progress": {},
                "created_at": at,
                "updated_at": at,
            }
            connection.execute(NEW_SEARCH, storable_values(SEARCH, values))
            if webhook is not None:
                add_webhook(connection, search_id=new, url=webhook, at=at)
            add_event(connection, search_id=new, kind="state", payload={"state": state}, at=at)
            return read_search(connection, new)

    def earlier_search(
        self,
        *,
        request: JsonObject,
        idempotency_key: str,
        owner: str | None = None,
        priority: int = 0,
        webhook: str | None = None,
    ) -> SearchRecord | None:
        with self._reading() as connection:
            used_id = earlier_resource_id(
                connection,
                scope="searches",
                owner=owner,
                key=idempotency_key,
                fingerprint=_fingerprint(request, priority=priority, webhook=webhook),
            )
            return None if used_id is None else read_search(connection, used_id)

    def get_search(self, *, search_id: str) -> SearchRecord:
        with self._reading() as connection:
            return read_search(connection, search_id)

    def list_searches(
        self,
        *,
        state: SearchState | None = None,
        owner: str | None = None,
        kind: str | None = None,
        model: str | None = None,
        words: str | None = None,
        limit: int = 50,
        **paging: Unpack[Paging],
    ) -> Page[SearchRecord]:
        query = sa.select(*(column for column in SEARCH.c if column.name != "result"))
        c = SEARCH.c
        unique_words = _unique_words(words or "")[:MAX_QUERY_WORDS]
        for word in unique_words:
            query = query.where(c.id.in_(sa.select(WORD.c.search_id).where(WORD.c.word == word)))
        filters = {c.state: state, c.owner: owner, c.kind: kind, c.model: model}
        listing = RowList(table=SEARCH, filters=filters, paging=paging, words=unique_words)
        with self._reading() as connection:
            return listing.page(connection, query=query, limit=limit, record=search_record)

    def label_search(self, *, search_id: str, label: Label) -> SearchRecord:
        with self._writing() as connection:
            locked_search(connection, search_id)
            stored = encode(label, field="label")
            connection.execute(
                sa.update(SEARCH).where(SEARCH.c.id == search_id).values(label=stored)
            )
            connection.execute(sa.delete(WORD).where(WORD.c.search_id == search_id))
            if words := _unique_words(" ".join([label.name, *label.tags, label.note])):
                connection.execute(
                    sa.insert(WORD), [{"word": word, "search_id": search_id} for word in words]
                )
            return read_search(connection, search_id)

    def request_cancel(self, *, search_id: str) -> SearchRecord:
        with self._writing() as connection:
            row = locked_search(connection, search_id)
            if row.state == SearchState.SUCCEEDED:
                raise ConflictError(f"Search {search_id} has already {row.state}.")
            at = now(connection)
            if row.state == SearchState.FAILED:
                reset_webhook(connection, search_id=search_id, at=at)
            if row.state == SearchState.RUNNING:
                update_search(connection, search_id, at=at, requested="cancel")
            elif row.state != SearchState.CANCELLED and count_open_runs(connection, search_id):
                # The search's jobs may still run, so a coordinator must cancel them.
                update_search(
                    connection,
                    search_id,
                    at=at,
                    requested="cancel",
                    state=SearchState.QUEUED,
                    **CLEARED_OUTCOME,
                )
            elif row.state != SearchState.CANCELLED:
                values = {
                    **CLEARED_OUTCOME,
                    "stopped_because": "cancelled",
                    "finished_at": at,
                    "requested": None,
                }
                update_search(connection, search_id, at=at, state=SearchState.CANCELLED, **values)
            return read_search(connection, search_id)

    def request_pause(self, *, search_id: str) -> SearchRecord:
        with self._writing() as connection:
            row = locked_search(connection, search_id)
            if SearchState(row.state).ended or row.requested == "cancel":
                raise ConflictError(
                    f"Cannot pause search {search_id}: it is {row.requested or row.state}."
                )
            at = now(connection)
            if row.state == SearchState.RUNNING:
                update_search(connection, search_id, at=at, requested="pause")
            elif row.state == SearchState.QUEUED:
                update_search(connection, search_id, at=at, state=SearchState.PAUSED)
            return read_search(connection, search_id)

    def resume_search(
        self, *, search_id: str, limits: Sequence[GpuSecondsLimit] = ()
    ) -> SearchRecord:
        with self._writing() as connection:
            row = locked_search(connection, search_id)
            if SearchState(row.state).final or row.requested == "cancel":
                raise ConflictError(
                    f"Cannot resume search {search_id}: it is {row.requested or row.state}."
                )
            at = now(connection)
            if row.state == SearchState.RUNNING:
                update_search(connection, search_id, at=at, requested=None)
            elif row.state != SearchState.QUEUED:
                # The search's remaining budget is no longer reserved.
                if row.state == SearchState.FAILED:
                    admit(
                        connection,
                        limits,
                        query=row.query,
                        at=at,
                        spent=gpu_seconds_of(connection, search_id),
                    )
                    reset_webhook(connection, search_id=search_id, at=at)
                update_search(
                    connection,
                    search_id,
                    at=at,
                    state=SearchState.QUEUED,
                    requested=None,
                    lost_claims=0,
                    **CLEARED_OUTCOME,
                )
            return read_search(connection, search_id)

    def change_budget(
        self,
        *,
        search_id: str,
        budget_runs: int | None = None,
        budget_gpu_seconds: float | None = None,
        limits: Sequence[GpuSecondsLimit] = (),
    ) -> SearchRecord:
        budgets = {"budget_runs": budget_runs, "budget_gpu_seconds": budget_gpu_seconds}
        changed = {name: value for name, value in budgets.items() if value is not None}
        with self._writing() as connection:
            row = locked_search(connection, search_id)
            if SearchState(row.state).final or row.requested == "cancel":
                raise ConflictError(
                    f"Cannot change the budget of search {search_id}: it is "
                    f"{row.requested or row.state}."
                )
            at = now(connection)
            query = {**row.query, "search": {**(row.query.get("search") or {}), **changed}}
            if gpu_seconds_budget(query) > gpu_seconds_budget(row.query):
                admit(connection, limits, query=query, at=at, spent=gpu_seconds_budget(row.query))
            update_search(connection, search_id, at=at, query=encode(query, field="query"))
            add_event(connection, search_id=search_id, kind="budget", payload=changed, at=at)
            return read_search(connection, search_id)

    def heads(self, search_ids: Collection[str]) -> dict[str, Head]:
        event = tables.events
        last = (
            sa.select(sa.func.max(event.c.seq))
            .where(event.c.search_id == SEARCH.c.id)
            .scalar_subquery()
        )
        with self._reading() as connection:
            rows = connection.execute(
                sa.select(SEARCH.c.id, SEARCH.c.state, last).where(SEARCH.c.id.in_(search_ids))
            ).all()
        return {search_id: Head(SearchState(state), seq or 0) for search_id, state, seq in rows}

    def events(self, *, search_id: str, after: int = 0, limit: int = 200) -> list[EventRecord]:
        table = tables.events
        query = (
            sa.select(table)
            .where(table.c.search_id == search_id, table.c.seq > after)
            .order_by(table.c.seq)
            .limit(limit)
        )
        with self._reading() as connection:
            rows = connection.execute(query).all()
            if not rows:
                read_search(connection, search_id)  # raises NotFoundError for an unknown search
            return [EventRecord(**row_dict(row)) for row in rows]


def _fingerprint(query: JsonObject, **options: int | str | None) -> str:
    set_options = {name: value for name, value in options.items() if value}
    return json_digest([query, set_options] if set_options else query)


def model_of(query: JsonObject) -> str | None:
    """Return the model name in a query; None if the query describes the model in another way."""
    model = query.get("model")
    name = model.get("name") if isinstance(model, dict) else model
    return name if isinstance(name, str) else None


def _unique_words(text: str) -> tuple[str, ...]:
    return tuple(
        dict.fromkeys(word[:MAX_WORD_LENGTH] for word in re.findall(r"\w+", text.casefold()))
    )


def _column_text(value: Any, *, max_length: int) -> str | None:
    return value[:max_length].replace("\0", "") if isinstance(value, str) else None
