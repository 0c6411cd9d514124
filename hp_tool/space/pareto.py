"""The front of two objectives."""

import numpy as np
from numpy.typing import NDArray

from hp_tool.cost.arrays import FloatArray


def pareto_optimal(cost: FloatArray, gain: FloatArray) -> NDArray[np.intp]:
    """Indices of the points that no other beats in both, by rising cost; of equal points the
    first.
    """
    order = np.lexsort((-gain, cost))
    best_before = (
        np.concatenate([[-np.inf], np.maximum.accumulate(gain[order])[:-1]]) if len(order) else gain
    )
    chosen: NDArray[np.intp] = order[gain[order] > best_before]
    return chosen
