"""Running jobs: launchers, the profiler, and training commands of users."""
