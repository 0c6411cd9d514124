"""Jobs that no live search owns: which runs they were started for, and what they turn out to have
cost.
"""

from collections.abc import Collection
from datetime import datetime, timedelta
from typing import Any

import sqlalchemy as sa

from hp_tool.domain.records import JsonObject, RunRecord, RunState, SearchState
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
REMEMBERED = timedelta(days=1)
"""A worker may sleep as long as this over a submit. What happened before is not looked at again and
again.
"""


class Strays(StoreBase):
    def engines_in_use(self) -> dict[str, JsonObject]:
        with self._reading() as connection:
            rows = connection.execute(_in_use(since=now(connection) - REMEMBERED)).all()
            newest = {row.cluster: row.id for row in sorted(rows, key=lambda row: row.created_at)}
            return {
                cluster: read_search(connection, search_id).query
                for cluster, search_id in newest.items()
            }

    def stray_runs(self, *, cluster: str, job_names: Collection[str]) -> list[RunRecord]:
        with self._reading() as connection:
            queries = _stray(
                cluster=cluster, job_names=job_names, since=now(connection) - REMEMBERED
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
            given_up = {
                "state": RunState.ABANDONED,
                "cause": f"its search has {search.state}",
                "finished_at": at,
            }
            cost = max(gpu_seconds, run.gpu_seconds or 0.0)
            change_run(
                connection, run, at=at, gpu_seconds=cost, **({} if run.state.ended else given_up)
            )
            spent = gpu_seconds_of(connection, search.id)
            changes = {"progress": {**search.progress, "gpu_seconds": spent}}
            if search.result is not None:
                changes["result"] = {
                    **search.result,
                    "search": {**search.result["search"], "gpu_seconds": spent},
                }
            update_search(connection, search.id, at=at, **changes)


def _in_use(*, since: datetime) -> sa.Select[Any]:
    """The searches that name a cluster and have open runs, or runs that ended after `since`:
    (cluster, created_at, id).
    """
    recent = sa.or_(RUN.c.state.in_(OPEN_RUN), RUN.c.finished_at >= since)
    searches = sa.select(SEARCH.c.cluster, SEARCH.c.created_at, SEARCH.c.id).join(
        RUN, RUN.c.search_id == SEARCH.c.id
    )
    return searches.where(recent, SEARCH.c.cluster.is_not(None)).distinct()


def _stray(
    *, cluster: str, job_names: Collection[str], since: datetime
) -> tuple[sa.Select[Any], ...]:
    """Runs whose jobs may be left: those of these names that no live search owns, and of the
    cluster, those that ended after `since` with nothing known of their jobs, and those still open
    though their search has ended. Not one query with an OR: each has its index.
    """
    runs = WITH_MEASUREMENT.join(SEARCH, SEARCH.c.id == RUN.c.search_id)
    here, ended = SEARCH.c.cluster == cluster, SEARCH.c.state.in_(ENDED)
    # the last attempt at a configuration, of which the engine said nothing: it may have run
    silent = sa.and_(
        MEASURED.c.status.in_(("crashed", "preempted")),
        MEASURED.c.measurement["wall_s"].as_float().is_(None),
    )
    return (
        runs.where(
            RUN.c.job_name.in_(list(job_names)), sa.or_(RUN.c.state.not_in(OPEN_RUN), ended)
        ),
        runs.where(
            sa.or_(RUN.c.state == RunState.ABANDONED, silent), RUN.c.finished_at >= since, here
        ),
        runs.where(RUN.c.state.in_(OPEN_RUN), ended, here),
    )
