"""Runs that a search has on the cluster now: since when, and how long such runs have taken so far."""

import statistics
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta

from hp_tool.domain.ports import Store
from hp_tool.domain.records import JsonObject, RunState
from service.dashboard import trials


@dataclass(frozen=True, slots=True, kw_only=True)
class Running:
    """A run that has been submitted and has not ended."""

    id: str
    number: int
    arithmetic: str
    details: str
    why: str
    """Why it was chosen."""
    submitted_at: datetime | None
    expected_step_s: float | None
    seconds: float | None
    """Seconds since the job was submitted."""
    ends_at: datetime | None
    """When it would end if it took as long as the earlier ones did."""
    usual_s: float | None
    """Median seconds from submission to end of the search's earlier runs; None for the first."""


def running_now(store: Store, *, search_id: str, query: JsonObject) -> tuple[Running, ...]:
    """Return the runs of a search that the engine has, in order; `query`: the search's."""
    now = datetime.now(UTC)
    ended = store.list_runs(search_id=search_id, state=RunState.FINISHED, limit=20, oldest_first=False).items
    took = [(run.finished_at - run.submitted_at).total_seconds() for run in ended if run.finished_at and run.submitted_at]
    return tuple(
        Running(
            id=run.id,
            number=run.number,
            arithmetic=trials.words(run.parallel, query)[0],
            details=trials.words(run.parallel, query)[1],
            why=trials.why(run.predicted.get("chosen_by")),
            submitted_at=run.submitted_at,
            expected_step_s=run.predicted.get("calibrated_step_s"),
            seconds=None if run.submitted_at is None else (now - run.submitted_at).total_seconds(),
            ends_at=run.submitted_at + timedelta(seconds=statistics.median(took)) if took and run.submitted_at else None,
            usual_s=statistics.median(took) if took else None,
        )
        for run in store.list_runs(search_id=search_id, state=RunState.SUBMITTED, limit=64).items
    )
