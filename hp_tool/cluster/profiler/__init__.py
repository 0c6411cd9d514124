"""The profiler, started by torchrun on every rank.

`python -m hp_tool.cluster.profiler REQUEST.json RESULT.json`
"""
