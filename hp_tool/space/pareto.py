"""The Pareto front of two objectives."""

import numpy as np
from numpy.typing import NDArray

from hp_tool.cost.arrays import FloatArray


def pareto_optimal(cost: FloatArray, gain: FloatArray) -> NDArray[np.intp]:
    """Return the indices of the Pareto-optimal points, by rising cost. Of equal points, only the
    first is returned.
    """
    order = np.lexsort((-gain, cost))
    best_before = (
        np.concatenate([[-np.inf], np.maximum.accumulate(gain[order])[:-1]]) if len(order) else gain
    )
    chosen: NDArray[np.intp] = order[gain[order] > best_before]
    return chosen
