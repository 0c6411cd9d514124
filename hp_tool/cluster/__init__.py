"""Launchers of jobs, the built-in profiler, and users' training commands."""
