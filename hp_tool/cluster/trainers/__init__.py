"""Run a user's training command instead of the built-in profiler."""
