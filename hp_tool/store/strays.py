"""Jobs that no live search owns: which runs they were started for, and what they turn out to have cost."""

from __future__ import annotations

from collections.abc import Collection
from datetime import timedelta

import sqlalchemy as sa

from hp_tool.domain.records import JsonObject, RunRecord, RunState, SearchState
from hp_tool.store import tables
from hp_tool.store.base import StoreBase, locked_search, now, read_search, update_search
from hp_tool.store.runs import WITH_MEASUREMENT, change_run, read_run, run_record
from hp_tool.store.usage import gpu_seconds_of

RUN, SEARCH = tables.runs, tables.searches
REMEMBERED = timedelta(days=1)
"""A worker may sleep as long as this over a submit. What happened before is not looked at again and again."""
OPEN = (RunState.INTENDED, RunState.SUBMITTED)
ENDED = tuple(state for state in SearchState if state.ended)


class Strays(StoreBase):
    """The part of `AccessStore` that sweeping the engines needs."""

    def engines_in_use(self) -> dict[str, JsonObject]:
        with self._reading() as connection:
            recent = sa.or_(RUN.c.state.in_(OPEN), RUN.c.finished_at >= now(connection) - REMEMBERED)
            used = sa.select(SEARCH.c.cluster, SEARCH.c.created_at, SEARCH.c.id).join(RUN, RUN.c.search_id == SEARCH.c.id)
            rows = connection.execute(used.where(recent, SEARCH.c.cluster.is_not(None)).distinct()).all()
            newest = {row.cluster: row.id for row in sorted(rows, key=lambda row: row.created_at)}
            return {cluster: read_search(connection, search_id).query for cluster, search_id in newest.items()}

    def stray_runs(self, *, cluster: str, job_names: Collection[str]) -> list[RunRecord]:
        with self._reading() as connection:
            query = WITH_MEASUREMENT.join(SEARCH, SEARCH.c.id == RUN.c.search_id)
            unowned = sa.or_(RUN.c.state.not_in(OPEN), SEARCH.c.state.in_(ENDED))
            is_recent = RUN.c.finished_at >= now(connection) - REMEMBERED
            queries = (  # not one with an OR: each has its index
                query.where(RUN.c.job_name.in_(job_names), unowned),
                query.where(RUN.c.state == RunState.ABANDONED, is_recent, SEARCH.c.cluster == cluster),
            )
            runs = [run_record(row) for each in queries for row in connection.execute(each)]
            return list({run.id: run for run in runs}.values())

    def book_stray(self, *, run_id: str, gpu_seconds: float) -> None:
        with self._writing() as connection:
            search = locked_search(connection, read_run(connection, run_id).search_id)
            run = read_run(connection, run_id)  # as it is now that nobody changes it
            if not run.state.ended and not SearchState(search.state).ended:
                return  # taken up again meanwhile
            if run.state.ended and gpu_seconds <= (run.gpu_seconds or 0.0):
                return
            at = now(connection)
            given_up = {"state": RunState.ABANDONED, "cause": f"its search has {search.state}", "finished_at": at}
            cost = max(gpu_seconds, run.gpu_seconds or 0.0)
            change_run(connection, run_id, at=at, gpu_seconds=cost, **({} if run.state.ended else given_up))
            spent = gpu_seconds_of(connection, search.id)
            changes = {"progress": {**search.progress, "gpu_seconds": spent}}
            if search.result is not None:
                changes["result"] = {**search.result, "search": {**search.result["search"], "gpu_seconds": spent}}
            update_search(connection, search.id, at=at, **changes)
