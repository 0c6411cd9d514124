"""Array types, and `where`, `maximum` and similar functions for arrays of candidates or plain
numbers.

NumPy converts every argument to an array, which takes fifty times as long as the arithmetic, and
one estimate calls these functions a hundred times. They return arrays for arrays, and plain numbers
for plain numbers.
"""

import math
from typing import Any, overload

import numpy as np
from numpy.typing import NDArray

IntArray = NDArray[np.int64]
FloatArray = NDArray[np.float64]
ComplexArray = NDArray[np.complex128]
BoolArray = NDArray[np.bool_]
"""Shape (n,) for n candidates, or any shape that broadcasts to a grid."""

Ints = NDArray[np.signedinteger[Any]] | int
Floats = NDArray[np.floating[Any]] | float
Bools = NDArray[np.bool_] | bool
"""The same, or a plain number: a single candidate, or one value for all."""
Numbers = Ints | Floats | Bools


@overload
def where(condition: Numbers, x: Bools, y: Bools) -> Bools: ...  # type: ignore[overload-overlap]
@overload
def where(condition: Numbers, x: Ints, y: Ints) -> Ints: ...  # type: ignore[overload-overlap]
@overload
def where(condition: Numbers, x: Numbers, y: Numbers) -> Floats: ...
def where(condition: Numbers, x: Any, y: Any) -> Any:
    """Return x where the condition is true, else y."""
    return np.where(condition, x, y) if isinstance(condition, np.ndarray) else x if condition else y


@overload
def maximum(x: Ints, y: Ints) -> Ints: ...  # type: ignore[overload-overlap]
@overload
def maximum(x: Numbers, y: Numbers) -> Floats: ...
def maximum(x: Any, y: Any) -> Any:
    """Return the larger of each pair."""
    return np.maximum(x, y) if isinstance(x, np.ndarray) or isinstance(y, np.ndarray) else max(x, y)


@overload
def minimum(x: Ints, y: Ints) -> Ints: ...  # type: ignore[overload-overlap]
@overload
def minimum(x: Numbers, y: Numbers) -> Floats: ...
def minimum(x: Any, y: Any) -> Any:
    """Return the smaller of each pair."""
    return np.minimum(x, y) if isinstance(x, np.ndarray) or isinstance(y, np.ndarray) else min(x, y)


def column(value: Numbers, *, like: Numbers) -> Any:
    """Return the value for each candidate of `like`; plain numbers stay plain for a plain
    `like`.
    """
    if not isinstance(like, np.ndarray):
        return value
    return np.broadcast_to(value, np.broadcast_shapes(np.shape(value), like.shape))


def gcd(x: Ints, y: Ints) -> Ints:
    """Return the greatest common divisor of integers."""
    return (
        np.gcd(x, y)
        if isinstance(x, np.ndarray) or isinstance(y, np.ndarray)
        else math.gcd(int(x), int(y))
    )


def lcm(x: Ints, y: Ints) -> Ints:
    """Return the least common multiple of integers."""
    return (
        np.lcm(x, y)
        if isinstance(x, np.ndarray) or isinstance(y, np.ndarray)
        else math.lcm(int(x), int(y))
    )


def ceil(x: Numbers) -> Floats:
    """Return the smallest integer that is not below x."""
    return np.ceil(x) if isinstance(x, np.ndarray) else math.ceil(x)


def floor(x: Numbers) -> Floats:
    """Return the largest integer that is not above x."""
    return np.floor(x) if isinstance(x, np.ndarray) else math.floor(x)


def anywhere(condition: Numbers) -> bool:
    """Return whether the condition is true for any candidate."""
    return bool(condition.any()) if isinstance(condition, np.ndarray) else bool(condition)
