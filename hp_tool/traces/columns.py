"""Growing columns of 8-byte numbers, with a limit on the number of events."""

from __future__ import annotations

from array import array
from typing import Self

import numpy as np

from hp_tool.errors import InputError
from hp_tool.traces.timeline.events import FloatArray, IntArray

MAX_EVENTS = 4_000_000
"""Largest number of kernels, launches or operators per rank: about ten steps of the largest
trainings.
"""


class Floats:
    """A growing column of floats."""

    def __init__(self) -> None:
        self._values = array("d")
        self.append = self._values.append

    @classmethod
    def of(cls, values: FloatArray) -> Self:
        """Return a column of these values."""
        column = cls()
        column._values.frombytes(values.tobytes())
        return column

    def __len__(self) -> int:
        return len(self._values)

    def array(self) -> FloatArray:
        """Return the column as an array; do not append afterwards."""
        return np.frombuffer(self._values, dtype=np.float64) if self._values else np.empty(0)


class Ints:
    """A growing column of integers."""

    def __init__(self) -> None:
        self._values = array("q")
        self.append = self._values.append

    @classmethod
    def of(cls, values: IntArray) -> Self:
        """Return a column of these values."""
        column = cls()
        column._values.frombytes(values.tobytes())
        return column

    def __len__(self) -> int:
        return len(self._values)

    def array(self) -> IntArray:
        """Return the column as an array; do not append afterwards."""
        return (
            np.frombuffer(self._values, dtype=np.int64)
            if self._values
            else np.empty(0, dtype=np.int64)
        )


def check_room(count: int, *, name: str) -> None:
    """Raise InputError if a trace has more than MAX_EVENTS events."""
    if count > MAX_EVENTS:
        message = (
            f"{name} has more than {MAX_EVENTS:,} kernels or operators. Profile fewer steps "
            "(torch.profiler.schedule)."
        )
        raise InputError(message, field="trace", code="too_large")


def look_up(keys: IntArray, values: FloatArray, *, wanted: IntArray) -> tuple[FloatArray, IntArray]:
    """Look up values by key.

    Returns:
        (n,) value of each wanted key (NaN if missing), and (n,) its row (-1 if missing).
    """
    if not len(keys):
        return np.full(len(wanted), np.nan), np.full(len(wanted), -1)
    order = np.argsort(keys, kind="stable")
    place = np.minimum(np.searchsorted(keys[order], wanted), len(keys) - 1)
    rows = order[place]
    match = keys[rows] == wanted
    return np.where(match, values[rows], np.nan), np.where(match, rows, -1)
