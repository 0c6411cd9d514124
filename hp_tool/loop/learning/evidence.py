"""Evidence from stored measurements: measured values with current or calibrated predictions."""

import math
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, fields, replace
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from hp_tool.cost.candidates import Candidates
from hp_tool.domain.digests import json_digest
from hp_tool.domain.measurement import Fidelity, Measurement
from hp_tool.domain.measurement_records import MeasurementQuery, MeasurementRecord
from hp_tool.domain.parallel import ParallelConfig
from hp_tool.domain.ports import Store
from hp_tool.domain.query import Query
from hp_tool.domain.records import REUSED, CalibrationRecord
from hp_tool.errors import HpToolError
from hp_tool.loop.assumptions import assumed
from hp_tool.loop.calibration import Evidence, allocated_bytes, layer_passes, residual_features
from hp_tool.loop.calibration.evidence import FloatArray
from hp_tool.loop.learning.series import (
    LINKS,
    RELEASE,
    UNSEEN,
    Series,
    model_family,
    read_calibration,
)
from hp_tool.loop.search.fidelity import num_gpus, reduce_run
from hp_tool.questions.schema import parse_query
from hp_tool.questions.training.links import Links, with_links
from hp_tool.questions.training.problem import TrainingProblem, resolve_training

Problem = TypeVar("Problem")
Release = Callable[[MeasurementRecord], str | None]
"""Return the framework release of a run."""


def stored_evidence(
    *, store: Store, series: Series, release: str | None = None, without_search: str | None = None
) -> Evidence:
    """Return the newest measurements of a series with predictions by the current cost model.

    `release` is the release in the query. None means that releases are not distinguished.
    """
    groups = measurements_by_problem(series, store=store, without_search=without_search)
    counted: Release = (lambda _: None) if release is None else reported_release_or(release)
    return Evidence.concatenate(
        [evidence_of(records, problem=problem, release=counted) for problem, records in groups]
    )


def measurements_by_problem(
    series: Series, *, store: Store, without_search: str | None = None
) -> Iterator[tuple[TrainingProblem, list[MeasurementRecord]]]:
    """Return a series' newest calibrating measurements by problem, for all models and node counts.

    Measurements are skipped if their query can no longer be parsed or modelled.
    """
    framework = series.framework.partition(" ")[0]  # A series per release.
    records = newest_measurements(
        store,
        cluster_key=series.cluster_key,
        framework=framework,
        owner=series.owner,
        without_search=without_search,
    )
    for problem, same in group_by_problem(records, resolve=resolve_training):
        if series.model_family in ("", model_family(problem.model)):
            yield problem, same


def newest_measurements(
    store: Store,
    *,
    cluster_key: str,
    framework: str,
    owner: str = "",
    without_search: str | None = None,
) -> list[MeasurementRecord]:
    """Return the newest calibrating measurements of this cluster and framework.

    There are a few per configuration. They are those of all users or of one owner, without those of
    one search.
    """
    query: MeasurementQuery = {
        "cluster_key": cluster_key,
        "framework": framework,
        "state": "accepted",
        "teaches": owner,
    }
    query["repeats"] = assumed().learning.repeats
    found = store.measurements(limit=assumed().learning.measurements, **query).items
    return [
        record
        for record in calibrating_records(found, owner=owner)
        if without_search is None or record.search_id != without_search
    ]


def calibrating_records(
    records: Iterable[MeasurementRecord], *, owner: str = ""
) -> list[MeasurementRecord]:
    """Return the records that may calibrate predictions.

    They are accepted, they are trusted or the owner's own, and they are not reused measurements of
    another record.
    """
    trusted = (record for record in records if record.trusted or record.owner == owner)
    return [
        record
        for record in trusted
        if record.state == "accepted" and REUSED not in record.predicted
    ]


def group_by_problem(
    records: Sequence[MeasurementRecord], *, resolve: Callable[[Query], Problem]
) -> Iterator[tuple[Problem, list[MeasurementRecord]]]:
    """Group records by their resolved problem. Skip those that this version cannot resolve."""
    by_query: dict[str, list[MeasurementRecord]] = {}
    for record in records:
        by_query.setdefault(json_digest(record.query), []).append(record)
    for same in by_query.values():
        try:
            yield resolve(parse_query(same[0].query)), same
        except HpToolError:
            continue


def evidence_of(
    records: Sequence[MeasurementRecord],
    *,
    problem: TrainingProblem,
    release: Release = lambda _: None,
) -> Evidence:
    """Return measurements of a problem's configurations with their predictions.

    A reduced run is compared with the prediction for the reduced configuration. A run on fewer
    devices than the cluster has (objective min_gpus) is compared with the prediction for that
    number. Releases are features, so runs of the same release are corrected alike.
    """
    pieces = []
    whole: dict[tuple[int, str | None], list[MeasurementRecord]] = {}
    for record in records:
        fidelity = record.measurement.fidelity
        if fidelity.is_whole:
            whole.setdefault((num_gpus(record.parallel), release(record)), []).append(record)
        else:
            reduced_run, parallel = reduced_problem(
                problem, parallel=_trained(record), fidelity=fidelity
            )
            pieces.append(
                _evidence(
                    [replace(record, parallel=parallel)],
                    problem=reduced_run,
                    release=release(record),
                )
            )
    for (devices, ran), same in whole.items():
        smaller = problem if devices == problem.cluster.num_gpus else problem.with_num_gpus(devices)
        pieces.append(_evidence(same, problem=smaller, release=ran))
    return Evidence.concatenate(pieces)


def _evidence(
    records: Sequence[MeasurementRecord], *, problem: TrainingProblem, release: str | None
) -> Evidence:
    candidates = Candidates.from_configs(_trained(record) for record in records)
    costs = problem.costs(candidates)
    outcomes = [record.measurement for record in records]
    device_bytes = problem.cluster.gpu.memory_bytes - costs.memory_parts["overhead"]
    return Evidence(
        measurement_ids=tuple(record.id for record in records),
        parts_s=costs.parts_without_retries,
        layer_passes=layer_passes(case=problem, candidates=candidates),
        memory_bytes=allocated_bytes(costs),
        capacity_bytes=device_bytes,
        measured_step_s=np.array(
            [m.step_s if m.status == "ok" else None for m in outcomes], dtype=np.float64
        ),
        measured_memory_bytes=np.array([m.peak_memory_bytes for m in outcomes], dtype=np.float64),
        out_of_memory=np.array([m.status == "oom" for m in outcomes], dtype=np.bool_),
        features=residual_features(case=problem.as_release(release), candidates=candidates),
        measured_parts_s=measured_parts(outcomes),
    )


def measured_parts(outcomes: Sequence[Measurement]) -> dict[str, FloatArray]:
    """Return the seconds by part that traces measured, each of shape (n,); NaN for other runs.

    Empty without traces.
    """
    traced = [m.parts_s or {} for m in outcomes]
    names = sorted({name for parts in traced for name in parts})
    return {
        name: np.array([parts.get(name, math.nan) for parts in traced], dtype=np.float64)
        for name in names
    }


def _trained(record: MeasurementRecord) -> ParallelConfig:
    assert isinstance(record.parallel, ParallelConfig)
    return record.parallel


def query_release(record: MeasurementRecord) -> str | None:
    """Return the framework release that a record's query names."""
    release: str | None = (record.query.get("training") or {}).get("framework_version")
    return release


def release_of(record: MeasurementRecord) -> str | None:
    """Return the release that a run reports, else the one that its query names."""
    return record.measurement.versions.get(record.framework) or query_release(record)


def reported_release_or(release: str | None) -> Release:
    """Return a function that gives a run's reported release, or `release` if it reports none."""
    return lambda record: release_of(record) or release


def newest_release(records: Iterable[MeasurementRecord]) -> str | None:
    """Return the newest release reported by any run; None if no run reports one."""
    known = (release for record in records if (release := release_of(record)) is not None)
    return max(
        known,
        key=lambda release: [int(number) for number in re.findall(r"\d+", release)],
        default=None,
    )


def reduced_problem(
    problem: TrainingProblem, *, parallel: ParallelConfig, fidelity: Fidelity
) -> tuple[TrainingProblem, ParallelConfig]:
    """Return the problem and configuration of a reduced run."""
    model, workload, config = reduce_run(
        fidelity=fidelity, model=problem.model, training=problem.workload, parallel=parallel
    )
    return replace(problem.with_num_gpus(num_gpus(config)), model=model, workload=workload), config


NORMAL_MAD = 0.6745
"""Median absolute deviation of a standard normal distribution."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Residual:
    """A measured run with predictions by the current cost model and by the stored calibration.

    All values are step times in seconds.
    """

    record: MeasurementRecord
    measured_s: float
    before_s: float
    """Predicted step time without a calibration."""
    after_s: float
    """Predicted step time by a calibration fitted without this run."""
    taught: bool
    """True if the calibration was fitted to this run."""
    outlier: bool = False
    """True if the run's deviation is an outlier among the others."""

    @property
    def error_before(self) -> float:
        return self.before_s / self.measured_s - 1.0

    @property
    def error_after(self) -> float:
        return self.after_s / self.measured_s - 1.0


def residual_report(*, store: Store, record: CalibrationRecord) -> tuple[Residual, ...]:
    """Return the residuals of the newest visible measurements of the record's series, oldest first.

    Only measurements with a step time are included. The list is empty if this version cannot read
    the calibration.
    """
    calibration = read_calibration(record)
    if calibration is None:
        return ()
    series = Series(**{field.name: getattr(record, field.name) for field in fields(Series)})
    release, unseen = (
        reported_release_or(record.payload.get(RELEASE)),
        record.payload.get(UNSEEN) or {},
    )
    links = Links.read(record.payload.get(LINKS))
    residuals: list[Residual] = []
    for problem, same in measurements_by_problem(series, store=store):
        evidence = evidence_of(same, problem=with_links(problem, links), release=release)
        step = calibration.step_time.predict(
            parts_s=evidence.parts_s, layer_passes=evidence.layer_passes, features=evidence.features
        )
        stated = (
            evidence if links.as_stated else evidence_of(same, problem=problem, release=release)
        )
        before = np.sum(list(stated.parts_s.values()), axis=0)
        by_id = {one.id: one for one in same}
        for row in np.flatnonzero(np.isfinite(evidence.measured_step_s)):
            identity = evidence.measurement_ids[row]
            residuals.append(
                Residual(
                    record=by_id[identity],
                    measured_s=float(evidence.measured_step_s[row]),
                    before_s=float(before[row]),
                    after_s=unseen.get(identity, float(step.median_s[row])),
                    taught=identity in calibration.measurement_ids,
                )
            )
    ordered = sorted(
        residuals, key=lambda residual: (residual.record.created_at, residual.record.id)
    )
    off = mark_outliers(np.array([residual.measured_s / residual.after_s for residual in ordered]))
    return tuple(
        replace(residual, outlier=bool(each)) for residual, each in zip(ordered, off, strict=True)
    )


def mark_outliers(ratios: FloatArray) -> NDArray[np.bool_]:
    """Return a mask of the ratios measured / predicted that are outliers, shape (n,).

    The criterion is 0.6745 |x - median(x)| / MAD(x) > 3.5 for x = ln(ratio). Unlike the fit's own
    deviation, median and MAD are robust against outliers.
    """
    if not len(ratios):
        return np.zeros(0, dtype=np.bool_)
    deviation = np.abs(np.log(ratios) - np.median(np.log(ratios)))
    scatter = max(float(np.median(deviation)), assumed().learning.least_scatter)
    off: NDArray[np.bool_] = NORMAL_MAD * deviation > assumed().learning.outlier_score * scatter
    return off
