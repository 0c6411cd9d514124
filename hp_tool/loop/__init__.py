"""Run a little, measure, learn: search, tuning, calibration and stored knowledge."""
