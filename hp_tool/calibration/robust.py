"""Maximum a posteriori: measured rows may be outliers, the prior may not."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from hp_tool.calibration.evidence import FloatArray

_KNEE = 1.5
"""Standardised residual beyond which a row's pull grows only linearly (soft L1)."""


def maximum_a_posteriori(
    *,
    residuals: Callable[[FloatArray], FloatArray],
    jacobian: Callable[[FloatArray], FloatArray],
    lower: FloatArray,
) -> FloatArray:
    """argmin over x >= lower of sum rho(r_i(x)) over the rows plus sum x_j^2 over the parameters.

    Parameters are standardised: each has prior mean 0 and standard deviation 1. `residuals(x)` is (rows,) in units
    of its standard deviation, `jacobian(x)` is (rows, parameters). rho is soft L1 (linear far out), so that one
    disturbed run does not drag the rest; the prior keeps its full quadratic pull.
    """
    from scipy.optimize import Bounds, minimize

    def loss(x: FloatArray) -> tuple[float, FloatArray]:
        r = residuals(x)
        root = np.sqrt(1.0 + (r / _KNEE) ** 2)
        value = 2.0 * _KNEE**2 * np.sum(root - 1.0) + x @ x
        return float(value), 2.0 * (jacobian(x).T @ (r / root) + x)

    # Overheads often end on their bound: interior methods of least squares take long to reach it, others get stuck there.
    options = {"ftol": 1e-14, "gtol": 1e-8}
    solution = minimize(
        loss, np.zeros(lower.size), jac=True, method="L-BFGS-B", bounds=Bounds(lb=lower, ub=np.inf), options=options
    )
    return np.asarray(solution.x, dtype=np.float64)


def weights(residuals: FloatArray) -> FloatArray:
    """(rows,) weight of each row at the solution: 1 for small standardised residuals, falling for outliers."""
    return 1.0 / np.sqrt(1.0 + (residuals / _KNEE) ** 2)


def doubts(residuals: FloatArray, *, noise: float) -> FloatArray:
    """(rows,) variance beyond noise^2 that gives a row of a least-squares problem the weight above."""
    return noise**2 * (1.0 / weights(residuals) - 1.0)
