"""The space of configurations: which values each axis takes, and their combinations as arrays."""

from hp_tool.space.axes import Axes, default_axes, is_usual, scheduled_chunks
from hp_tool.space.enumerate import Space, legal_chunks, spanned

__all__ = [
    "Axes",
    "Space",
    "default_axes",
    "is_usual",
    "legal_chunks",
    "scheduled_chunks",
    "spanned",
]
