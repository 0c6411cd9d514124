"""Growing columns of numbers, eight bytes a number, and bounds on how many are kept."""

from __future__ import annotations

from array import array
from typing import Self

import numpy as np

from hp_tool.errors import InputError
from hp_tool.traces.timeline.events import FloatArray, IntArray

MAX_EVENTS = 4_000_000
"""Kernels, launches or operators of one rank that are kept: some ten steps of the largest
trainings.
"""


class Floats:
    """One column of seconds, sizes or counts."""

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
        """The column; it does not grow afterwards."""
        return np.frombuffer(self._values, dtype=np.float64) if self._values else np.empty(0)


class Ints:
    """One column of indices or identities."""

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
        """The column; it does not grow afterwards."""
        return (
            np.frombuffer(self._values, dtype=np.int64)
            if self._values
            else np.empty(0, dtype=np.int64)
        )


def check_room(count: int, *, name: str) -> None:
    """Raises InputError where a trace has more events than are kept."""
    if count > MAX_EVENTS:
        message = (
            f"{name} has more than {MAX_EVENTS:,} kernels or operators; profile fewer steps "
            "(torch.profiler.schedule)"
        )
        raise InputError(message, field="trace", code="too_large")


def joined(keys: IntArray, values: FloatArray, *, wanted: IntArray) -> tuple[FloatArray, IntArray]:
    """((n,) value of each wanted key, NaN where there is none; (n,) its row, -1 where there is
    none).
    """
    if not len(keys):
        return np.full(len(wanted), np.nan), np.full(len(wanted), -1)
    order = np.argsort(keys, kind="stable")
    place = np.minimum(np.searchsorted(keys[order], wanted), len(keys) - 1)
    rows = order[place]
    match = keys[rows] == wanted
    return np.where(match, values[rows], np.nan), np.where(match, rows, -1)
