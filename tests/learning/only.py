"""Calibrations that know one predictor, whatever the problem."""

from __future__ import annotations

from dataclasses import dataclass

from hp_tool.questions.training.calibrated import CalibratedPredictor
from hp_tool.questions.training.problem import TrainingProblem


@dataclass(frozen=True)
class Only:
    predictor: CalibratedPredictor | None = None

    def __call__(self, problem: TrainingProblem) -> CalibratedPredictor | None:
        return self.predictor

    def unused(self, problem: TrainingProblem) -> str | None:
        return None
