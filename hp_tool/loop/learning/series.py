"""Series of calibrations, and the newest calibration for a problem.

There is one series per cluster, software and model family.
"""

from __future__ import annotations

import copy
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from datetime import datetime
from typing import Literal, Unpack, get_args

from hp_tool.domain.hardware import ClusterSpec
from hp_tool.domain.measurement import Hardware
from hp_tool.domain.measurement_records import MeasurementQuery, MeasurementRecord
from hp_tool.domain.model import ModelSpec
from hp_tool.domain.ports import Store
from hp_tool.domain.records import CalibrationRecord
from hp_tool.loop.calibration import Calibration
from hp_tool.loop.learning.stamp import digest_of
from hp_tool.questions.training.calibrated import CalibratedPredictor
from hp_tool.questions.training.links import Links
from hp_tool.questions.training.problem import TrainingProblem

ModelFamily = Literal["dense", "moe"]
PREDICTIONS = "predictions"
"""Key of a stored calibration for the digest of the predictions that it corrects."""
MODELS, RELEASE, UNSEEN, LINKS = "models", "release", "unseen_s", "links"
CRASHED, RAN = "crashed", "ran"
"""Further keys of a stored calibration.

`MODELS`: number of measurements by model. `RELEASE`: the newest release of the measurements,
assumed for queries without one. `UNSEEN`: seconds predicted by fits without a measurement, by its
id. `CRASHED`, `RAN`: configurations that crashed or ran (`learning.outcomes`). `LINKS`: bandwidths
relative to the stated ones, fitted to traces (`learning.links`).
"""
OTHER_PREDICTIONS = (
    "corrects predictions of other constants or another cost model; a worker fits it again from "
    "the stored measurements, and "
    "`hp-tool calibrate` does so at once"
)
PENDING = (
    "fitted before other measurements of this cluster were accepted or excluded; `hp-tool "
    "calibrate` fits it again at once, a "
    "worker within a minute"
)
MOST_KNOWN = 1000
MAX_AGE_S = 5.0
"""Seconds that a database answer is cached, because a batch reads the same series thousands of
times per second.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Series:
    """Key shared by all versions of a calibration."""

    cluster_key: str
    framework: str
    """Framework name. Calibrations cover all of its releases, and measurements distinguish them."""
    model_family: str
    """dense or moe. Empty for all families (older calibrations)."""
    owner: str = ""
    """User to whom the series is private. Empty if all users share it."""

    def nearest_first(self) -> tuple[Series, ...]:
        """Return this series and its fallbacks, in order of preference.

        They are the series itself, then the shared one, then that of all model families.
        """
        shared = replace(self, owner="")
        return tuple(dict.fromkeys((self, shared, replace(shared, model_family=""))))


def series_of(problem: TrainingProblem, *, hardware: Hardware) -> Series:
    """Return the series of a problem on this hardware."""
    return Series(
        cluster_key=cluster_key(problem.cluster, hardware),
        framework=problem.workload.framework,
        model_family=model_family(problem.model),
    )


def cluster_key(cluster: ClusterSpec, hardware: Hardware) -> str:
    """Return the key of a cluster, derived from its device, node, NVLink domain and network.

    The number of devices that a job uses does not matter. The key of `cpu` includes the host,
    because CPUs differ between hosts.
    """
    network = f"{cluster.inter_node_bandwidth_bytes_per_second / 1e9:g}GBps"
    node, domain = (
        cluster.node_gpus or cluster.gpus_per_node,
        cluster.domain_gpus or cluster.nvlink_domain_size,
    )
    key = f"{cluster.gpu.name}/node{node}/nvlink{domain}/{network}"
    return (
        key
        if cluster.gpu.kind == "gpu"
        else "/".join((cluster.gpu.name, hardware.device_name, *hardware.hosts))
    )


def model_family(model: ModelSpec) -> ModelFamily:
    """Return `dense` or `moe`.

    They are calibrated separately, because only MoE models have all-to-alls.
    """
    return "moe" if model.num_experts else "dense"


def own_hardware(cluster: ClusterSpec) -> Hardware:
    """Return the hardware under which runs are stored: any GPU of that name, or this host's CPU."""
    if cluster.gpu.kind == "gpu":
        return Hardware(gpu=cluster.gpu.name, num_gpus=cluster.num_gpus)
    from hp_tool.cluster.launchers.local import detect_hardware

    return detect_hardware(cpu_only=True)


class StoredCalibrations:
    """`training.calibrated.Calibrations` backed by a store. Thread-safe."""

    def __init__(
        self,
        *,
        store: Store,
        before: datetime | None = None,
        hardware: Hardware | None = None,
        owner: str = "",
        refit: Callable[[], object] | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Create the lookup.

        Args:
            refit: Fits outdated series. If None, other processes do this, and answers report it as
                pending.
            before: Use only calibrations made before this time.
            hardware: Hardware of the runs; by default this host's.
            owner: User whose own reports count in addition to trusted ones.
        """
        self._store, self._before, self._hardware, self._owner, self._clock = (
            store,
            before,
            hardware,
            owner,
            clock,
        )
        self._refit = refit
        self._known: dict[Series, tuple[float, CalibratedPredictor | str | None]] = {}

    def of(self, owner: str) -> StoredCalibrations:
        """Return the calibrations visible to another owner."""
        other = copy.copy(self)
        other._owner = owner
        return other

    def __eq__(self, other: object) -> bool:
        """Return True if both give the same answers.

        Requests of one owner can then share caches.
        """
        return (
            isinstance(other, StoredCalibrations)
            and self._known is other._known
            and self._owner == other._owner
        )

    def __hash__(self) -> int:
        return hash((id(self._known), self._owner))

    def __call__(self, problem: TrainingProblem) -> CalibratedPredictor | None:
        """Return the predictor of the problem's series, else of its first fallback, else None."""
        known = self._find(problem)
        return known if isinstance(known, CalibratedPredictor) else None

    def unused(self, problem: TrainingProblem) -> str | None:
        """Return why there is no predictor; None if there is one or if nothing was measured."""
        known = self._find(problem)
        return known if isinstance(known, str) else None

    def _find(self, problem: TrainingProblem) -> CalibratedPredictor | str | None:
        series = series_of(problem, hardware=self._hardware or own_hardware(problem.cluster))
        series = replace(series, owner=self._owner)
        read_at, known = self._known.get(series, (-float("inf"), None))
        if self._clock() - read_at > MAX_AGE_S:
            self.refit()
            known = self._newest(series, predictions=digest_of(problem))
            if (
                len(self._known) >= MOST_KNOWN
            ):  # Queries choose the network, so the number of keys is unbounded.
                self._known.clear()
            self._known[series] = (self._clock(), known)
        return known

    def refit(self) -> None:
        """Fit outdated series, unless other processes do so."""
        if self._refit is not None and self._refit():
            self.forget()

    def forget(self) -> None:
        """Clear the cached database answers."""
        self._known.clear()

    def _newest(self, series: Series, *, predictions: str) -> CalibratedPredictor | str | None:
        """Return the predictor with its provenance, or why there is none."""
        outdated = None
        for each in series.nearest_first():
            record = self._store.latest_calibration(**asdict(each), before=self._before)
            if record is None or not record.num_measurements:  # All its measurements were excluded.
                continue
            if record.payload.get(PREDICTIONS) != predictions:
                outdated = outdated or (
                    f"version {record.version} of {record.created_at:%Y-%m-%d} {OTHER_PREDICTIONS}"
                )
            elif (calibration := read_calibration(record)) is not None:
                names = ("id", "version", "cluster_key", "framework")
                provenance = {name: getattr(record, name) for name in names} | {
                    "model_family": record.model_family or "all",
                    "created_at": record.created_at.isoformat(),
                    "runs": record.num_measurements,
                    MODELS: record.payload.get(MODELS, {}),
                    "accuracy": record.payload.get("accuracy", {}),
                    **record.applied,
                }
                if self._before is None and self._is_due(each):
                    provenance["pending"] = PENDING
                release: str | None = record.payload.get(RELEASE)
                crashed, ran = (record.payload.get(key, {}) for key in (CRASHED, RAN))
                links = Links.read(record.payload.get(LINKS))
                return CalibratedPredictor(
                    calibration=calibration,
                    provenance=provenance,
                    release=release,
                    crashed=crashed,
                    ran=ran,
                    links=links,
                )
        return outdated or self._missing(series)

    def _is_due(self, series: Series) -> bool:
        place = series.cluster_key, series.framework
        return any(
            (change.cluster_key, change.framework) == place for change in self._store.due_refits()
        )

    def _missing(self, series: Series) -> str | None:
        """Return why no measurement applies, with the nearest; None if nothing was measured."""

        def nearest(**query: Unpack[MeasurementQuery]) -> MeasurementRecord | None:
            return next(
                iter(
                    self._store.measurements(
                        limit=1, **query | {"state": "accepted", "teaches": series.owner}
                    ).items
                ),
                None,
            )

        key, gpu = series.cluster_key, series.cluster_key.partition("/")[0]
        if nearest(cluster_key=key, framework=series.framework) is not None:
            others = "MoE models" if series.model_family == "dense" else "dense models"
            owners = {series.owner, ""}
            every = (
                replace(series, model_family=family, owner=each)
                for family in get_args(ModelFamily)
                for each in owners
            )
            if any(self._store.latest_calibration(**asdict(each)) is not None for each in every):
                return f"on {key} only {others} were measured, which do not apply to this model"
            return (
                f"measurements on {key} are not fitted yet; `hp-tool calibrate` does so at "
                "once, a worker within a minute"
            )
        if (other := nearest(cluster_key=key)) is not None:
            return f"on {key} {other.framework} was measured, not {series.framework}"
        if (other := nearest(gpu=gpu)) is not None:
            return (
                f"no measurements on {key}; the nearest are on {other.cluster_key}, another "
                "node, domain or network"
            )
        return None if nearest() is None else f"no measurements on {key}, nor on any other {gpu}"


def read_calibration(record: CalibrationRecord) -> Calibration | None:
    """Return the stored calibration; None if this version cannot read it.

    `hp-tool calibrate` replaces unreadable calibrations.
    """
    try:
        return Calibration.from_dict(record.payload)
    except (KeyError, TypeError, ValueError):
        return None
