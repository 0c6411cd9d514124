"""Benchmarks of `watch` on simulated step times: how soon a slowdown is reported, and how often an
alarm is false.
"""
