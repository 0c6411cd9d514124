"""Latency, throughput and memory of serving, computed by pure functions over arrays of
candidates.
"""
