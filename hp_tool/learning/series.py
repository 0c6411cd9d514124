"""What one calibration covers (a cluster, its software, a family of models), and the newest stored one for a problem."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from datetime import datetime
from typing import Literal

from hp_tool.calibration import Calibration
from hp_tool.domain.hardware import ClusterSpec
from hp_tool.domain.measurement import Hardware
from hp_tool.domain.model import ModelSpec
from hp_tool.domain.ports import Store
from hp_tool.domain.records import CalibrationRecord
from hp_tool.domain.workload import TrainingWorkload
from hp_tool.training.calibrated import CalibratedPredictor
from hp_tool.training.problem import TrainingProblem

MAX_AGE_S = 5.0
"""How long an answer of the database is believed: a batch asks for the same series thousands of times a second."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Series:
    """The key of calibrations that are versions of each other."""

    cluster_key: str
    framework: str
    """With its release, as `megatron-core 0.16.1`, where a query names one."""
    model_family: str
    """dense or moe; empty: all families (older calibrations)."""

    def nearest_first(self) -> tuple[Series, ...]:
        """This series and those that stand in for it: any release of the framework, then any family."""
        any_release = replace(self, framework=self.framework.split(" ")[0])
        return tuple(dict.fromkeys((self, any_release, replace(any_release, model_family=""))))


def series_of(problem: TrainingProblem, *, hardware: Hardware) -> Series:
    """The series that speaks for a problem on this hardware."""
    return Series(
        cluster_key=cluster_key(problem.cluster, hardware),
        framework=software(problem.workload),
        model_family=model_family(problem.model),
    )


def cluster_key(cluster: ClusterSpec, hardware: Hardware) -> str:
    """The device, its node and its network; hosts' CPUs differ, so `cpu` is kept apart by host."""
    network = f"{cluster.inter_node_bandwidth_bytes_per_second / 1e9:g}GBps"
    key = f"{cluster.gpu.name}/node{cluster.gpus_per_node}/nvlink{cluster.nvlink_domain_size}/{network}"
    return key if cluster.gpu.kind == "gpu" else "/".join((cluster.gpu.name, hardware.device_name, *hardware.hosts))


def software(workload: TrainingWorkload) -> str:
    """The framework, and its release where the query names one."""
    return " ".join(filter(None, (workload.framework, workload.framework_version)))


def model_family(model: ModelSpec) -> Literal["dense", "moe"]:
    """Models whose steps are made of the same operations: an all-to-all teaches nothing to those that have none."""
    return "moe" if model.num_experts else "dense"


def own_hardware(cluster: ClusterSpec) -> Hardware:
    """What runs would have been filed under: GPUs are alike wherever they stand, CPUs are those of this host."""
    if cluster.gpu.kind == "gpu":
        return Hardware(gpu=cluster.gpu.name, num_gpus=cluster.num_gpus)
    from hp_tool.launchers.local import detect

    return detect(cpu_only=True)


class StoredCalibrations:
    """`training.calibrated.Calibrations` over a store. May be called by several threads at once."""

    def __init__(
        self,
        *,
        store: Store,
        before: datetime | None = None,
        hardware: Hardware | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`before`: only what was known then. `hardware`: what runs go to; None: what they would go to from this host."""
        self._store, self._before, self._hardware, self._clock = store, before, hardware, clock
        self._known: dict[Series, tuple[float, CalibratedPredictor | None]] = {}

    def __call__(self, problem: TrainingProblem) -> CalibratedPredictor | None:
        """Of the problem's series, else of the nearest that stands in for it; None where nothing was learnt yet."""
        series = series_of(problem, hardware=self._hardware or own_hardware(problem.cluster))
        asked_at, known = self._known.get(series, (-float("inf"), None))
        if self._clock() - asked_at > MAX_AGE_S:
            known = self._newest(series)
            self._known[series] = (self._clock(), known)
        return known

    def forget(self) -> None:
        """Ask the database anew: somebody knows that there is something new."""
        self._known.clear()

    def _newest(self, series: Series) -> CalibratedPredictor | None:
        """The predictor, with what an answer says about the calibration it used."""
        for each in series.nearest_first():
            record = self._store.latest_calibration(
                cluster_key=each.cluster_key, framework=each.framework, model_family=each.model_family, before=self._before
            )
            if record is not None and (calibration := read_calibration(record)) is not None:
                names = ("id", "version", "cluster_key", "framework")
                provenance = {name: getattr(record, name) for name in names} | {
                    "model_family": record.model_family or "all",
                    "created_at": record.created_at.isoformat(),
                }
                return CalibratedPredictor(calibration=calibration, provenance=provenance)
        return None


def read_calibration(record: CalibrationRecord) -> Calibration | None:
    """The stored calibration; None for one that this version cannot read, which `hp-tool calibrate` replaces."""
    try:
        return Calibration.from_dict(record.payload)
    except (KeyError, TypeError, ValueError):
        return None
