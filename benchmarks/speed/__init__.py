"""How fast predictions come: `python -m benchmarks.speed`."""
