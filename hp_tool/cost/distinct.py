"""Evaluate a formula once per distinct combination of a few axes, and spread the answers."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from hp_tool.cost.candidates import Candidates

MAX_TABLE = 1 << 22


def distinct_rows(candidates: Candidates, names: Sequence[str]) -> tuple[Candidates, NDArray[np.intp] | None]:
    """(kinds, kind_of): one candidate for each combination of the named axes, and for each row which one is its own
    (None for at most one row, its own kind).

    Axes hold small integers, so combinations are numbered by mixed radix in a table: linear in n, without a sort.
    """
    n = len(candidates)
    if n <= 1:
        return candidates, None
    key = np.zeros(n, dtype=np.int64)
    size = 1
    for name in names:
        values = getattr(candidates, name)
        if values.min() == values.max():
            continue
        levels = np.zeros(int(values.max()) + 1, dtype=np.int64)
        levels[values] = 1
        codes = np.cumsum(levels) - 1
        key = key * (codes[-1] + 1) + codes[values]
        size *= int(codes[-1] + 1)
    if size > MAX_TABLE:
        _, first, inverse = np.unique(key, return_index=True, return_inverse=True)
        return candidates.take(first), inverse
    row = np.full(size, -1, dtype=np.intp)
    row[key] = np.arange(n)
    occurs = row >= 0
    kind_of = (np.cumsum(occurs) - 1)[key]
    return candidates.take(row[occurs]), kind_of
