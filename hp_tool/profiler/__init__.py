"""The profiler, a leaf started by torchrun on every rank: `python -m hp_tool.profiler REQUEST.json
RESULT.json`.
"""
