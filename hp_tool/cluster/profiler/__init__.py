"""The profiler, which torchrun starts on every rank.

`python -m hp_tool.cluster.profiler REQUEST.json RESULT.json`
"""
