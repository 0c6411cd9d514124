"""A user's training command in place of the built-in profiler."""
