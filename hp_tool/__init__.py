"""hp_tool: choose the parallelism of large transformers by predicting, measuring little and calibrating."""

__version__ = "0.1.0"
