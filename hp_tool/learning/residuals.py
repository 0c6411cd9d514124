"""The residual report of a stored calibration: each measured run of its series beside predictions before and after it."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from hp_tool.calibration.evidence import FloatArray
from hp_tool.domain.ports import Store
from hp_tool.domain.records import CalibrationRecord, MeasurementRecord
from hp_tool.learning.evidence import evidence_of, of_series
from hp_tool.learning.series import Series, read_calibration

OUTLIER_SCORE = 3.5
"""Modified z-score above which a run is called an outlier (Iglewicz and Hoaglin 1993, section 3.3)."""
NORMAL_MAD = 0.6745
"""Median absolute deviation of a standard normal distribution."""
LEAST_DEVIATION = 0.02
"""Of ln(measured / predicted): one configuration's steps repeat no better, so runs in close agreement have no outliers."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Residual:
    """One measured run beside its predictions by today's cost model and the stored calibration, in seconds of a step."""

    record: MeasurementRecord
    measured_s: float
    before_s: float
    """By the cost model alone."""
    after_s: float
    """After calibration."""
    taught: bool
    """Whether the calibration was fitted on it; then `after_s` is no forecast."""
    outlier: bool = False
    """Whether it deviates more than the others scatter."""

    @property
    def error_before(self) -> float:
        """before / measured - 1."""
        return self.before_s / self.measured_s - 1.0

    @property
    def error_after(self) -> float:
        """after / measured - 1."""
        return self.after_s / self.measured_s - 1.0


def residual_report(*, store: Store, record: CalibrationRecord) -> tuple[Residual, ...]:
    """Residuals of the newest measurements of the record's series that have a step time and that the store shows, oldest first.

    Empty for a calibration that this version cannot read.
    """
    calibration = read_calibration(record)
    if calibration is None:
        return ()
    series = Series(cluster_key=record.cluster_key, framework=record.framework, model_family=record.model_family)
    residuals: list[Residual] = []
    for problem, same in of_series(series, store=store):
        evidence = evidence_of(same, problem=problem)
        step = calibration.step_time.predict(
            parts_s=evidence.parts_s, layer_passes=evidence.layer_passes, features=evidence.features
        )
        before = np.sum(list(evidence.parts_s.values()), axis=0)
        by_id = {one.id: one for one in same}
        for row in np.flatnonzero(np.isfinite(evidence.measured_step_s)):
            identity = evidence.measurement_ids[row]
            residuals.append(
                Residual(
                    record=by_id[identity],
                    measured_s=float(evidence.measured_step_s[row]),
                    before_s=float(before[row]),
                    after_s=float(step.median_s[row]),
                    taught=identity in calibration.measurement_ids,
                )
            )
    ordered = sorted(residuals, key=lambda residual: (residual.record.created_at, residual.record.id))
    off = outliers(np.array([residual.measured_s / residual.after_s for residual in ordered]))
    return tuple(replace(residual, outlier=bool(each)) for residual, each in zip(ordered, off, strict=True))


def outliers(ratios: FloatArray) -> NDArray[np.bool_]:
    """(n,) whether each of n ratios measured / predicted lies apart: 0.6745 |x - median(x)| / MAD(x) > 3.5 of x = ln(ratio).

    The median and its deviation do not follow the outliers themselves, as the fit's own range would.
    """
    if not len(ratios):
        return np.zeros(0, dtype=np.bool_)
    deviation = np.abs(np.log(ratios) - np.median(np.log(ratios)))
    off: NDArray[np.bool_] = NORMAL_MAD * deviation > OUTLIER_SCORE * max(float(np.median(deviation)), LEAST_DEVIATION)
    return off
