"""Megatron Bridge 0.3 and NeMo: YAML files are read, overrides of recipes written."""
