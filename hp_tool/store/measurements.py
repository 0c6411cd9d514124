"""Measurements from profile runs, reports of training jobs, and imported files."""

from collections.abc import Sequence
from datetime import datetime
from typing import Any, Unpack

import sqlalchemy as sa

from hp_tool.domain.digests import configuration_digest, json_digest
from hp_tool.domain.measurement import Measurement
from hp_tool.domain.measurement_records import (
    DueRefit,
    MeasuredCluster,
    MeasurementQuery,
    MeasurementRecord,
    MeasurementState,
    NewMeasurement,
)
from hp_tool.domain.records import JsonObject, Page, Paging
from hp_tool.store import tables
from hp_tool.store.base import (
    ID,
    StoreBase,
    earlier_resource_id,
    first_resource_id,
    now,
    row_by_id,
    storable_values,
)
from hp_tool.store.columns import decode, decode_configuration, encode, new_id, row_dict
from hp_tool.store.paging import RowList

MEASUREMENT, DUE_REFIT = tables.measurements, tables.due_refits
NEW_MEASUREMENT = sa.insert(MEASUREMENT)
# Copied from the JSON to columns for filters and plots.
COPIED_COLUMNS = ("status", "step_s", "tokens_per_second_per_gpu", "peak_memory_bytes")
REPEATS_WINDOW = 1000
"""Number of newest measurements that `repeats` considers. This bounds its run time."""
MAX_DUE_REFITS = 1000
"""Maximum number of due refits returned by one call."""
MIN_SHARED_TRUST = 0.5
"""Minimum trust at which a measurement calibrates everyone's predictions. Below it, the measurement
calibrates only its owner's predictions.
"""
TRUSTED = MEASUREMENT.c.trust >= MIN_SHARED_TRUST


class Measurements(StoreBase):
    """Measurements, and calibrations that are due for a refit."""

    def add_measurement(
        self,
        *,
        measurement: NewMeasurement,
        request: JsonObject | None = None,
        idempotency_key: str | None = None,
    ) -> MeasurementRecord:
        with self._writing() as connection:
            at = now(connection)
            new = new_id()
            stored_id = first_resource_id(
                connection,
                scope="measurements",
                owner=measurement.owner,
                key=idempotency_key,
                fingerprint=json_digest(request or encode(measurement, field="measurement")),
                resource_id=new,
                at=at,
            )
            if stored_id == new:
                insert_measurement(connection, measurement=measurement, at=at, measurement_id=new)
            return _read_measurement(connection, stored_id)

    def earlier_measurement(
        self, *, request: JsonObject, idempotency_key: str, owner: str | None = None
    ) -> MeasurementRecord | None:
        with self._reading() as connection:
            used_id = earlier_resource_id(
                connection,
                scope="measurements",
                owner=owner,
                key=idempotency_key,
                fingerprint=json_digest(request),
            )
            return None if used_id is None else _read_measurement(connection, used_id)

    def get_measurement(self, *, measurement_id: str) -> MeasurementRecord:
        with self._reading() as connection:
            return _read_measurement(connection, measurement_id)

    def measurements(
        self, *, owner: str | None = None, limit: int = 100, **query: Unpack[MeasurementQuery]
    ) -> Page[MeasurementRecord]:
        not_columns = {"teaches", "repeats", *Paging.__annotations__}
        wanted = {
            "owner": owner,
            **{name: value for name, value in query.items() if name not in not_columns},
        }
        filters = {MEASUREMENT.c[name]: value for name, value in wanted.items()}
        listed = sa.select(MEASUREMENT)
        if query.get("state") is None:
            listed = listed.where(MEASUREMENT.c.state != "deleted")
        if (teaches := query.get("teaches")) is not None:
            listed = listed.where(sa.or_(TRUSTED, MEASUREMENT.c.owner == teaches))
        if (repeats := query.get("repeats")) is not None:
            conditions = [column == value for column, value in filters.items() if value is not None]
            listed = listed.where(
                MEASUREMENT.c.id.in_(_newest_repeats(listed.where(*conditions), repeats))
            )
        with self._reading() as connection:
            listing = RowList(table=MEASUREMENT, filters=filters, paging=query)
            return listing.page(connection, limit=limit, record=_record, query=listed)

    def set_measurement_state(
        self, *, measurement_id: str, state: MeasurementState, trusted: bool = True
    ) -> MeasurementRecord:
        values = {"state": state} | ({"trust": float(trusted)} if state == "accepted" else {})
        with self._writing() as connection:
            connection.execute(
                sa.update(MEASUREMENT).where(MEASUREMENT.c.id == measurement_id).values(values)
            )
            record = _read_measurement(connection, measurement_id)
            scope = {name: getattr(record, name) for name in ("cluster_key", "framework", "owner")}
            connection.execute(sa.insert(DUE_REFIT), {"id": new_id(), **scope})
            return record

    def due_refits(self) -> list[DueRefit]:
        with self._reading() as connection:
            return [
                DueRefit(**row_dict(row))
                for row in connection.execute(sa.select(DUE_REFIT).limit(MAX_DUE_REFITS))
            ]

    def drop_due_refits(self, *, refits: Sequence[DueRefit]) -> None:
        with self._writing() as connection:
            connection.execute(
                sa.delete(DUE_REFIT).where(DUE_REFIT.c.id.in_([refit.id for refit in refits]))
            )

    def measured_clusters(
        self, *, gpu: str | None = None, framework: str | None = None
    ) -> list[MeasuredCluster]:
        names = (MEASUREMENT.c.cluster_key, MEASUREMENT.c.gpu, MEASUREMENT.c.framework)
        teaching = sa.func.sum(sa.case((MEASUREMENT.c.state == "accepted", 1), else_=0))
        query: sa.Select[Any] = (
            sa.select(*names, teaching.label("measurements")).group_by(*names).order_by(*names)
        )
        if gpu is not None:
            query = query.where(MEASUREMENT.c.gpu == gpu)
        if framework is not None:
            query = query.where(MEASUREMENT.c.framework == framework)
        with self._reading() as connection:
            return [MeasuredCluster(**row_dict(row)) for row in connection.execute(query)]

    def reporters(self, *, cluster_key: str, framework: str) -> list[str]:
        query = (
            sa.select(MEASUREMENT.c.owner)
            .distinct()
            .where(~TRUSTED, MEASUREMENT.c.owner.is_not(None))
        )
        query = query.filter_by(
            cluster_key=cluster_key, framework=framework, state="accepted"
        ).order_by(MEASUREMENT.c.owner)
        with self._reading() as connection:
            return list(connection.scalars(query))


def _newest_repeats(listed: sa.Select[Any], repeats: int) -> sa.Select[Any]:
    """Select the ids of the newest `repeats` measurements of each configuration and outcome.

    Only the newest REPEATS_WINDOW measurements of `listed` are considered.
    """
    newest = MEASUREMENT.c.created_at.desc(), MEASUREMENT.c.id.desc()
    group = "problem_digest", "digest", "status"
    columns = [MEASUREMENT.c[name] for name in ("id", "created_at", *group)]
    window = listed.with_only_columns(*columns).order_by(*newest).limit(REPEATS_WINDOW).subquery().c
    order = window.created_at.desc(), window.id.desc()
    number = sa.func.row_number().over(
        partition_by=[window[name] for name in group], order_by=order
    )
    numbered = sa.select(window.id, number.label("number")).subquery().c
    return sa.select(numbered.id).where(numbered.number <= repeats)


def insert_measurement(
    connection: sa.Connection,
    *,
    measurement: NewMeasurement,
    at: datetime,
    measurement_id: str | None = None,
    search_id: str | None = None,
    run_id: str | None = None,
) -> None:
    """Store a measurement. Storing a second one for the same run violates the unique run_id."""
    values = encode(measurement, field="measurement")
    values["trust"] = float(values.pop("trusted"))
    numbers = {name: values["measurement"][name] for name in COPIED_COLUMNS}
    digest = configuration_digest(
        parallel=measurement.parallel, fidelity=measurement.measurement.fidelity
    )
    ids = {
        "id": measurement_id or new_id(),
        "search_id": search_id,
        "run_id": run_id,
        "digest": digest,
        "created_at": at,
    }
    connection.execute(NEW_MEASUREMENT, storable_values(MEASUREMENT, ids | values | numbers))


def _record(row: sa.Row[Any]) -> MeasurementRecord:
    values = {name: value for name, value in row_dict(row).items() if name not in COPIED_COLUMNS}
    values["trusted"] = values.pop("trust") >= MIN_SHARED_TRUST
    values["parallel"] = decode_configuration(values["parallel"])
    values["measurement"] = decode(Measurement, values["measurement"])
    return MeasurementRecord(**values)


def _read_measurement(connection: sa.Connection, measurement_id: str) -> MeasurementRecord:
    query = sa.select(MEASUREMENT).where(MEASUREMENT.c.id == ID)
    return _record(row_by_id(connection, query, measurement_id, kind="measurement"))
