"""Find the runs of stray jobs (jobs that no live search owns) and record their cost."""

from collections.abc import Collection
from datetime import datetime, timedelta
from typing import Any

import sqlalchemy as sa

from hp_tool.domain.records import JsonObject, RunRecord
from hp_tool.domain.states import RunState, SearchState
from hp_tool.store import tables
from hp_tool.store.base import (
    ENDED,
    OPEN_RUN,
    StoreBase,
    gpu_seconds_of,
    locked_search,
    now,
    read_search,
    update_search,
)
from hp_tool.store.runs import WITH_MEASUREMENT, change_run, read_run, run_record

RUN, SEARCH, MEASURED = tables.runs, tables.searches, tables.measurements
STRAY_WINDOW = timedelta(days=1)
"""Runs that ended longer ago than this are not checked again. A worker may be suspended for up to
this long while it submits a job.
"""


class Strays(StoreBase):
    """Runs of stray jobs."""

    def engines_in_use(self) -> dict[str, JsonObject]:
        with self._reading() as connection:
            rows = connection.execute(
                _engines_in_use_query(since=now(connection) - STRAY_WINDOW)
            ).all()
            newest = {row.cluster: row.id for row in sorted(rows, key=lambda row: row.created_at)}
            return {
                cluster: read_search(connection, search_id).query
                for cluster, search_id in newest.items()
            }

    def stray_runs(self, *, cluster: str, job_names: Collection[str]) -> list[RunRecord]:
        with self._reading() as connection:
            queries = _stray_queries(
                cluster=cluster, job_names=job_names, since=now(connection) - STRAY_WINDOW
            )
            runs = [run_record(row) for query in queries for row in connection.execute(query)]
            return list({run.id: run for run in runs}.values())

    def book_stray(self, *, run_id: str, gpu_seconds: float) -> None:
        with self._writing() as connection:
            search = locked_search(connection, read_run(connection, run_id).search_id)
            # Read the run again now that its search is locked.
            run = read_run(connection, run_id)
            if not run.state.ended and not SearchState(search.state).ended:
                return  # the search was resumed
            if run.state.ended and gpu_seconds <= (run.gpu_seconds or 0.0):
                return
            at = now(connection)
            abandoned = {
                "state": RunState.ABANDONED,
                "cause": f"its search has {search.state}",
                "finished_at": at,
            }
            cost = max(gpu_seconds, run.gpu_seconds or 0.0)
            change_run(
                connection, run, at=at, gpu_seconds=cost, **({} if run.state.ended else abandoned)
            )
            spent = gpu_seconds_of(connection, search.id)
            changes = {"progress": {**search.progress, "gpu_seconds": spent}}
            if search.result is not None:
                changes["result"] = {
                    **search.result,
                    "search": {**search.result["search"], "gpu_seconds": spent},
                }
            update_search(connection, search.id, at=at, **changes)


def _engines_in_use_query(*, since: datetime) -> sa.Select[Any]:
    recent = sa.or_(RUN.c.state.in_(OPEN_RUN), RUN.c.finished_at >= since)
    searches = sa.select(SEARCH.c.cluster, SEARCH.c.created_at, SEARCH.c.id).join(
        RUN, RUN.c.search_id == SEARCH.c.id
    )
    return searches.where(recent, SEARCH.c.cluster.is_not(None)).distinct()


def _stray_queries(
    *, cluster: str, job_names: Collection[str], since: datetime
) -> tuple[sa.Select[Any], ...]:
    """Return queries for runs whose jobs may still exist.

    One query selects the runs with these job names that no live search owns. The other two select
    runs on the cluster: those that ended after `since` without a recorded wall time, and open runs
    of ended searches. They are separate queries, because each can use its own index, unlike an OR.
    """
    runs = WITH_MEASUREMENT.join(SEARCH, SEARCH.c.id == RUN.c.search_id)
    on_cluster, is_ended = SEARCH.c.cluster == cluster, SEARCH.c.state.in_(ENDED)
    # The cluster reported no wall time for the last attempt, so its job may have run.
    silent = sa.and_(
        MEASURED.c.status.in_(("crashed", "preempted")),
        MEASURED.c.measurement["wall_s"].as_float().is_(None),
    )
    return (
        runs.where(
            RUN.c.job_name.in_(list(job_names)), sa.or_(RUN.c.state.not_in(OPEN_RUN), is_ended)
        ),
        runs.where(
            sa.or_(RUN.c.state == RunState.ABANDONED, silent),
            RUN.c.finished_at >= since,
            on_cluster,
        ),
        runs.where(RUN.c.state.in_(OPEN_RUN), is_ended, on_cluster),
    )
