"""Search, tuning, calibration and learning: run a few configurations, measure, and correct
predictions.
"""
