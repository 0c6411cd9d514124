"""Array types, and versions of `where`, `maximum` and similar NumPy functions that also accept
plain numbers.

NumPy converts every argument to an array, which takes fifty times as long as the arithmetic on a
single number. One estimate calls these functions about a hundred times. They return arrays for
arrays and plain numbers for plain numbers.
"""

import math
from typing import Any, overload

import numpy as np
from numpy.typing import NDArray

IntArray = NDArray[np.int64]
FloatArray = NDArray[np.float64]
ComplexArray = NDArray[np.complex128]
BoolArray = NDArray[np.bool_]
"""Booleans of shape (n,) for n candidates, or of any shape that broadcasts to a grid of
candidates.
"""

Ints = NDArray[np.signedinteger[Any]] | int
Floats = NDArray[np.floating[Any]] | float
Bools = NDArray[np.bool_] | bool
"""A BoolArray, or a plain bool for a single candidate or a value that all candidates share."""
Numbers = Ints | Floats | Bools


@overload
def where(condition: Numbers, x: Bools, y: Bools) -> Bools: ...  # type: ignore[overload-overlap]
@overload
def where(condition: Numbers, x: Ints, y: Ints) -> Ints: ...  # type: ignore[overload-overlap]
@overload
def where(condition: Numbers, x: Numbers, y: Numbers) -> Floats: ...
def where(condition: Numbers, x: Any, y: Any) -> Any:
    """Return x if the condition is true, else y, elementwise."""
    return np.where(condition, x, y) if isinstance(condition, np.ndarray) else x if condition else y


@overload
def maximum(x: Ints, y: Ints) -> Ints: ...  # type: ignore[overload-overlap]
@overload
def maximum(x: Numbers, y: Numbers) -> Floats: ...
def maximum(x: Any, y: Any) -> Any:
    """Return the elementwise maximum."""
    return np.maximum(x, y) if isinstance(x, np.ndarray) or isinstance(y, np.ndarray) else max(x, y)


@overload
def minimum(x: Ints, y: Ints) -> Ints: ...  # type: ignore[overload-overlap]
@overload
def minimum(x: Numbers, y: Numbers) -> Floats: ...
def minimum(x: Any, y: Any) -> Any:
    """Return the elementwise minimum."""
    return np.minimum(x, y) if isinstance(x, np.ndarray) or isinstance(y, np.ndarray) else min(x, y)


def column(value: Numbers, *, like: Numbers) -> Any:
    """Broadcast a value to one entry for each candidate in `like`. If `like` is a plain number,
    return a plain number.
    """
    if not isinstance(like, np.ndarray):
        return value
    return np.broadcast_to(value, np.broadcast_shapes(np.shape(value), like.shape))


def gcd(x: Ints, y: Ints) -> Ints:
    """Return the elementwise greatest common divisor."""
    return (
        np.gcd(x, y)
        if isinstance(x, np.ndarray) or isinstance(y, np.ndarray)
        else math.gcd(int(x), int(y))
    )


def lcm(x: Ints, y: Ints) -> Ints:
    """Return the elementwise least common multiple."""
    return (
        np.lcm(x, y)
        if isinstance(x, np.ndarray) or isinstance(y, np.ndarray)
        else math.lcm(int(x), int(y))
    )


def ceil(x: Numbers) -> Floats:
    """Return the smallest integer greater than or equal to x, elementwise."""
    return np.ceil(x) if isinstance(x, np.ndarray) else math.ceil(x)


def floor(x: Numbers) -> Floats:
    """Return the largest integer less than or equal to x, elementwise."""
    return np.floor(x) if isinstance(x, np.ndarray) else math.floor(x)


def anywhere(condition: Numbers) -> bool:
    """Return True if the condition holds for any candidate."""
    return bool(condition.any()) if isinstance(condition, np.ndarray) else bool(condition)
