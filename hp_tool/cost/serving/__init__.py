"""Latency, throughput and memory of serving, as pure functions over arrays of candidates."""
