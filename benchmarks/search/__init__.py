"""Benchmarks of the search: replays of measured grids, and a real search on this machine."""
