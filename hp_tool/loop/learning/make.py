"""Fit calibrations to stored measurements, as new versions of their series, with their errors."""

import importlib
import itertools
import threading
from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, get_args

import numpy as np

from hp_tool.catalog import library
from hp_tool.domain.measurement_records import MeasuredCluster, MeasurementQuery, MeasurementRecord
from hp_tool.domain.ports import Store
from hp_tool.domain.records import CalibrationRecord, JsonObject
from hp_tool.domain.units import format_count
from hp_tool.errors import NotFoundError
from hp_tool.loop.assumptions import assumed
from hp_tool.loop.calibration import Calibration, Evidence, Prior, fit_calibration, prior_for
from hp_tool.loop.calibration.evidence import FloatArray
from hp_tool.loop.calibration.repeats import group_by_configuration
from hp_tool.loop.learning.evidence import (
    calibrating_records,
    evidence_of,
    group_by_problem,
    measurements_by_problem,
    newest_measurements,
    newest_release,
    reported_release_or,
)
from hp_tool.loop.learning.links import links_of
from hp_tool.loop.learning.outcomes import find_crashes, find_successes
from hp_tool.loop.learning.series import (
    CRASHED,
    LINKS,
    MODELS,
    OTHER_PREDICTIONS,
    PREDICTIONS,
    RAN,
    RELEASE,
    UNSEEN,
    ModelFamily,
    Series,
    model_family,
)
from hp_tool.loop.learning.stamp import digest_of, predictions_digest
from hp_tool.questions.training.links import with_links
from hp_tool.questions.training.problem import TrainingProblem, resolve_training

RECENT = 20
OWN_MODELS = "models of users"
_REFITTING = threading.Lock()
Group = tuple[TrainingProblem, list[MeasurementRecord]]
"""A problem with its stored measurements."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Accuracy:
    """Median |predicted / measured - 1| of step times, before and after calibration."""

    measurements: int
    """Number of measurements with a step time. Others (out of memory) calibrate only memory."""
    error_before: float | None
    """Error of the cost model; None without step times."""
    error_after: float | None
    """Error of calibrated predictions for left-out measurements; None with fewer than two."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MadeCalibration:
    """A calibration of one series, as made by `calibrate`."""

    record: CalibrationRecord
    new: bool
    """False if the newest stored version was fitted to the same measurements."""
    models: tuple[str, ...]
    """Models of the measurements."""
    accuracy: Accuracy


def calibrate(
    *, store: Store, gpu: str | None = None, framework: str | None = None, owner: str = ""
) -> tuple[MadeCalibration, ...]:
    """Calibrate every series with measurements, including the private ones of `owner`.

    `gpu` and `framework` restrict the series. Series are skipped if their newest version was fitted
    to the same measurements with the same cost model.
    """
    refit(store=store)
    clusters = store.measured_clusters(gpu=gpu, framework=framework)
    owners = dict.fromkeys(("", owner))
    return tuple(
        made
        for cluster in clusters
        for each in owners
        for made in calibrate_cluster(
            store=store, cluster_key=cluster.cluster_key, framework=cluster.framework, owner=each
        )
    )


def calibrate_cluster(
    *, store: Store, cluster_key: str, framework: str, owner: str = ""
) -> tuple[MadeCalibration, ...]:
    """Calibrate every series of a cluster and framework.

    Owners get a separate series if their untrusted reports make a difference. Series that lost all
    measurements get an empty version.
    """
    groups: defaultdict[ModelFamily, list[Group]] = defaultdict(list)
    for problem, same in group_by_problem(
        newest_measurements(store, cluster_key=cluster_key, framework=framework, owner=owner),
        resolve=resolve_training,
    ):
        groups[model_family(problem.model)].append((problem, same))
    made = []
    for family in get_args(ModelFamily):
        series = Series(
            cluster_key=cluster_key, framework=framework, model_family=family, owner=owner
        )
        known = groups.get(family)
        if known and (not owner or any(not record.trusted for _, same in known for record in same)):
            made.append(_make(store, series, known))
        elif (last := store.latest_calibration(**asdict(series))) is not None and (
            _is_emptied(store, last) if not owner else last.num_measurements > 0
        ):
            made.append(_emptied(store, series, last))
    return tuple(made)


def refit(*, store: Store) -> tuple[MadeCalibration, ...]:
    """Refit every cluster and framework with a measurement whose state changed.

    This includes shared and private calibrations. Concurrent callers in the same process wait, and
    then find nothing to do.
    """
    if not store.due_refits():
        return ()
    made: list[MadeCalibration] = []
    with _REFITTING:
        while due := store.due_refits():
            places: defaultdict[tuple[str, str], dict[str, None]] = defaultdict(lambda: {"": None})
            for change in due:
                places[change.cluster_key, change.framework][change.owner or ""] = None
            for (key, framework), owners in places.items():
                reporters = dict.fromkeys(store.reporters(cluster_key=key, framework=framework))
                for owner in owners | reporters:
                    made += calibrate_cluster(
                        store=store, cluster_key=key, framework=framework, owner=owner
                    )
            store.drop_due_refits(refits=due)
    return tuple(made)


def calibrate_series(*, store: Store, series: Series) -> MadeCalibration | None:
    """Calibrate one series (cluster, framework and model family); None without measurements."""
    groups = list(measurements_by_problem(series, store=store))
    return _make(store, series, groups) if groups else None


def _make(store: Store, series: Series, groups: Sequence[Group]) -> MadeCalibration:
    records = [record for _, same in groups for record in same]
    release = newest_release(records)
    links = links_of(groups)
    evidence = Evidence.concatenate(
        [
            evidence_of(
                same, problem=with_links(problem, links), release=reported_release_or(release)
            )
            for problem, same in groups
        ]
    )
    prior = prior_for(kind=groups[0][0].cluster.gpu.kind)
    calibration = fit_calibration(evidence=evidence, prior=prior)
    unseen_s = predicted_unseen(evidence, prior=prior)
    accuracy = accuracy_of(evidence, unseen_s=unseen_s)
    # All users can read calibrations, so names of a user's own models are omitted.
    models = Counter(
        record.model if library.has_entry("models", record.model) else OWN_MODELS
        for record in records
    )
    by_id = zip(evidence.measurement_ids, unseen_s.tolist(), strict=True)
    facts = {
        PREDICTIONS: digest_of(groups[0][0]),
        MODELS: dict(sorted(models.items())),
        RELEASE: release,
        CRASHED: find_crashes(groups),
        RAN: find_successes(groups),
        UNSEEN: {identity: seconds for identity, seconds in by_id if np.isfinite(seconds)},
    } | ({} if links.as_stated else {LINKS: asdict(links)})
    record, new = save(
        store, series=series, calibration=calibration, accuracy=accuracy, facts=facts
    )
    return MadeCalibration(record=record, new=new, models=tuple(sorted(models)), accuracy=accuracy)


def _is_emptied(store: Store, last: CalibrationRecord) -> bool:
    """Return True if every source measurement was withdrawn."""

    def teaches(identity: str) -> bool:
        try:
            return bool(calibrating_records([store.get_measurement(measurement_id=identity)]))
        except NotFoundError:
            return False

    return last.num_measurements > 0 and not any(
        map(teaches, last.payload.get("measurement_ids", ()))
    )


def _emptied(store: Store, series: Series, last: CalibrationRecord) -> MadeCalibration:
    """Return the next version of a series that has no measurements left. It corrects nothing."""
    nothing = Accuracy(measurements=0, error_before=None, error_after=None)
    facts = {PREDICTIONS: last.payload.get(PREDICTIONS)}
    record, new = save(
        store, series=series, calibration=fit_calibration(), accuracy=nothing, facts=facts
    )
    return MadeCalibration(record=record, new=new, models=(), accuracy=nothing)


def save(
    store: Store, *, series: Series, calibration: Calibration, accuracy: Accuracy, facts: JsonObject
) -> tuple[CalibrationRecord, bool]:
    """Store a calibration as the next version of its series, unless the newest one is equal.

    Return True if it was stored. `facts` are additional payload entries; serving has none, because
    only searches read its calibrations.
    """
    payload: dict[str, Any] = (
        calibration.to_dict() | {"accuracy": asdict(accuracy), PREDICTIONS: None} | facts
    )
    key = asdict(series)
    last = store.latest_calibration(**key)
    if last is not None and last.payload == payload:
        return last, False
    ids = calibration.measurement_ids
    return store.save_calibration(**key, payload=payload, num_measurements=len(ids)), True


def accuracy_of(evidence: Evidence, *, unseen_s: FloatArray) -> Accuracy:
    """Return the errors of the cost model, and of fits on left-out measurements."""
    measured = evidence.measured_step_s
    before = (
        np.sum(list(evidence.parts_s.values()), axis=0)
        if evidence.parts_s
        else np.zeros(len(evidence))
    )
    return Accuracy(
        measurements=int(np.isfinite(measured).sum()),
        error_before=_median_error(before, measured),
        error_after=_median_error(unseen_s, measured),
    )


def predicted_unseen(evidence: Evidence, *, prior: Prior) -> FloatArray:
    """Return the median step time of each row predicted by a fit without its fold, in seconds.

    The shape is (n,), with NaN if there is nothing to fit. Repeats of a configuration are in the
    same fold, because a fit to one of them predicts the others. Folds follow the storage order
    instead of the random ids, so importing the same measurements again gives the same result.
    """
    predicted = np.full(len(evidence), np.nan)
    timed = np.flatnonzero(np.isfinite(evidence.measured_step_s))
    runs = replace(
        evidence.take(timed), measured_memory_bytes=np.full(len(timed), np.nan)
    )  # Memory is not needed.
    groups = group_by_configuration(runs)
    if len(groups) < 2:
        return predicted
    for several in np.array_split(
        np.arange(len(groups)), min(assumed().learning.folds, len(groups))
    ):
        fold = np.concatenate([groups[number] for number in several])
        rest, unseen = runs.take(np.setdiff1d(np.arange(len(timed)), fold)), runs.take(fold)
        fit = fit_calibration(evidence=rest, prior=prior).step_time
        step = fit.predict(
            parts_s=unseen.parts_s, layer_passes=unseen.layer_passes, features=unseen.features
        )
        predicted[timed[fold]] = step.median_s
    return predicted


def import_fit_modules() -> None:
    """Import the modules needed for fitting ahead of time, which saves about a second on the first
    fit.
    """
    for name in ("scipy.optimize", "scipy.special", "threadpoolctl"):
        importlib.import_module(name)


def _median_error(predicted: FloatArray, measured: FloatArray) -> float | None:
    errors = np.abs(predicted / measured - 1.0)
    known = errors[np.isfinite(errors)]
    return float(np.median(known)) if len(known) else None


class Follower:
    """Keep calibrations up to date with measurements. Several instances may share one store."""

    def __init__(self, *, store: Store) -> None:
        self._store = store
        self._seen: str | None = None
        """Newest measurement at the last check."""

    def catch_up(self) -> tuple[MadeCalibration, ...]:
        """Calibrate every cluster and framework with an outdated calibration.

        Return the new versions. A calibration is outdated if there are newer measurements, if the
        state of a source measurement changed, or if it was fitted with another cost model.
        """
        refitted = refit(store=self._store)
        return tuple(each for each in (*refitted, *self._measured()) if each.new)

    def _measured(self) -> tuple[MadeCalibration, ...]:
        last = self._store.measurements(limit=1, state="accepted").items
        if not last or last[0].id == self._seen:
            return ()
        made = [
            each
            for cluster in self._store.measured_clusters()
            for owner in (
                "",
                *self._store.reporters(
                    cluster_key=cluster.cluster_key, framework=cluster.framework
                ),
            )
            if self._behind(cluster, owner)
            for each in calibrate_cluster(
                store=self._store,
                cluster_key=cluster.cluster_key,
                framework=cluster.framework,
                owner=owner,
            )
        ]
        self._seen = last[0].id
        return tuple(made)

    def _behind(self, cluster: MeasuredCluster, owner: str) -> bool:
        key, framework = cluster.cluster_key, cluster.framework
        query: MeasurementQuery = {
            "cluster_key": key,
            "framework": framework,
            "state": "accepted",
            "teaches": owner,
        }
        measured = self._store.measurements(limit=1, **query).items
        calibrated = self._store.list_calibrations(
            cluster_key=key, framework=framework, owners=(owner,), limit=1
        ).items
        if not measured or not calibrated:
            return bool(measured)
        return calibrated[0].created_at < measured[0].created_at or is_outdated(
            self._store, cluster, owner=owner
        )


def is_outdated(store: Store, cluster: MeasuredCluster, *, owner: str = "") -> bool:
    """Return True if any model family's newest calibration was fitted with another cost model."""
    key, framework = cluster.cluster_key, cluster.framework
    recent = store.measurements(
        cluster_key=key, framework=framework, state="accepted", teaches=owner, limit=RECENT
    ).items
    taught = group_by_problem(calibrating_records(recent, owner=owner), resolve=resolve_training)
    for problem, _ in itertools.islice(taught, 1):
        for family in get_args(ModelFamily):
            last = store.latest_calibration(
                cluster_key=key, framework=framework, model_family=family, owner=owner
            )
            digest = predictions_digest(
                problem.cluster, framework=framework, experts=family == "moe"
            )
            if last is not None and last.payload.get(PREDICTIONS) != digest:
                return True
    return False


def outdated_notice(store: Store) -> str | None:
    """Return a notice about calibrations fitted with another cost model; None if there are none."""
    count = sum(is_outdated(store, cluster) for cluster in store.measured_clusters())
    return (
        f"not used: what was learnt about {format_count(count, 'cluster')} {OTHER_PREDICTIONS}"
        if count
        else None
    )
