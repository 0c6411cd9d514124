"""Calibrations from stored measurements: each as the next version of its series, with its error before and after."""

import itertools
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, get_args

import numpy as np
from numpy.typing import NDArray

from hp_tool.calibration import Calibration, Evidence, Prior, fit_calibration, prior_for
from hp_tool.calibration.evidence import FloatArray
from hp_tool.domain.ports import Store
from hp_tool.domain.records import CalibrationRecord, MeasuredCluster, MeasurementRecord
from hp_tool.learning.evidence import MAX_MEASUREMENTS, asked_release, by_problem, evidence_of, is_release, teaching
from hp_tool.learning.series import OTHER_PREDICTIONS, PREDICTIONS, ModelFamily, Series, model_family, software
from hp_tool.learning.stamp import digest_of, predictions_digest
from hp_tool.training.problem import TrainingProblem
from hp_tool.units import counted

RECENT = 20
FOLDS = 10
"""Held-out error: each tenth is predicted by a fit of the other nine."""
Group = tuple[TrainingProblem, list[MeasurementRecord]]
"""A problem, and what was measured of it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Accuracy:
    """How far predicted step times are from measured ones: the median of |predicted / measured - 1|."""

    measurements: int
    """With a step time; the others (out of memory) teach memory alone."""
    error_before: float | None
    """Of the cost model alone; None without a step time."""
    error_after: float | None
    """Of calibrated predictions for measurements that their fit did not see; None with fewer than two."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MadeCalibration:
    """One series after `calibrate`."""

    record: CalibrationRecord
    new: bool
    """False: the newest version already says all that these measurements do."""
    models: tuple[str, ...]
    """Whose measurements it learnt from."""
    accuracy: Accuracy


def calibrate(*, store: Store, gpu: str | None = None, framework: str | None = None) -> tuple[MadeCalibration, ...]:
    """A calibration of every series that has measurements, of this GPU and framework where they are given.

    A series whose newest version was made from the same measurements, by the same cost model, keeps it.
    """
    clusters = store.measured_clusters(gpu=gpu, framework=framework)
    return tuple(made for cluster in clusters for made in calibrate_cluster(store=store, cluster=cluster))


def calibrate_cluster(*, store: Store, cluster: MeasuredCluster) -> tuple[MadeCalibration, ...]:
    """The same for one cluster and framework."""
    page = store.measurements(cluster_key=cluster.cluster_key, framework=cluster.framework, limit=MAX_MEASUREMENTS)
    by_series = _by_series(teaching(page.items), cluster_key=cluster.cluster_key)
    return tuple(_make(store, series, groups) for series, groups in by_series.items())


def _by_series(records: Sequence[MeasurementRecord], *, cluster_key: str) -> dict[Series, list[Group]]:
    """Records by series: every family over all releases, and each release that a query names on its own."""
    groups: defaultdict[Series, list[Group]] = defaultdict(list)
    releases = {release for record in records if (release := asked_release(record)) is not None}
    for problem, same in by_problem(records):
        whole = Series(cluster_key=cluster_key, framework=problem.workload.framework, model_family=model_family(problem.model))
        groups[whole].append((problem, same))
        for release in releases:
            if chosen := [record for record in same if is_release(record, release)]:
                named = software(replace(problem.workload, framework_version=release))
                groups[replace(whole, framework=named)].append((problem, chosen))
    return groups


def _make(store: Store, series: Series, groups: Sequence[Group]) -> MadeCalibration:
    evidence = Evidence.concatenate([evidence_of(records, problem=problem) for problem, records in groups])
    prior = prior_for(kind=groups[0][0].cluster.gpu.kind)
    calibration = fit_calibration(evidence=evidence, prior=prior)
    accuracy = accuracy_of(evidence, prior=prior)
    predictions = digest_of(groups[0][0])
    record, new = save(store, series=series, calibration=calibration, accuracy=accuracy, predictions=predictions)
    models = {record.model for _, records in groups for record in records}
    return MadeCalibration(record=record, new=new, models=tuple(sorted(models)), accuracy=accuracy)


def save(
    store: Store, *, series: Series, calibration: Calibration, accuracy: Accuracy, predictions: str | None
) -> tuple[CalibrationRecord, bool]:
    """Store as the next version of its series, unless the newest one is the same; whether it was stored.

    `predictions`: the digest of what it corrects (`stamp.predictions_digest`); None for serving, whose calibrations are read by
    nobody else.
    """
    payload: dict[str, Any] = calibration.to_dict()
    payload |= {"accuracy": asdict(accuracy), PREDICTIONS: predictions}
    key = asdict(series)
    newest = store.latest_calibration(**key)
    if newest is not None and newest.payload == payload:
        return newest, False
    ids = calibration.measurement_ids
    return store.save_calibration(**key, payload=payload, num_measurements=len(ids)), True


def accuracy_of(evidence: Evidence, *, prior: Prior) -> Accuracy:
    """The cost model's error on these measurements, and that of fits which did not see the ones they predict."""
    timed = np.flatnonzero(np.isfinite(evidence.measured_step_s))
    if len(timed) == 0:
        return Accuracy(measurements=0, error_before=None, error_after=None)
    measured = evidence.measured_step_s[timed]
    before = np.sum([seconds[timed] for seconds in evidence.parts_s.values()], axis=0)
    after = _held_out(evidence, timed, prior=prior) if len(timed) > 1 else None
    return Accuracy(
        measurements=len(timed),
        error_before=_median_error(before, measured),
        error_after=None if after is None else _median_error(after, measured),
    )


def _held_out(evidence: Evidence, timed: NDArray[np.intp], *, prior: Prior) -> FloatArray:
    """(timed,) medians, each predicted by a fit without its fold. Folds follow the order of storage, not the random ids: the
    same measurements, imported again, give the same answer."""
    predicted = np.empty(len(timed))
    for fold in np.array_split(np.arange(len(timed)), min(FOLDS, len(timed))):
        rest = np.setdiff1d(np.arange(len(evidence)), timed[fold])
        calibration = fit_calibration(evidence=evidence.take(rest), prior=prior)
        unseen = evidence.take(timed[fold])
        step = calibration.step_time.predict(parts_s=unseen.parts_s, layer_passes=unseen.layer_passes, features=unseen.features)
        predicted[fold] = step.median_s
    return predicted


def _median_error(predicted: FloatArray, measured: FloatArray) -> float:
    return float(np.median(np.abs(predicted / measured - 1.0)))


class Follower:
    """Keeps calibrations up with measurements. Several may follow one store: who comes later finds nothing left to do."""

    def __init__(self, *, store: Store) -> None:
        self._store = store
        self._seen: str | None = None
        """The newest measurement when it last looked."""

    def catch_up(self) -> tuple[MadeCalibration, ...]:
        """Calibrate every cluster and framework that was measured since its newest calibration, or whose calibrations correct
        other predictions than today's; the versions that are new.
        """
        newest = self._store.measurements(limit=1).items
        if not newest or newest[0].id == self._seen:
            return ()
        made = [
            each
            for cluster in self._store.measured_clusters()
            if self._behind(cluster)
            for each in calibrate_cluster(store=self._store, cluster=cluster)
        ]
        self._seen = newest[0].id
        return tuple(each for each in made if each.new)

    def _behind(self, cluster: MeasuredCluster) -> bool:
        key, framework = cluster.cluster_key, cluster.framework
        measured = self._store.measurements(cluster_key=key, framework=framework, limit=1).items
        calibrated = self._store.list_calibrations(cluster_key=key, framework=framework, limit=1).items
        if not measured or not calibrated:
            return bool(measured)
        return calibrated[0].created_at < measured[0].created_at or outdated(self._store, cluster)


def outdated(store: Store, cluster: MeasuredCluster) -> bool:
    """Whether the newest calibration of any family of models corrects other predictions than today's."""
    key, framework = cluster.cluster_key, cluster.framework
    recent = store.measurements(cluster_key=key, framework=framework, limit=RECENT).items
    for problem, _ in itertools.islice(by_problem(teaching(recent)), 1):
        for family in get_args(ModelFamily):
            newest = store.latest_calibration(cluster_key=key, framework=framework, model_family=family)
            digest = predictions_digest(problem.cluster, framework=framework, experts=family == "moe")
            if newest is not None and newest.payload.get(PREDICTIONS) != digest:
                return True
    return False


def outdated_notice(store: Store) -> str | None:
    """What to say of stored calibrations that correct other predictions than today's; None if there are none."""
    count = sum(outdated(store, cluster) for cluster in store.measured_clusters())
    return f"not used: what was learnt about {counted(count, 'cluster')} {OTHER_PREDICTIONS}" if count else None
