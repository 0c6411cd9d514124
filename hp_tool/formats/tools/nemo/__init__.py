"""Megatron Bridge 0.3, and NeMo before it: YAML files read, overrides of recipes written."""
