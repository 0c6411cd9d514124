"""Expected improvement of one run."""

import numpy as np

from hp_tool.loop.calibration.evidence import FloatArray


def expected_improvement(*, median_s: FloatArray, log_sd: FloatArray, best_s: float) -> FloatArray:
    """Return E[max(best - T, 0)] in seconds for ln T ~ N(ln median, log_sd^2).

    It is best Phi(z) - median e^(sd^2/2) Phi(z - sd), with z = ln(best / median) / sd.
    """
    from scipy.special import ndtr

    z = (np.log(best_s) - np.log(median_s)) / log_sd
    mean_s = median_s * np.exp(0.5 * log_sd**2)
    return np.asarray(
        np.maximum(best_s * ndtr(z) - mean_s * ndtr(z - log_sd), 0.0), dtype=np.float64
    )
