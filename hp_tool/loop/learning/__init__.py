"""Learning: store measurements, fit each cluster's calibrations, and look up the newest ones.

The mathematics is in `calibration`.
"""

from hp_tool.loop.learning.make import Follower, MadeCalibration, calibrate, refit
from hp_tool.loop.learning.reports import MeasurementReport, add_report, add_reports, read_report
from hp_tool.loop.learning.series import StoredCalibrations

__all__ = [
    "Follower",
    "MadeCalibration",
    "MeasurementReport",
    "StoredCalibrations",
    "add_report",
    "add_reports",
    "calibrate",
    "read_report",
    "refit",
]
