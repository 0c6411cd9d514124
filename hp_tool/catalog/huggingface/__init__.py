"""Hugging Face config.json files as ModelSpecs."""
