"""Benchmarks of calibrations that learn from a few published runs and predict the other runs."""
