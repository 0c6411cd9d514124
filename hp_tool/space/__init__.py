"""The space of configurations: candidate values of each axis, and their legal combinations as
arrays.
"""

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
