"""Fit corrections to arrays of predictions and measurements.

This package uses no store and no queries.
"""

from hp_tool.loop.calibration.calibration import Calibration, fit_calibration
from hp_tool.loop.calibration.evidence import (
    Evidence,
    allocated_bytes,
    layer_passes,
    residual_features,
)
from hp_tool.loop.calibration.fitting import Prior, prior_for
from hp_tool.loop.calibration.memory import MemoryPrediction
from hp_tool.loop.calibration.prediction import SlowRegime, StepPrediction

__all__ = [
    "Calibration",
    "Evidence",
    "MemoryPrediction",
    "Prior",
    "SlowRegime",
    "StepPrediction",
    "allocated_bytes",
    "fit_calibration",
    "layer_passes",
    "prior_for",
    "residual_features",
]
