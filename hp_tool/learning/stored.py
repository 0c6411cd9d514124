"""The newest stored calibration for a problem, as the predictor that it corrects."""

from __future__ import annotations

import time
from collections.abc import Callable
from datetime import datetime

from hp_tool.calibration import Calibration
from hp_tool.domain.measurement import Hardware
from hp_tool.domain.ports import Store
from hp_tool.domain.records import CalibrationRecord
from hp_tool.learning.series import Series, own_hardware, series_of
from hp_tool.training.calibrated import CalibratedPredictor
from hp_tool.training.problem import TrainingProblem

MAX_AGE_S = 5.0
"""How long an answer of the database is believed: a batch asks for the same series thousands of times a second."""


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
        for each in series.nearest_first():
            record = self._store.latest_calibration(
                cluster_key=each.cluster_key, framework=each.framework, model_family=each.model_family, before=self._before
            )
            if record is not None and (calibration := read_calibration(record)) is not None:
                return CalibratedPredictor(calibration=calibration, provenance=provenance(record))
        return None


def read_calibration(record: CalibrationRecord) -> Calibration | None:
    """The stored calibration; None for one that this version cannot read, which `hp-tool calibrate` replaces."""
    try:
        return Calibration.from_dict(record.payload)
    except (KeyError, TypeError, ValueError):
        return None


def provenance(record: CalibrationRecord) -> dict[str, object]:
    """What an answer says about the calibration it used."""
    return {
        "id": record.id,
        "version": record.version,
        "cluster_key": record.cluster_key,
        "framework": record.framework,
        "model_family": record.model_family or "all",
        "created_at": record.created_at.isoformat(),
    }
