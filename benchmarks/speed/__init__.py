"""Speed of predictions: `python -m benchmarks.speed`."""
