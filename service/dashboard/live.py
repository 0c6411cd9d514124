"""Active runs of a search: their phase, start and expected end."""

import statistics
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta

from hp_tool.domain.ports import Store
from hp_tool.domain.query import SearchSettings
from hp_tool.domain.records import JsonObject, RunRecord, SearchRecord
from hp_tool.domain.states import RunState
from hp_tool.domain.units import format_count
from hp_tool.loop.search.underway import Underway
from hp_tool.questions import schema
from service.dashboard import trials


@dataclass(frozen=True, slots=True, kw_only=True)
class Running:
    """A run that has been submitted and has not ended."""

    id: str
    number: int
    arithmetic: str
    details: str
    why: str
    """Why the run was chosen."""
    submitted_at: datetime | None
    expected_step_s: float | None
    seconds: float | None
    """Seconds since the job was submitted."""
    ends_at: datetime | None
    """Expected end, from the run's own steps, or else from the duration of earlier runs."""
    usual_s: float | None
    """Median seconds from submission to end of the search's earlier runs; None for the first run.
    """
    phase: str | None
    """Current phase in words; None until the worker has read the run's log."""
    steps: int
    """Number of steps measured so far."""
    of_steps: int
    """Maximum number of measured steps."""
    log_tail: str
    """Last lines of the run's log so far."""


def list_running(store: Store, record: SearchRecord) -> tuple[Running, ...]:
    """Return the active runs of a search, in order."""
    ended = store.list_runs(
        search_id=record.id, state=RunState.FINISHED, limit=20, oldest_first=False
    ).items
    took = [
        (run.finished_at - run.submitted_at).total_seconds()
        for run in ended
        if run.finished_at and run.submitted_at
    ]
    usual_s = statistics.median(took) if took else None
    runs = store.list_runs(search_id=record.id, state=RunState.SUBMITTED, limit=64).items
    return tuple(_running(run, record, usual_s=usual_s) for run in runs)


def step_counts(query: JsonObject) -> tuple[int, int]:
    """Return the numbers of warm-up steps and measured steps in a search's runs."""
    settings, usual = query.get("search") or {}, SearchSettings()
    return settings.get("warmup_steps", usual.warmup_steps), settings.get("steps", usual.steps)


def get_log_tail(record: SearchRecord, run: RunRecord) -> str:
    """Return the last lines of a run's log; empty if there are none.

    They are stored when the run ends. Until then, they are those that its worker read last.
    """
    seen = _progress_of(record, run.id)
    log = (run.measurement and run.measurement.log_tail) or (run.account or {}).get("log_tail")
    return log or (seen.log_tail if seen else "")


def _running(run: RunRecord, record: SearchRecord, *, usual_s: float | None) -> Running:
    now, query, seen = datetime.now(UTC), record.query, _progress_of(record, run.id)
    warmup_steps, steps = step_counts(query)
    ends_at = (
        run.submitted_at + timedelta(seconds=usual_s) if usual_s and run.submitted_at else None
    )
    if seen is not None and seen.step_s:
        left = max(warmup_steps - seen.warmup_steps, 0) + max(steps - seen.steps, 0)
        ends_at = now + timedelta(seconds=left * seen.step_s)
    arithmetic, details = trials.configuration_words(run.parallel, query)
    return Running(
        id=run.id,
        number=run.number,
        arithmetic=arithmetic,
        details=details,
        why=trials.reason_words(run.predicted.get("chosen_by")),
        submitted_at=run.submitted_at,
        expected_step_s=run.predicted.get("calibrated_step_s"),
        seconds=None if run.submitted_at is None else (now - run.submitted_at).total_seconds(),
        ends_at=ends_at,
        usual_s=usual_s,
        phase=None
        if seen is None
        else seen.phase.happened.format(
            warmup=format_count(seen.warmup_steps, "step"), steps=seen.steps, of_steps=steps
        ),
        steps=seen.steps if seen else 0,
        of_steps=steps,
        log_tail=seen.log_tail if seen else "",
    )


def _progress_of(record: SearchRecord, run_id: str) -> Underway | None:
    seen = (record.progress.get("underway") or {}).get(run_id)
    return schema.parse(Underway, seen) if seen else None
