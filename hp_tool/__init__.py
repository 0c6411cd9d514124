"""hp_tool: choose the parallelism of large transformers by predicting, measuring little and calibrating.

`hp_tool.estimate` and `hp_tool.recommend` answer queries; `hp_tool.api` says how.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from hp_tool.api import estimate, make_query, recommend

__all__ = ["estimate", "make_query", "recommend"]
__version__ = "0.1.0"


def __getattr__(name: str) -> Any:
    """The API on first use: everything below imports this package, and a start of the command line needs none of it."""
    if name in __all__:
        import importlib

        return getattr(importlib.import_module("hp_tool.api"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
