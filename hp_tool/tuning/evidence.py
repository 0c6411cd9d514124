"""What earlier measurements on the same cluster teach: stored numbers beside today's predictions for them."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from hp_tool.calibration import Evidence
from hp_tool.cost.candidates import Candidates
from hp_tool.domain.digests import json_digest
from hp_tool.domain.measurement import Fidelity, Measurement
from hp_tool.domain.ports import Store
from hp_tool.domain.records import MeasurementRecord
from hp_tool.errors import HpToolError
from hp_tool.problem import TrainingProblem, resolve_training
from hp_tool.schema import parse_query
from hp_tool.search.coordinator import REUSED
from hp_tool.search.problem import SearchProblem
from hp_tool.search.table import allocated_bytes, layer_passes

MAX_MEASUREMENTS = 200
"""The newest ones; a few multipliers need no more."""
MIN_TRUST = 0.5
"""Reported numbers below it do not touch a shared calibration."""


def earlier_evidence(*, store: Store, problem: SearchProblem, search_id: str) -> Evidence:
    """Measurements of other searches and reports on this cluster and framework, predicted again with today's cost model.

    One whose query can no longer be read or modelled teaches nothing and is passed over.
    """
    page = store.measurements(cluster_key=problem.cluster_key, framework=problem.training.framework, limit=MAX_MEASUREMENTS)
    by_query: dict[str, list[MeasurementRecord]] = {}
    for record in page.items:
        own = record.search_id == search_id
        if not own and record.trust >= MIN_TRUST and REUSED not in record.predicted and is_whole(record.measurement):
            by_query.setdefault(json_digest(record.query), []).append(record)
    pieces = []
    for records in by_query.values():
        try:
            pieces.append(_evidence(records, problem=resolve_training(parse_query(records[0].query))))
        except HpToolError:
            continue
    return Evidence.concatenate(pieces)


def reusable_measurements(*, store: Store, problem: SearchProblem) -> dict[str, str]:
    """Measurement id by configuration digest: whole runs of this very problem that may stand for new ones, newest first."""
    page = store.measurements(
        cluster_key=problem.cluster_key, problem_digest=problem.problem_digest, source="profile", limit=MAX_MEASUREMENTS
    )
    usable = (record for record in page.items if is_whole(record.measurement) and record.measurement.status in ("ok", "oom"))
    found: dict[str, str] = {}
    for record in usable:
        row = problem.row(record.parallel)
        if row is not None:
            found.setdefault(problem.digest(row), record.id)
    return found


def is_whole(measurement: Measurement) -> bool:
    """Whether the configuration itself ran, not a reduction of it."""
    fidelity: Fidelity = measurement.fidelity
    return fidelity.num_hidden_layers is fidelity.data_parallel_size is fidelity.num_micro_batches is None


def _evidence(records: Iterable[MeasurementRecord], *, problem: TrainingProblem) -> Evidence:
    records = tuple(records)
    candidates = Candidates.from_configs(record.parallel for record in records)
    costs = problem.costs(candidates)
    device_bytes = problem.cluster.gpu.memory_bytes - costs.memory_parts["overhead"]
    return Evidence(
        measurement_ids=tuple(record.id for record in records),
        parts_s=costs.parts,
        layer_passes=layer_passes(candidates=candidates, model=problem.model, training=problem.workload),
        memory_bytes=allocated_bytes(costs),
        capacity_bytes=device_bytes,
        measured_step_s=np.array([_number(r.measurement.step_s if r.measurement.status == "ok" else None) for r in records]),
        measured_memory_bytes=np.array([_number(r.measurement.peak_memory_bytes) for r in records]),
        out_of_memory=np.array([r.measurement.status == "oom" for r in records], dtype=np.bool_),
    )


def _number(value: float | None) -> float:
    return float("nan") if value is None else float(value)
