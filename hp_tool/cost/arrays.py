"""`where` and its like for arrays and for plain numbers: one formula serves a million candidates, and one alone.

NumPy turns every number it is given into an array first, which costs fifty times the arithmetic; one estimate calls
these a hundred times. In the types plain numbers pass for arrays: whatever goes in comes out.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from numpy.typing import NDArray

IntArray = NDArray[np.int64]
FloatArray = NDArray[np.float64]
BoolArray = NDArray[np.bool_]
"""Shape (n,) of n candidates. In the formulas, also a plain number: of one candidate alone; or what broadcasts to a grid."""

Column = Any
"""FloatArray of shape (k,), or a plain number: of one candidate alone, or the same for all."""


def where(condition: Any, x: Any, y: Any) -> FloatArray:
    """x where the condition holds, else y."""
    chosen: FloatArray = np.where(condition, x, y) if isinstance(condition, np.ndarray) else x if condition else y
    return chosen


def maximum(x: Any, y: Any) -> FloatArray:
    """The larger of each pair."""
    larger: FloatArray = np.maximum(x, y) if isinstance(x, np.ndarray) or isinstance(y, np.ndarray) else max(x, y)
    return larger


def minimum(x: Any, y: Any) -> FloatArray:
    """The smaller of each pair."""
    smaller: FloatArray = np.minimum(x, y) if isinstance(x, np.ndarray) or isinstance(y, np.ndarray) else min(x, y)
    return smaller


def gcd(x: Any, y: Any) -> Any:
    """Greatest common divisor of whole numbers."""
    return np.gcd(x, y) if isinstance(x, np.ndarray) or isinstance(y, np.ndarray) else math.gcd(int(x), int(y))


def sqrt(x: Any) -> FloatArray:
    """Square root."""
    root: FloatArray = np.sqrt(x) if isinstance(x, np.ndarray) else math.sqrt(x)  # type: ignore[assignment]
    return root


def ceil(x: Any) -> FloatArray:
    """The next whole number."""
    whole: FloatArray = np.ceil(x) if isinstance(x, np.ndarray) else math.ceil(x)
    return whole


def floor(x: Any) -> FloatArray:
    """The whole number before."""
    whole: FloatArray = np.floor(x) if isinstance(x, np.ndarray) else math.floor(x)
    return whole


def zeros_like(x: Any) -> FloatArray:
    """Zero for each candidate."""
    zeros: FloatArray = np.zeros(x.shape) if isinstance(x, np.ndarray) else 0.0  # type: ignore[assignment]
    return zeros


def anywhere(condition: Any) -> bool:
    """Whether the condition holds for any candidate."""
    return bool(condition.any()) if isinstance(condition, np.ndarray) else bool(condition)
