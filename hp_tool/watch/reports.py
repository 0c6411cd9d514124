"""Step reports received over HTTP: update a job's detector, raise events, feed the calibration."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from itertools import chain
from typing import Any

from hp_tool.domain.ports import Store, WatchStore
from hp_tool.domain.query import Query
from hp_tool.domain.records import JsonObject
from hp_tool.domain.watch import Expected, StepBatch, Verdict
from hp_tool.domain.watch_records import WatchChange, WatchRecord, WatchSource
from hp_tool.errors import HpToolError, StoreError
from hp_tool.loop.learning import add_report
from hp_tool.questions import schema
from hp_tool.watch.job import Job, Source

LEAD = 0
"""Rank whose step times determine the pace of the job."""
STEADY_STEPS_TO_REPORT = 100
"""Number of steps at a steady pace after which the step time is stored as a measurement."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchReceipt:
    """Result of storing a batch of steps."""

    record: WatchRecord
    acknowledged: int
    """Sequence number up to which the process's reports are stored."""


def take_steps(batch: StepBatch, *, store: WatchStore, watch_id: str) -> BatchReceipt:
    """Store the new steps of a batch. Idempotent: steps that were already stored change nothing."""
    acknowledged = 0

    def change(
        record: WatchRecord, state: JsonObject | None, others: Callable[[], Iterable[WatchSource]]
    ) -> WatchChange:
        nonlocal acknowledged
        source = Source() if state is None else Source.of(state)
        fresh = source.take(batch)
        acknowledged = source.last_seq
        source.seen = 0 if record.state is None else int(record.state["changes"]["steps"])
        if batch.rank != LEAD or not fresh:
            return WatchChange(state=None, source=source.state(), status=record.status)
        job = Job() if record.state is None else Job.of(record.state)
        settled = job.changes.settled
        changed = job.add(fresh)
        message = None
        status = record.status
        if changed or (job.changes.settled and not settled):
            sources = (Source.of(other.state) for other in others() if other.source != batch.source)
            verdict = job.verdict(
                expected=expected_of_record(record), sources=chain([source], sources)
            )
            recovered = changed and status not in ("learning", "as_expected")
            message = schema.to_dict(verdict) if verdict.slow or recovered else None
            status = verdict.status
        return WatchChange(state=job.state(), source=source.state(), status=status, message=message)

    record = store.change_watch(watch_id=watch_id, source=batch.source, change=change)
    return BatchReceipt(record=record, acknowledged=acknowledged)


def expected_of_record(record: WatchRecord) -> Expected | None:
    """Return the expected pace that was stored when the watch was created."""
    return None if record.expected is None else schema.parse(Expected, record.expected)


def verdict_of(record: WatchRecord, sources: Iterable[WatchSource]) -> Verdict:
    """Return the verdict on a job after its newest step."""
    job = Job() if record.state is None else Job.of(record.state)
    return job.verdict(
        expected=expected_of_record(record), sources=(Source.of(source.state) for source in sources)
    )


def store_pace(
    record: WatchRecord,
    *,
    watches: WatchStore,
    store: Store,
    resolve: Callable[[Query], Query] = lambda query: query,
) -> None:
    """Store the job's steady pace as a measurement, once.

    The store decides whose predictions it calibrates. If the store rejects it, the reason is stored
    with the job.
    """
    if (
        record.query is None
        or record.state is None
        or record.measurement_id is not None
        or record.teaching is not None
    ):
        return
    step_s = Job.of(record.state).steady_step_s(
        expected_of_record(record), steps=STEADY_STEPS_TO_REPORT
    )
    if step_s is None:
        return
    query = {name: value for name, value in record.query.items() if name != "parallel"}
    measurement: dict[str, Any] = {"status": "ok", "step_s": step_s}
    report = {
        "query": query,
        "parallel": record.query.get("parallel") or {},
        "measurement": measurement,
    }
    try:
        stored = add_report(
            json.dumps(report).encode(),
            store=store,
            source="reported",
            key=f"watch:{record.id}",
            resolve=resolve,
        )
    except StoreError:
        raise
    except HpToolError as error:
        watches.note_teaching(watch_id=record.id, measurement_id=None, why=error.message)
    else:
        watches.note_teaching(watch_id=record.id, measurement_id=stored.id, why=None)
