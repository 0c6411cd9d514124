"""Growable columns of 8-byte numbers, and the limit on the number of events."""

from __future__ import annotations

from array import array
from typing import Self

import numpy as np

from hp_tool.errors import InputError
from hp_tool.traces.timeline.events import FloatArray, IntArray

MAX_EVENTS = 4_000_000
"""Maximum number of kernels, launches or operators per rank. This covers about ten steps of the
largest training jobs.
"""


class Floats:
    """A growable column of floats."""

    def __init__(self) -> None:
        self._values = array("d")
        self.append = self._values.append

    @classmethod
    def of(cls, values: FloatArray) -> Self:
        """Return a column with these values."""
        column = cls()
        column._values.frombytes(values.tobytes())
        return column

    def __len__(self) -> int:
        return len(self._values)

    def array(self) -> FloatArray:
        """Return the column as an array. Nothing may be appended afterwards."""
        return np.frombuffer(self._values, dtype=np.float64) if self._values else np.empty(0)


class Ints:
    """A growable column of integers."""

    def __init__(self) -> None:
        self._values = array("q")
        self.append = self._values.append

    @classmethod
    def of(cls, values: IntArray) -> Self:
        """Return a column with these values."""
        column = cls()
        column._values.frombytes(values.tobytes())
        return column

    def __len__(self) -> int:
        return len(self._values)

    def array(self) -> IntArray:
        """Return the column as an array. Nothing may be appended afterwards."""
        return (
            np.frombuffer(self._values, dtype=np.int64)
            if self._values
            else np.empty(0, dtype=np.int64)
        )


def check_room(count: int, *, name: str) -> None:
    """Raise InputError if a trace's number of events, `count`, exceeds MAX_EVENTS."""
    if count > MAX_EVENTS:
        message = (
            f"{name} has more than {MAX_EVENTS:,} kernels or operators. Profile fewer steps "
            "(torch.profiler.schedule)."
        )
        raise InputError(message, field="trace", code="too_large")


def look_up(keys: IntArray, values: FloatArray, *, wanted: IntArray) -> tuple[FloatArray, IntArray]:
    """Look up values by key.

    Returns:
        (n,) value of each wanted key, NaN if the key is missing; (n,) index of the key in `keys`,
        -1 if missing.
    """
    if not len(keys):
        return np.full(len(wanted), np.nan), np.full(len(wanted), -1)
    order = np.argsort(keys, kind="stable")
    place = np.minimum(np.searchsorted(keys[order], wanted), len(keys) - 1)
    rows = order[place]
    match = keys[rows] == wanted
    return np.where(match, values[rows], np.nan), np.where(match, rows, -1)
