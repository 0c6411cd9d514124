"""Maximum a posteriori by least squares: measured rows may be outliers, prior rows may not."""

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
    num_rows: int,
    lower: FloatArray,
) -> FloatArray:
    """argmin over x >= lower of sum rho(r_i(x)) over the rows plus sum x_j^2 over the parameters.

    Parameters are standardised: each has prior mean 0 and standard deviation 1. `residuals(x)` is (num_rows,) in units
    of its standard deviation, `jacobian(x)` is (num_rows, parameters). rho is soft L1 (linear far out), so that one
    disturbed run does not drag the rest; the prior keeps its full quadratic pull.
    """
    from scipy.optimize import least_squares

    parameters = lower.size

    def loss(squared: FloatArray) -> FloatArray:
        scaled = squared[:num_rows] / _KNEE**2
        root = np.sqrt(1.0 + scaled)
        rho = np.empty((3, squared.size))
        rho[0, num_rows:], rho[1, num_rows:], rho[2, num_rows:] = squared[num_rows:], 1.0, 0.0
        rho[0, :num_rows] = 2.0 * _KNEE**2 * (root - 1.0)
        rho[1, :num_rows] = 1.0 / root
        rho[2, :num_rows] = -0.5 / (_KNEE**2 * root**3)
        return rho

    solution = least_squares(
        lambda x: np.concatenate([residuals(x), x]),
        np.zeros(parameters),
        jac=lambda x: np.vstack([jacobian(x), np.eye(parameters)]),
        bounds=(lower, np.inf),
        loss=loss,
        xtol=1e-12,
        ftol=1e-12,
        gtol=1e-10,
    )
    return np.asarray(solution.x, dtype=np.float64)


def weights(residuals: FloatArray) -> FloatArray:
    """(rows,) weight of each row at the solution: 1 for small standardised residuals, falling for outliers."""
    return 1.0 / np.sqrt(1.0 + (residuals / _KNEE) ** 2)
