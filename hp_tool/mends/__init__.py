"""Why not, turned round: the smallest changes that make a configuration legal, small enough and fast enough."""

from hp_tool.mends.find import mends

__all__ = ["mends"]
