"""Job launchers, the built-in profiler, and users' training commands."""
