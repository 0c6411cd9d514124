"""A stored calibration held against the measurements of its series: what each run said before and says after."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from hp_tool.domain.ports import Store
from hp_tool.domain.records import CalibrationRecord, MeasurementRecord
from hp_tool.learning.evidence import MAX_MEASUREMENTS, by_problem, evidence_of, is_release, teaching
from hp_tool.learning.series import model_family
from hp_tool.learning.stored import read_calibration

OUTLIER_CONFIDENCE = 0.98
"""A run outside of the range that holds this share of runs is called an outlier."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Lesson:
    """One measured run beside predictions of it, in seconds of a step; today's cost model, the record's calibration."""

    record: MeasurementRecord
    measured_s: float
    before_s: float
    """By the cost model alone."""
    after_s: float
    """After calibration."""
    low_s: float
    high_s: float
    """Of the calibrated prediction, with OUTLIER_CONFIDENCE."""
    taught: bool
    """The calibration was fitted on it: then `after_s` is no forecast."""

    @property
    def outlier(self) -> bool:
        return not self.low_s <= self.measured_s <= self.high_s

    @property
    def error_before(self) -> float:
        """before / measured - 1."""
        return self.before_s / self.measured_s - 1.0

    @property
    def error_after(self) -> float:
        """after / measured - 1."""
        return self.after_s / self.measured_s - 1.0


def lessons(*, store: Store, record: CalibrationRecord) -> tuple[Lesson, ...]:
    """Of the newest measurements of the record's series that have a step time and that the store shows, oldest first.

    Empty for a calibration that this version cannot read.
    """
    calibration = read_calibration(record)
    if calibration is None:
        return ()
    framework, _, release = record.framework.partition(" ")
    page = store.measurements(cluster_key=record.cluster_key, framework=framework, limit=MAX_MEASUREMENTS)
    chosen = [one for one in teaching(page.items) if not release or is_release(one, release)]
    found: list[Lesson] = []
    for problem, same in by_problem(chosen):
        if record.model_family not in ("", model_family(problem.model)):
            continue
        evidence = evidence_of(same, problem=problem)
        step = calibration.predict_step(
            parts_s=evidence.parts_s, layer_passes=evidence.layer_passes, features=evidence.features
        )
        low, high = step.interval(confidence=OUTLIER_CONFIDENCE)
        before = np.sum(list(evidence.parts_s.values()), axis=0)
        by_id = {one.id: one for one in same}
        for row in np.flatnonzero(np.isfinite(evidence.measured_step_s)):
            identity = evidence.measurement_ids[row]
            found.append(
                Lesson(
                    record=by_id[identity],
                    measured_s=float(evidence.measured_step_s[row]),
                    before_s=float(before[row]),
                    after_s=float(step.median_s[row]),
                    low_s=float(low[row]),
                    high_s=float(high[row]),
                    taught=identity in calibration.measurement_ids,
                )
            )
    return tuple(sorted(found, key=lambda lesson: (lesson.record.created_at, lesson.record.id)))
