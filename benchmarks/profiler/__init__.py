"""Benchmarks of profile runs on this machine."""
