"""Profile runs of a search: intended, submitted, then finished or abandoned, always under the search's lease."""

from __future__ import annotations

from dataclasses import fields, replace
from datetime import datetime
from functools import lru_cache
from typing import Any

import sqlalchemy as sa

from hp_tool.domain.digests import configuration_digest
from hp_tool.domain.measurement import Fidelity, Latencies, Measurement, MeasurementStatus
from hp_tool.domain.records import JsonObject, Lease, NewMeasurement, OpenRunsLimit, Page, RunFigures, RunRecord, RunState
from hp_tool.domain.serving import Configuration
from hp_tool.errors import ConflictError, NotFoundError
from hp_tool.store import tables
from hp_tool.store.base import StoreBase, add_event, checked, leased_search, now, read_search
from hp_tool.store.columns import decode, decode_configuration, decode_text, encode, new_id, row_dict, storable
from hp_tool.store.measurements import insert_measurement
from hp_tool.store.paging import Listing, fetch_page
from hp_tool.store.usage import admit_run, open_runs_on

RUN = tables.runs
# The measurement of a run stands in one place, with the measurements; a run reads it from there.
WITH_MEASUREMENT = sa.select(
    RUN, tables.measurements.c.id.label("measurement_id"), tables.measurements.c.measurement.label("measurement")
).outerjoin_from(RUN, tables.measurements, tables.measurements.c.run_id == RUN.c.id)
MEASURED = tables.measurements.c
LATENCIES = tuple(field.name for field in fields(Latencies))
FIGURES = sa.select(
    RUN.c.id,
    RUN.c.number,
    RUN.c.state,
    sa.cast(RUN.c.parallel, sa.Text).label("parallel"),
    sa.cast(RUN.c.fidelity, sa.Text).label("fidelity"),
    RUN.c.gpu_seconds,
    RUN.c.finished_at,
    RUN.c.predicted["step_s"].as_float().label("predicted_step_s"),
    RUN.c.predicted["calibrated_step_s"].as_float().label("expected_step_s"),
    RUN.c.predicted[("calibrated_step_s_interval", 0)].as_float().label("low_s"),
    RUN.c.predicted[("calibrated_step_s_interval", 1)].as_float().label("high_s"),
    RUN.c.predicted["memory_allocated_bytes"].as_float().label("predicted_memory_bytes"),
    RUN.c.predicted["chosen_by"].as_string().label("chosen_by"),
    MEASURED.status,
    MEASURED.step_s,
    MEASURED.measurement["extrapolated_step_s"].as_float().label("extrapolated_step_s"),
    MEASURED.tokens_per_second_per_gpu,
    MEASURED.peak_memory_bytes,
    *(MEASURED.measurement[("load", name)].as_float().label(name) for name in (*LATENCIES, "penalised_latency_s")),
    sa.func.coalesce(RUN.c.cause, MEASURED.measurement["cause"].as_string()).label("cause"),
).outerjoin_from(RUN, tables.measurements, MEASURED.run_id == RUN.c.id)
"""Only figures leave the database: most of a run's JSON is its logs and lists of steps."""


class Runs(StoreBase):
    """The part of `Store` about profile runs."""

    def intend_run(
        self,
        *,
        lease: Lease,
        parallel: Configuration,
        fidelity: Fidelity,
        predicted: JsonObject,
        limit: OpenRunsLimit | None = None,
    ) -> RunRecord:
        digest = configuration_digest(parallel=parallel, fidelity=fidelity)
        values = {
            "parallel": encode(parallel, field="parallel"),
            "fidelity": encode(fidelity, field="fidelity"),
            "predicted": encode(predicted, field="predicted"),
        }
        search_id = lease.search_id
        with self._writing() as connection:
            leased_search(connection, lease)
            same = sa.select(RUN.c.id, RUN.c.state, RUN.c.attempt).where(RUN.c.search_id == search_id, RUN.c.digest == digest)
            last = connection.execute(same.order_by(RUN.c.attempt.desc()).limit(1)).one_or_none()
            if last is not None and last.state != RunState.ABANDONED:
                return read_run(connection, last.id)
            if limit is not None:
                admit_run(connection, limit)
            number = connection.execute(sa.select(sa.func.count()).where(RUN.c.search_id == search_id)).scalar_one()
            at = now(connection)
            run_id = new_id()
            new = {
                "id": run_id,
                "search_id": search_id,
                "number": number,
                "digest": digest,
                "attempt": 0 if last is None else last.attempt + 1,
                "job_name": f"hp-{search_id}-r{number}-t{lease.token}",
                "token": lease.token,
                "state": RunState.INTENDED,
                "created_at": at,
            }
            connection.execute(sa.insert(RUN).values(**new, **values))
            return _with_event(connection, read_run(connection, run_id), at=at)

    def mark_submitted(self, *, lease: Lease, run_id: str, handle: str) -> RunRecord:
        with self._writing() as connection:
            run = _leased_run(connection, lease, run_id)
            if run.state is RunState.SUBMITTED and run.handle == handle:
                return run
            if run.state not in (RunState.INTENDED, RunState.SUBMITTED):
                raise ConflictError(f"run {run_id} is already {run.state}")
            at = now(connection)
            return change_run(
                connection, run_id, at=at, state=RunState.SUBMITTED, handle=handle, submitted_at=run.submitted_at or at
            )

    def abandon_run(self, *, lease: Lease, run_id: str, cause: str, gpu_seconds: float = 0.0) -> RunRecord:
        with self._writing() as connection:
            run = _leased_run(connection, lease, run_id)
            if run.state is RunState.ABANDONED:
                return run
            if run.state is RunState.FINISHED:
                raise ConflictError(f"run {run_id} is already finished")
            at = now(connection)
            ended = {"state": RunState.ABANDONED, "cause": storable(cause), "gpu_seconds": gpu_seconds, "finished_at": at}
            return change_run(connection, run_id, at=at, **ended)

    def finish_run(self, *, lease: Lease, run_id: str, measurement: NewMeasurement, gpu_seconds: float) -> RunRecord:
        with self._writing() as connection:
            run = _leased_run(connection, lease, run_id)
            if run.state is RunState.FINISHED:
                return run
            if run.state is RunState.ABANDONED:
                raise ConflictError(f"run {run_id} was abandoned: {run.cause}")
            at = now(connection)
            owner = connection.execute(sa.select(tables.searches.c.owner).where(tables.searches.c.id == run.search_id))
            measurement = replace(measurement, owner=owner.scalar_one())  # the search's, not the worker's
            insert_measurement(connection, measurement=measurement, search_id=run.search_id, run_id=run_id, at=at)
            return change_run(connection, run_id, at=at, state=RunState.FINISHED, gpu_seconds=gpu_seconds, finished_at=at)

    def runs(self, *, search_id: str) -> list[RunRecord]:
        with self._reading() as connection:
            rows = connection.execute(WITH_MEASUREMENT.where(RUN.c.search_id == search_id).order_by(RUN.c.number)).all()
            if not rows:
                read_search(connection, search_id)  # none yet is one thing, no such search another
            return [run_record(row) for row in rows]

    def list_runs(
        self,
        *,
        search_id: str,
        state: RunState | None = None,
        status: MeasurementStatus | None = None,
        since: datetime | None = None,
        until: datetime | None = None,
        oldest_first: bool = True,
        limit: int = 100,
        cursor: str | None = None,
    ) -> Page[RunRecord]:
        filters = {RUN.c.search_id: search_id, RUN.c.state: state, MEASURED.status: status}
        listing = Listing(table=RUN, filters=filters, since=since, until=until, oldest_first=oldest_first)
        with self._reading() as connection:
            page = fetch_page(
                connection, query=WITH_MEASUREMENT, listing=listing, limit=limit, cursor=cursor, record=run_record
            )
            if not page.items:
                read_search(connection, search_id)  # none of this kind is one thing, no such search another
            return page

    def count_open_runs(self, *, cluster: str) -> int:
        with self._reading() as connection:
            return open_runs_on(connection, cluster)

    def run_figures(self, *, search_id: str) -> list[RunFigures]:
        with self._reading() as connection:
            rows = connection.execute(FIGURES.where(RUN.c.search_id == search_id).order_by(RUN.c.number)).all()
            if not rows:
                read_search(connection, search_id)
            return [run_figures(row) for row in rows]

    def get_run(self, *, search_id: str, run_id: str) -> RunRecord:
        with self._reading() as connection:
            run = read_run(connection, run_id)
            if run.search_id != search_id:
                raise NotFoundError(f"search {search_id} has no run {run_id!r}", field="run_id")
            return run


def run_figures(row: sa.Row[Any]) -> RunFigures:
    """A row of FIGURES as a record."""
    fidelity = _fidelity(row.fidelity)
    return RunFigures(
        id=row.id,
        number=row.number,
        state=RunState(row.state),
        parallel=decode_configuration(row.parallel),
        fidelity=fidelity,
        predicted_step_s=row.predicted_step_s,
        expected_step_s=row.expected_step_s,
        expected_step_s_interval=None if row.low_s is None or row.high_s is None else (row.low_s, row.high_s),
        predicted_memory_bytes=row.predicted_memory_bytes,
        chosen_by=row.chosen_by,
        status=row.status,
        objective_s=row.penalised_latency_s or (row.step_s if fidelity.is_whole else row.extrapolated_step_s),
        tokens_per_second_per_gpu=row.tokens_per_second_per_gpu,
        peak_memory_bytes=row.peak_memory_bytes,
        latencies=None if row.ttft_s is None else Latencies(**{name: getattr(row, name) for name in LATENCIES}),
        cause=row.cause,
        gpu_seconds=row.gpu_seconds,
        finished_at=row.finished_at,
    )


@lru_cache(maxsize=256)
def _fidelity(text: str) -> Fidelity:
    """Runs of a search have few different ones."""
    return decode_text(Fidelity, text)


def run_record(row: sa.Row[Any]) -> RunRecord:
    """A row of WITH_MEASUREMENT as a record."""
    values = row_dict(row)
    values["state"] = RunState(values["state"])
    values["parallel"] = decode_configuration(values["parallel"])
    values["fidelity"] = decode(Fidelity, values["fidelity"])
    if values["measurement"] is not None:
        values["measurement"] = decode(Measurement, values["measurement"])
    return RunRecord(**values)


def read_run(connection: sa.Connection, run_id: str) -> RunRecord:
    """One run, or NotFoundError."""
    row = connection.execute(WITH_MEASUREMENT.where(RUN.c.id == run_id)).one_or_none()
    if row is None:
        raise NotFoundError(f"no run {run_id!r}", field="run_id")
    return run_record(row)


def _leased_run(connection: sa.Connection, lease: Lease, run_id: str) -> RunRecord:
    """A run of the search that `lease` coordinates; the search's lock guards its runs too."""
    leased_search(connection, lease)
    run = read_run(connection, run_id)
    if run.search_id != lease.search_id:
        raise NotFoundError(f"search {lease.search_id} has no run {run_id!r}", field="run_id")
    return run


def change_run(connection: sa.Connection, run_id: str, *, at: datetime, **values: Any) -> RunRecord:
    """Change a run of a locked search and append its event; the run as it is now."""
    connection.execute(sa.update(RUN).where(RUN.c.id == run_id).values(checked(RUN, values)))
    return _with_event(connection, read_run(connection, run_id), at=at)


def _with_event(connection: sa.Connection, run: RunRecord, *, at: datetime) -> RunRecord:
    """Append the event of a run's new state. Its worker makes progress, so earlier lost workers no longer count."""
    search = tables.searches
    connection.execute(sa.update(search).where(search.c.id == run.search_id, search.c.lost_claims > 0).values(lost_claims=0))
    payload: JsonObject = {"run_id": run.id, "number": run.number, "state": run.state}
    if run.measurement is not None:
        payload |= {"status": run.measurement.status, "step_s": run.measurement.objective_s}
    add_event(connection, search_id=run.search_id, kind="run", payload=payload, at=at)
    return run
