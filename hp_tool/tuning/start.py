"""`tune`: a search in this process, new or from where it stands."""

from __future__ import annotations

import os
import socket
import time
from typing import TYPE_CHECKING

from hp_tool.domain.ports import Launcher, Store
from hp_tool.domain.query import Query
from hp_tool.domain.records import Lease, SearchState
from hp_tool.errors import ConflictError, NotFoundError
from hp_tool.queries.schema import parse, parse_query, to_dict
from hp_tool.training.problem import self_contained
from hp_tool.tuning.clusters import daily_limits, within_limits
from hp_tool.tuning.heartbeat import LEASE_S
from hp_tool.tuning.result import TuneResult
from hp_tool.tuning.run import OnEvent, resolve_search, run_search

if TYPE_CHECKING:
    from optuna.storages import BaseStorage


def tune(
    *,
    query: Query | None = None,
    store: Store,
    launcher: Launcher | None = None,
    storage: BaseStorage | None = None,
    search_id: str | None = None,
    holder: str | None = None,
    patience_s: float = LEASE_S + 2.0,
    on_event: OnEvent = lambda kind, payload: None,
) -> TuneResult:
    """Search in this process: a new search for `query`, or the one called `search_id` from where it stands.

    A search that already succeeded is answered as it was. One that a process which died had held is free once its
    lease expired: that is waited for, `patience_s` at most. Raises ConflictError where another process works on it,
    InputError where the launcher is not the cluster's, and whatever made the search fail; it can then be resumed.
    """
    if search_id is None:
        if query is None:
            raise NotFoundError("neither a query nor a search to resume was given", field="query")
        asked = to_dict(self_contained(query))
        resolve_search(parse_query(asked))  # as it is kept, without what this process alone may read
        asked = within_limits(asked)
        search_id = store.create_search(query=asked, paused=True, limits=daily_limits(asked)).id
    record = store.get_search(search_id=search_id)
    if record.state is SearchState.SUCCEEDED and record.result is not None:
        done: TuneResult = parse(TuneResult, record.result)
        return done
    if record.state is SearchState.FAILED:
        store.resume_search(search_id=search_id, limits=daily_limits(record.query))
    lease = _claim(store, search_id, holder=holder or default_holder(), patience_s=patience_s)
    result = run_search(store=store, lease=lease, launcher=launcher, storage=storage, on_event=on_event)
    if result is None:
        waiting_for = store.get_search(search_id=search_id).progress.get("waiting_for")
        why = f": {waiting_for}" if waiting_for else ""
        raise ConflictError(f"search {search_id} was handed back to the queue{why}", code="released")
    return result


def default_holder() -> str:
    """Who this process is, for people: host and process id."""
    return f"{socket.gethostname()}:{os.getpid()}"


def _claim(store: Store, search_id: str, *, holder: str, patience_s: float) -> Lease:
    """Become this search's coordinator; ConflictError where it has ended or its holder goes on renewing the lease."""
    deadline = time.monotonic() + patience_s
    while True:
        claimed = store.claim_search(holder=holder, lease_s=LEASE_S, search_id=search_id)
        if claimed is not None:
            return claimed[1]
        current = store.get_search(search_id=search_id)
        if current.lease is None or time.monotonic() >= deadline:
            who = f"; {current.lease.holder} works on it" if current.lease else ""
            raise ConflictError(f"search {search_id} is {current.state}{who}", field="search_id")
        time.sleep(0.5)
