"""The profiler: `python -m hp_tool.profiler REQUEST.json RESULT.json` on every rank runs one configuration for a few steps.

A leaf: it needs torch, megatron-core and the domain types, and nothing imports it. Launchers start it through torchrun.
"""
