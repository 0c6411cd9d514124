"""An interval that nothing is known for is wide, and still a number."""

import numpy as np

from hp_tool.loop.calibration.memory import MemoryPrediction


def test_bounds_stay_finite_where_nothing_is_known():
    prediction = MemoryPrediction(median_bytes=np.array([1e9, 1e9]), log_sd=np.array([0.1, 1e4]))
    low, high = prediction.interval()
    assert np.all(np.isfinite(high)) and np.all(low > 0)
    assert high[1] / low[1] > 1e10 > high[0] / low[0]
