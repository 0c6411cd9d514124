"""The space of configurations: which values each axis takes, and their combinations as arrays."""

from hp_tool.space.axes import Axes, default_axes, scheduled_chunks
from hp_tool.space.enumerate import Space, add_counts, enumerate_space, legal_chunks

__all__ = ["Axes", "Space", "add_counts", "default_axes", "enumerate_space", "legal_chunks", "scheduled_chunks"]
