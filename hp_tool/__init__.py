"""hp_tool: choose the parallelism of large transformers with predictions, few measurements and
calibration.

`hp_tool.estimate` and `hp_tool.recommend` answer queries, `hp_tool.size` plans a training for a
budget, and `hp_tool.explain` reads traces; see `hp_tool.api`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from hp_tool.domain import exports as _exports

if TYPE_CHECKING:
    from hp_tool.api import estimate, explain, export, make_query, recommend, size
    from hp_tool.domain.result import Estimate, Recommendation
    from hp_tool.domain.serving import InferenceEstimate, ServingRecommendation
    from hp_tool.domain.sizing import Sizing, SizingAnswer
    from hp_tool.questions.answers import EstimateAnswer, RecommendAnswer

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
    "explain",
    "export",
    "make_query",
    "recommend",
    "size",
]
__version__ = "0.1.0"

_HOMES = {
    "hp_tool.api": ("estimate", "explain", "export", "make_query", "recommend", "size"),
    "hp_tool.questions.answers": ("EstimateAnswer", "RecommendAnswer"),
    "hp_tool.domain.result": ("Estimate", "Recommendation"),
    "hp_tool.domain.serving": ("InferenceEstimate", "ServingRecommendation"),
    "hp_tool.domain.sizing": ("Sizing", "SizingAnswer"),
}


def _training_formats() -> tuple[_exports.Export, ...]:
    """Return the export formats that trainer commands can name. The formats are loaded on first
    use.
    """
    from hp_tool.formats.registry import formats

    return formats("training")


_exports.set_exports(_training_formats)


def __dir__() -> list[str]:
    """Return the names for tab completion, including API names that are not loaded yet."""
    return [*__all__, "__doc__", "__version__"]


def __getattr__(name: str) -> Any:
    """Load the API on first use. All modules below import this package, but the command line starts
    faster without the API.
    """
    import importlib

    for module, names in _HOMES.items():
        if name in names:
            return getattr(importlib.import_module(module), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
