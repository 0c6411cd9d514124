"""Profile runs of a search: intended, submitted, then finished or abandoned, always under the search's lease."""

from collections.abc import Collection
from dataclasses import fields, replace
from datetime import datetime, timedelta
from functools import lru_cache
from typing import Any, Unpack

import sqlalchemy as sa

from hp_tool.domain.digests import configuration_digest
from hp_tool.domain.measurement import Fidelity, Latencies, Measurement, MeasurementStatus
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
    RunState,
    SearchState,
)
from hp_tool.domain.serving import RunConfig
from hp_tool.errors import ConflictError, NotFoundError
from hp_tool.store import tables
from hp_tool.store.access import admit_run, open_runs_on
from hp_tool.store.base import (
    ENDED,
    ID,
    OPEN_RUN,
    StoreBase,
    add_event,
    checked,
    gpu_seconds_of,
    leased_search,
    locked_search,
    now,
    read_search,
    row_by_id,
    update_search,
)
from hp_tool.store.columns import UtcDateTime, decode, decode_configuration, encode, new_id, row_dict, storable
from hp_tool.store.measurements import insert_measurement
from hp_tool.store.paging import Listing

RUN, SEARCH = tables.runs, tables.searches
# The measurement of a run stands in one place, with the measurements; a run reads it from there.
WITH_MEASUREMENT = sa.select(
    RUN, tables.measurements.c.id.label("measurement_id"), tables.measurements.c.measurement.label("measurement")
).outerjoin_from(RUN, tables.measurements, tables.measurements.c.run_id == RUN.c.id)
ONE_RUN = WITH_MEASUREMENT.where(RUN.c.id == ID)
OF_SEARCH = WITH_MEASUREMENT.where(RUN.c.search_id == ID).order_by(RUN.c.number)
LAST_ATTEMPT = (
    sa.select(RUN.c.id, RUN.c.state, RUN.c.attempt)
    .where(RUN.c.search_id == ID, RUN.c.digest == sa.bindparam("digest"))
    .order_by(RUN.c.attempt.desc())
    .limit(1)
)
NUMBER_OF_RUNS = sa.select(sa.func.count()).where(RUN.c.search_id == ID)
NEW_RUN = sa.insert(RUN)
CHANGED_RUN = sa.update(RUN).where(RUN.c.id == ID)
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
CONVERTED = {"state", "parallel", "fidelity", "expected_step_s_interval", "objective_s", "latencies"}
FIGURES_AS_STORED = tuple(field.name for field in fields(RunFigures) if field.name not in CONVERTED)
REMEMBERED = timedelta(days=1)
"""A worker may sleep as long as this over a submit. What happened before is not looked at again and again."""
IS_RECENT = RUN.c.finished_at >= sa.bindparam("since", type_=UtcDateTime())
USED = (
    sa.select(SEARCH.c.cluster, SEARCH.c.created_at, SEARCH.c.id)
    .join(RUN, RUN.c.search_id == SEARCH.c.id)
    .where(sa.or_(RUN.c.state.in_(OPEN_RUN), IS_RECENT), SEARCH.c.cluster.is_not(None))
    .distinct()
)
WITH_SEARCH = WITH_MEASUREMENT.join(SEARCH, SEARCH.c.id == RUN.c.search_id)
UNOWNED = sa.or_(RUN.c.state.not_in(OPEN_RUN), SEARCH.c.state.in_(ENDED))
ON_CLUSTER = SEARCH.c.cluster == sa.bindparam("cluster")
GIVEN_UP = sa.and_(MEASURED.status.in_(("crashed", "preempted")), MEASURED.measurement["wall_s"].as_float().is_(None))
"""The last attempt at a configuration, of which the engine said nothing: it may have run."""
STRAY = (  # not one with an OR: each has its index
    WITH_SEARCH.where(RUN.c.job_name.in_(sa.bindparam("job_names", expanding=True)), UNOWNED),
    WITH_SEARCH.where(sa.or_(RUN.c.state == RunState.ABANDONED, GIVEN_UP), IS_RECENT, ON_CLUSTER),
    WITH_SEARCH.where(RUN.c.state.in_(OPEN_RUN), SEARCH.c.state.in_(ENDED), ON_CLUSTER),
)


class Runs(StoreBase):
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
            last = connection.execute(LAST_ATTEMPT, {ID.key: search_id, "digest": digest}).one_or_none()
            if last is not None and last.state != RunState.ABANDONED:
                return read_run(connection, last.id)
            if limit is not None:
                admit_run(connection, limit)
            number = connection.execute(NUMBER_OF_RUNS, {ID.key: search_id}).scalar_one()
            at = now(connection)
            run_id = new_id()
            new = {
                "id": run_id,
                "search_id": search_id,
                "number": number,
                "digest": digest,
                "attempt": 0 if last is None else last.attempt + 1,
                "job_name": f"hp-{search_id}-r{number}-t{lease.token}-{run_id}",  # a restored database counts these again
                "token": lease.token,
                "state": RunState.INTENDED,
                "created_at": at,
            }
            connection.execute(NEW_RUN, {**new, **values})
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
                connection, run, at=at, state=RunState.SUBMITTED, handle=handle, submitted_at=run.submitted_at or at
            )

    def abandon_run(
        self, *, lease: Lease, run_id: str, cause: str, gpu_seconds: float = 0.0, account: RunAccount | None = None
    ) -> RunRecord:
        with self._writing() as connection:
            run = _leased_run(connection, lease, run_id)
            if run.state is RunState.ABANDONED:
                return run
            if run.state is RunState.FINISHED:
                raise ConflictError(f"run {run_id} is already finished")
            at = now(connection)
            ended = {"state": RunState.ABANDONED, "cause": storable(cause), "gpu_seconds": gpu_seconds, "finished_at": at}
            return change_run(connection, run, at=at, **ended, account=_stored(account))

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
                raise ConflictError(f"run {run_id} was abandoned: {run.cause}")
            at = now(connection)
            owner = connection.execute(sa.select(SEARCH.c.owner).where(SEARCH.c.id == run.search_id))
            measurement = replace(measurement, owner=owner.scalar_one())  # the search's, not the worker's
            insert_measurement(connection, measurement=measurement, search_id=run.search_id, run_id=run_id, at=at)
            run = read_run(connection, run_id)  # with the measurement as it is stored
            ended = {"state": RunState.FINISHED, "gpu_seconds": gpu_seconds, "finished_at": at}
            return change_run(connection, run, at=at, **ended, account=_stored(account))

    def runs(self, *, search_id: str) -> list[RunRecord]:
        with self._reading() as connection:
            rows = connection.execute(OF_SEARCH, {ID.key: search_id}).all()
            if not rows:
                read_search(connection, search_id)  # none yet is one thing, no such search another
            return [_run_record(row) for row in rows]

    def list_runs(
        self,
        *,
        search_id: str,
        state: RunState | None = None,
        status: MeasurementStatus | None = None,
        limit: int = 100,
        **paging: Unpack[Paging],
    ) -> Page[RunRecord]:
        filters = {RUN.c.search_id: search_id, RUN.c.state: state, MEASURED.status: status}
        listing = Listing(table=RUN, filters=filters, paging={"oldest_first": True, **paging})
        with self._reading() as connection:
            page = listing.page(connection, query=WITH_MEASUREMENT, limit=limit, record=_run_record)
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
            return [_run_figures(row) for row in rows]

    def get_run(self, *, search_id: str, run_id: str) -> RunRecord:
        with self._reading() as connection:
            return _run_of(connection, search_id, run_id)


class Strays(StoreBase):
    """Jobs that no live search owns: which runs they were started for, and what they turn out to have cost."""

    def engines_in_use(self) -> dict[str, JsonObject]:
        with self._reading() as connection:
            rows = connection.execute(USED, {"since": now(connection) - REMEMBERED}).all()
            newest = {row.cluster: row.id for row in sorted(rows, key=lambda row: row.created_at)}
            return {cluster: read_search(connection, search_id).query for cluster, search_id in newest.items()}

    def stray_runs(self, *, cluster: str, job_names: Collection[str]) -> list[RunRecord]:
        with self._reading() as connection:
            where = {"job_names": list(job_names), "since": now(connection) - REMEMBERED, "cluster": cluster}
            runs = [_run_record(row) for each in STRAY for row in connection.execute(each, where)]
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
            change_run(connection, run, at=at, gpu_seconds=cost, **({} if run.state.ended else given_up))
            spent = gpu_seconds_of(connection, search.id)
            changes = {"progress": {**search.progress, "gpu_seconds": spent}}
            if search.result is not None:
                changes["result"] = {**search.result, "search": {**search.result["search"], "gpu_seconds": spent}}
            update_search(connection, search.id, at=at, **changes)


def _stored(account: RunAccount | None) -> JsonObject | None:
    return None if account is None else encode(dict(account), field="account")


def _run_figures(row: sa.Row[Any]) -> RunFigures:
    fidelity = _fidelity(row.fidelity)
    return RunFigures(
        **{name: getattr(row, name) for name in FIGURES_AS_STORED},
        state=RunState(row.state),
        parallel=decode_configuration(row.parallel),
        fidelity=fidelity,
        expected_step_s_interval=None if row.low_s is None or row.high_s is None else (row.low_s, row.high_s),
        objective_s=row.penalised_latency_s or (row.step_s if fidelity.is_whole else row.extrapolated_step_s),
        latencies=None if row.ttft_s is None else Latencies(**{name: getattr(row, name) for name in LATENCIES}),
    )


@lru_cache(maxsize=256)
def _fidelity(text: str) -> Fidelity:
    """Runs of a search have few different ones."""
    return decode(Fidelity, text)


def _run_record(row: sa.Row[Any]) -> RunRecord:
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
    return _run_record(row_by_id(connection, ONE_RUN, run_id, kind="run"))


def _leased_run(connection: sa.Connection, lease: Lease, run_id: str) -> RunRecord:
    """A run of the search that `lease` coordinates; the search's lock guards its runs too."""
    leased_search(connection, lease)
    return _run_of(connection, lease.search_id, run_id)


def _run_of(connection: sa.Connection, search_id: str, run_id: str) -> RunRecord:
    run = read_run(connection, run_id)
    if run.search_id != search_id:
        raise NotFoundError(f"search {search_id} has no run {run_id!r}", field="run_id")
    return run


def change_run(connection: sa.Connection, run: RunRecord, *, at: datetime, **values: Any) -> RunRecord:
    """Change a run of a locked search and append its event; the run as it is now."""
    connection.execute(CHANGED_RUN, {ID.key: run.id, **checked(RUN, values)})
    return _with_event(connection, replace(run, **values), at=at)


def _with_event(connection: sa.Connection, run: RunRecord, *, at: datetime) -> RunRecord:
    """Append the event of a run's new state. Its worker makes progress, so earlier lost workers no longer count."""
    payload: JsonObject = {"run_id": run.id, "number": run.number, "state": run.state}
    if run.measurement is not None:
        payload |= {"status": run.measurement.status, "step_s": run.measurement.objective_s}
    add_event(connection, search_id=run.search_id, kind="run", payload=payload, at=at, lost_claims=0)
    return run
