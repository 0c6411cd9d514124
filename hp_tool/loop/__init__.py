"""Search, tuning, calibration and learning: run a few configurations and correct predictions."""
