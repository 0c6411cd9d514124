"""Conversion of Hugging Face config.json files to ModelSpec."""
