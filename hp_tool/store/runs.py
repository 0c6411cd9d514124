"""Profile runs of a search. A run is intended, then submitted, then finished or abandoned.

Every change requires the search's lease.
"""

from dataclasses import replace
from datetime import datetime
from typing import Any, Unpack

import sqlalchemy as sa

from hp_tool.domain.digests import configuration_digest
from hp_tool.domain.measurement import Fidelity, Measurement, MeasurementStatus
from hp_tool.domain.measurement_records import NewMeasurement
from hp_tool.domain.records import (
    JsonObject,
    Lease,
    OpenRunsLimit,
    Page,
    Paging,
    RunAccount,
    RunFigures,
    RunRecord,
)
from hp_tool.domain.serving import RunConfig
from hp_tool.domain.states import RunState
from hp_tool.errors import ConflictError, NotFoundError
from hp_tool.store import tables
from hp_tool.store.access import admit_run, count_open_runs_on
from hp_tool.store.base import (
    ID,
    StoreBase,
    add_event,
    leased_search,
    now,
    read_search,
    row_by_id,
    storable_values,
)
from hp_tool.store.columns import decode, decode_configuration, encode, new_id, row_dict, storable
from hp_tool.store.measurements import insert_measurement
from hp_tool.store.paging import RowList
from hp_tool.store.run_figures import figures_of

RUN, MEASURED = tables.runs, tables.measurements
WITH_MEASUREMENT = sa.select(
    RUN, MEASURED.c.id.label("measurement_id"), MEASURED.c.measurement.label("measurement")
).outerjoin_from(RUN, MEASURED, MEASURED.c.run_id == RUN.c.id)
"""Query for the rows that `run_record` converts: a run with its measurement."""
ONE_RUN = WITH_MEASUREMENT.where(RUN.c.id == ID)


class Runs(StoreBase):
    """Profile runs."""

    def intend_run(
        self,
        *,
        lease: Lease,
        parallel: RunConfig,
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
            last = _last_attempt(connection, search_id, digest)
            if last is not None and last.state != RunState.ABANDONED:
                return read_run(connection, last.id)
            if limit is not None:
                admit_run(connection, limit)
            number = connection.execute(
                sa.select(sa.func.count()).where(RUN.c.search_id == search_id)
            ).scalar_one()
            at = now(connection)
            run_id = new_id()
            new = {
                "id": run_id,
                "search_id": search_id,
                "number": number,
                "digest": digest,
                "attempt": 0 if last is None else last.attempt + 1,
                # The run id keeps job names unique after a restore, which repeats their other
                # parts.
                "job_name": f"hp-{search_id}-r{number}-t{lease.token}-{run_id}",
                "token": lease.token,
                "state": RunState.INTENDED,
                "created_at": at,
            }
            connection.execute(sa.insert(RUN), {**new, **values})
            return _append_run_event(connection, read_run(connection, run_id), at=at)

    def mark_submitted(self, *, lease: Lease, run_id: str, handle: str) -> RunRecord:
        with self._writing() as connection:
            run = _leased_run(connection, lease, run_id)
            if run.state is RunState.SUBMITTED and run.handle == handle:
                return run
            if run.state not in (RunState.INTENDED, RunState.SUBMITTED):
                raise ConflictError(f"Run {run_id} is already {run.state}.")
            at = now(connection)
            return change_run(
                connection,
                run,
                at=at,
                state=RunState.SUBMITTED,
                handle=handle,
                submitted_at=run.submitted_at or at,
            )

    def abandon_run(
        self,
        *,
        lease: Lease,
        run_id: str,
        cause: str,
        gpu_seconds: float = 0.0,
        account: RunAccount | None = None,
    ) -> RunRecord:
        with self._writing() as connection:
            run = _leased_run(connection, lease, run_id)
            if run.state is RunState.ABANDONED:
                return run
            if run.state is RunState.FINISHED:
                raise ConflictError(f"Run {run_id} is already finished.")
            at = now(connection)
            values = {
                "state": RunState.ABANDONED,
                "cause": storable(cause),
                "gpu_seconds": gpu_seconds,
                "finished_at": at,
            }
            return change_run(connection, run, at=at, **values, account=_encode_account(account))

    def finish_run(
        self,
        *,
        lease: Lease,
        run_id: str,
        measurement: NewMeasurement,
        gpu_seconds: float,
        account: RunAccount | None = None,
    ) -> RunRecord:
        with self._writing() as connection:
            run = _leased_run(connection, lease, run_id)
            if run.state is RunState.FINISHED:
                return run
            if run.state is RunState.ABANDONED:
                raise ConflictError(f"Run {run_id} was abandoned: {run.cause}")
            at = now(connection)
            owner = connection.execute(
                sa.select(tables.searches.c.owner).where(tables.searches.c.id == run.search_id)
            )
            # The measurement belongs to the owner of the search, not to the worker.
            measurement = replace(measurement, owner=owner.scalar_one())
            insert_measurement(
                connection, measurement=measurement, search_id=run.search_id, run_id=run_id, at=at
            )
            run = read_run(connection, run_id)  # includes the stored measurement
            values = {"state": RunState.FINISHED, "gpu_seconds": gpu_seconds, "finished_at": at}
            return change_run(connection, run, at=at, **values, account=_encode_account(account))

    def runs(self, *, search_id: str) -> list[RunRecord]:
        with self._reading() as connection:
            rows = connection.execute(
                WITH_MEASUREMENT.where(RUN.c.search_id == search_id).order_by(RUN.c.number)
            ).all()
            if not rows:
                read_search(connection, search_id)  # raises NotFoundError for an unknown search
            return [run_record(row) for row in rows]

    def list_runs(
        self,
        *,
        search_id: str,
        state: RunState | None = None,
        status: MeasurementStatus | None = None,
        limit: int = 100,
        **paging: Unpack[Paging],
    ) -> Page[RunRecord]:
        filters = {RUN.c.search_id: search_id, RUN.c.state: state, MEASURED.c.status: status}
        listing = RowList(table=RUN, filters=filters, paging={"oldest_first": True, **paging})
        with self._reading() as connection:
            page = listing.page(connection, query=WITH_MEASUREMENT, limit=limit, record=run_record)
            if not page.items:
                read_search(connection, search_id)  # raises NotFoundError for an unknown search
            return page

    def count_open_runs(self, *, cluster: str) -> int:
        with self._reading() as connection:
            return count_open_runs_on(connection, cluster)

    def run_figures(self, *, search_id: str) -> list[RunFigures]:
        with self._reading() as connection:
            figures = figures_of(connection, search_id)
            if not figures:
                read_search(connection, search_id)
            return figures

    def get_run(self, *, search_id: str, run_id: str) -> RunRecord:
        with self._reading() as connection:
            return _run_of(connection, search_id, run_id)


def _last_attempt(
    connection: sa.Connection, search_id: str, digest: str
) -> sa.Row[Any, Any, Any] | None:
    attempts = sa.select(RUN.c.id, RUN.c.state, RUN.c.attempt).where(
        RUN.c.search_id == search_id, RUN.c.digest == digest
    )
    return connection.execute(attempts.order_by(RUN.c.attempt.desc()).limit(1)).one_or_none()


def _encode_account(account: RunAccount | None) -> JsonObject | None:
    return None if account is None else encode(dict(account), field="account")


def run_record(row: sa.Row[Any]) -> RunRecord:
    """Convert a row of WITH_MEASUREMENT to a run record."""
    values = row_dict(row)
    values["state"] = RunState(values["state"])
    values["parallel"] = decode_configuration(values["parallel"])
    values["fidelity"] = decode(Fidelity, values["fidelity"])
    if values["measurement"] is not None:
        values["measurement"] = decode(Measurement, values["measurement"])
    return RunRecord(**values)


def read_run(connection: sa.Connection, run_id: str) -> RunRecord:
    """Return a run. Raise NotFoundError if it does not exist."""
    return run_record(row_by_id(connection, ONE_RUN, run_id, kind="run"))


def _leased_run(connection: sa.Connection, lease: Lease, run_id: str) -> RunRecord:
    """Return a run of the search that `lease` coordinates.

    The lock on the search covers its runs.
    """
    leased_search(connection, lease)
    return _run_of(connection, lease.search_id, run_id)


def _run_of(connection: sa.Connection, search_id: str, run_id: str) -> RunRecord:
    run = read_run(connection, run_id)
    if run.search_id != search_id:
        raise NotFoundError(f"Search {search_id} has no run {run_id!r}.", field="run_id")
    return run


def change_run(
    connection: sa.Connection, run: RunRecord, *, at: datetime, **values: Any
) -> RunRecord:
    """Update a run of a locked search and append its event. Return the updated run."""
    connection.execute(sa.update(RUN).where(RUN.c.id == run.id), storable_values(RUN, values))
    return _append_run_event(connection, replace(run, **values), at=at)


def _append_run_event(connection: sa.Connection, run: RunRecord, *, at: datetime) -> RunRecord:
    payload: JsonObject = {"run_id": run.id, "number": run.number, "state": run.state}
    if run.measurement is not None:
        payload |= {"status": run.measurement.status, "step_s": run.measurement.objective_s}
    add_event(
        connection, search_id=run.search_id, kind="run", payload=payload, at=at, lost_claims=0
    )
    return run
