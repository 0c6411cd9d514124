"""hp_tool: choose the parallelism of large transformers by predicting, measuring little and calibrating.

`hp_tool.estimate` and `hp_tool.recommend` answer queries, `hp_tool.size` budgets; `hp_tool.api` says how.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from hp_tool.answers import EstimateAnswer, RecommendAnswer
    from hp_tool.api import estimate, make_query, recommend, size
    from hp_tool.domain.result import Estimate, Recommendation
    from hp_tool.domain.serving import InferenceEstimate, ServingRecommendation
    from hp_tool.domain.sizing import Sizing, SizingAnswer

__all__ = [
    "Estimate",
    "EstimateAnswer",
    "InferenceEstimate",
    "RecommendAnswer",
    "Recommendation",
    "ServingRecommendation",
    "Sizing",
    "SizingAnswer",
    "estimate",
    "make_query",
    "recommend",
    "size",
]
__version__ = "0.1.0"


_HOMES = {
    "estimate": "hp_tool.api",
    "make_query": "hp_tool.api",
    "recommend": "hp_tool.api",
    "size": "hp_tool.api",
    "EstimateAnswer": "hp_tool.answers",
    "RecommendAnswer": "hp_tool.answers",
    "Estimate": "hp_tool.domain.result",
    "Recommendation": "hp_tool.domain.result",
    "InferenceEstimate": "hp_tool.domain.serving",
    "ServingRecommendation": "hp_tool.domain.serving",
    "Sizing": "hp_tool.domain.sizing",
    "SizingAnswer": "hp_tool.domain.sizing",
}


def __getattr__(name: str) -> Any:
    """The API on first use: everything below imports this package, and a start of the command line needs none of it."""
    if name in _HOMES:
        import importlib

        return getattr(importlib.import_module(_HOMES[name]), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
