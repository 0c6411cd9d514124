"""The built-in profiler. torchrun starts it on every rank.

`python -m hp_tool.cluster.profiler REQUEST.json RESULT.json`
"""
