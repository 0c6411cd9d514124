"""The space of configurations: which values each axis takes, and their combinations as arrays."""

from hp_tool.space.axes import Axes, default_axes, is_default_layout, scheduled_chunks
from hp_tool.space.enumerate import Space, legal_chunks, spanned_values

__all__ = [
    "Axes",
    "Space",
    "default_axes",
    "is_default_layout",
    "legal_chunks",
    "scheduled_chunks",
    "spanned_values",
]
