"""A user's own training command in place of the built-in profiler."""
