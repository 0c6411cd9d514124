"""Hugging Face config.json files as ModelSpecs."""

from hp_tool.catalog.huggingface.read import is_config, known_types, read_config, refused_types

__all__ = ["is_config", "known_types", "read_config", "refused_types"]
