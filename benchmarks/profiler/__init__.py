"""How repeatable profile runs are on this machine: `python -m benchmarks.profiler`."""
