"""Runs one configuration for a few real training steps: `python -m hp_tool.profiler REQUEST.json RESULT.json` on every rank.

A leaf: it needs torch, megatron-core and the domain types, and nothing imports it. Launchers start it through torchrun.
"""
