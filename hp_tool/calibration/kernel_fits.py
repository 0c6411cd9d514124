"""Constants of single kernels and collectives from their times, by robust least squares on log ratios.

Every fit takes what an operation would take at the datasheet's rates, in seconds, so that the constants are fractions of it,
and answers with the constants and each row's relative error.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import least_squares

from hp_tool.domain.efficiency import Link, Roofline

Floats = NDArray[np.float64]


@dataclass(frozen=True, slots=True, kw_only=True)
class Bounds:
    """What fractions and overheads (seconds) may be, and where a fit starts."""

    fraction: tuple[float, float, float]
    """(least, start, most)"""
    overhead_s: tuple[float, float, float]

    def of(self, kinds: str) -> tuple[list[float], list[float], list[float]]:
        """(start, least, most) of several constants: `f` a fraction, `o` an overhead."""
        chosen = [self.fraction if kind == "f" else self.overhead_s for kind in kinds]
        low, start, high = zip(*chosen, strict=True)
        return list(start), list(low), list(high)


CPU = Bounds(fraction=(0.001, 0.5, 5.0), overhead_s=(1e-7, 1e-5, 1e-1))
"""A core's datasheet is a guess, its caches beat the memory's bandwidth, and others may share it."""
GPU = Bounds(fraction=(0.05, 0.7, 1.5), overhead_s=(1e-7, 5e-6, 1e-3))


def robust_fit(residuals: Callable[[Floats], Floats], start: list[float], low: list[float], high: list[float]) -> Floats:
    """Least squares on log ratios with a soft-l1 loss: a few odd kernels must not bend the fit."""
    found: Floats = least_squares(residuals, start, bounds=(low, high), loss="soft_l1", f_scale=0.05, x_scale=start).x
    return found


def fit_roofline(flops_s: Floats, bytes_s: Floats, seconds: Floats, *, bounds: Bounds) -> tuple[Roofline, Floats]:
    """t = overhead + max(FLOPs / (x peak), bytes / (y bandwidth))."""

    def residuals(x: Floats) -> Floats:
        return np.asarray(np.log((x[2] + np.maximum(flops_s / x[0], bytes_s / x[1])) / seconds))

    x = robust_fit(residuals, *bounds.of("ffo"))
    return _roofline(x), _errors(residuals(x))


def fit_additive_roofline(flops_s: Floats, bytes_s: Floats, seconds: Floats, *, bounds: Bounds) -> tuple[Roofline, Floats]:
    """t = overhead + FLOPs / (x peak) + bytes / (y bandwidth): kernels that alternate between the two, as attention does."""

    def residuals(x: Floats) -> Floats:
        return np.asarray(np.log((x[2] + flops_s / x[0] + bytes_s / x[1]) / seconds))

    x = robust_fit(residuals, *bounds.of("ffo"))
    return _roofline(x), _errors(residuals(x))


def fit_memory(bytes_s: Floats, kernels: Floats, seconds: Floats, *, bounds: Bounds) -> tuple[tuple[float, float], Floats]:
    """((share of memory bandwidth, seconds a kernel), errors): t = kernels overhead + bytes / (x bandwidth)."""

    def residuals(x: Floats) -> Floats:
        return np.asarray(np.log((x[1] * kernels + bytes_s / x[0]) / seconds))

    x = robust_fit(residuals, *bounds.of("fo"))
    return (short(x[0]), short(x[1])), _errors(residuals(x))


def fit_link(peers: Floats, wire_s: Floats, seconds: Floats, *, bounds: Bounds) -> tuple[Link, Floats]:
    """t = latency + latency_per_peer (n - 1) + wire / (x bandwidth). One group size cannot tell the two latencies apart: each
    is then given half of their sum, because a single message is half of the shortest ring.
    """
    apart = len(np.unique(peers)) > 1

    def residuals(x: Floats) -> Floats:
        latency = x[1] + x[2] * (peers - 1) if apart else x[1]
        return np.asarray(np.log((latency + wire_s / x[0]) / seconds))

    x = robust_fit(residuals, *bounds.of("foo" if apart else "fo"))
    fixed, per_peer = (x[1], x[2]) if apart else (x[1] / 2, x[1] / 2 / (peers[0] - 1))
    link = Link(bandwidth_fraction=short(x[0]), latency_s=short(fixed), latency_per_peer_s=short(per_peer), ramp_bytes=0.0)
    return link, _errors(residuals(x))


def short(value: float) -> float:
    """Four digits: more would pretend to a precision that no timing has."""
    return float(f"{value:.4g}")


def _roofline(x: Floats) -> Roofline:
    return Roofline(peak_fraction=short(x[0]), bandwidth_fraction=short(x[1]), overhead_s=short(x[2]))


def _errors(residuals: Floats) -> Floats:
    return np.asarray(np.abs(np.expm1(residuals)))
