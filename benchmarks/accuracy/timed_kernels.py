"""Kernels timed alone (ops/*.csv), by card and shape, and robust fits of their seconds."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import numpy as np

from benchmarks.accuracy.data import Row, read
from benchmarks.accuracy.fitting import Floats, Values
from hp_tool.catalog import gpu
from hp_tool.domain.hardware import GpuSpec, Precision
from hp_tool.loop.calibration.microbenchmarks import robust_fit

SYSTEMS = {
    "a100_sxm": "a100-sxm-80gb",
    "h100_sxm": "h100-sxm-80gb",
    "h200_sxm": "h200-sxm-141gb",
    "b200_sxm": "b200-sxm-180gb",
    "b300_sxm": "b300-sxm-288gb",
}
PRECISIONS: dict[str, Precision] = {"bfloat16": "bf16", "fp8": "fp8", "nvfp4": "nvfp4"}


LATER = ("_b300", "_2")
"""Endings of further files of a kind of operation."""


def timed(folder: Path, name: str) -> list[Row]:
    """Return the rows of one kind of operation, from all its files."""
    later = [
        file for ending in LATER if (folder / "ops" / (file := f"{name}{ending}.csv")).is_file()
    ]
    return [row for file in (f"{name}.csv", *later) for row in read(folder / "ops", file)]


Free = Mapping[str, Sequence[float]]
"""(start, least, most) of constants."""


def solve(
    residuals: Callable[[Values], Floats], free: Free, *, in_logarithms: bool = False
) -> Values:
    """Return the free constants that make log ratios least, robustly.

    Args:
        residuals: Function from constants to log ratios of predicted to measured.
        free: Start and bounds of each constant.
        in_logarithms: Search in the logarithms of the constants.
    """
    start, low, high = (np.array(column) for column in zip(*free.values(), strict=True))

    def named(x: Floats) -> Values:
        values = start * np.exp(x - 1.0) if in_logarithms else x
        return dict(zip(free, map(float, values), strict=True))

    first, bounds = start, (low, high)
    if in_logarithms:
        first, bounds = np.ones(len(free)), (1.0 + np.log(low / start), 1.0 + np.log(high / start))
    return named(robust_fit(lambda x: residuals(named(x)), list(first), *map(list, bounds)))


def fit_times(
    title: str,
    predicted_s: Callable[..., Floats],
    seconds: Floats,
    **free: Sequence[float],
) -> Values:
    """Return the constants of `predicted_s(**constants)` that fit these seconds, and print how far
    it is off.
    """

    def residuals(values: Values) -> Floats:
        return np.asarray(np.log(predicted_s(**values) / seconds))

    values = solve(residuals, free)
    errors = np.abs(np.expm1(residuals(values)))
    words = ", ".join(f"{name} {value:.3g}" for name, value in values.items())
    print(
        f"{title}: {words}; {len(errors)} rows, median error {np.median(errors):.1%}, mean "
        f"{errors.mean():.1%}"
    )
    return values


def medians(rows: list[Row], keys: tuple[str, ...]) -> tuple[Floats, Floats, list[GpuSpec]]:
    """(shapes (keys, n), seconds (n,), cards): the median over kernels and repeats of each shape on
    each card of a die.
    """
    grouped: dict[tuple[str, tuple[float, ...]], list[float]] = defaultdict(list)
    for row in rows:
        grouped[row["system"], tuple(float(row[key]) for key in keys)].append(
            float(row["latency_ms"]) * 1e-3
        )
    shapes = np.array([shape for _, shape in grouped])
    return (
        shapes.T,
        np.array([np.median(times) for times in grouped.values()]),
        [gpu(SYSTEMS[name]) for name, _ in grouped],
    )


def memory_bandwidth(cards: list[GpuSpec]) -> Floats:
    return np.array([card.memory_bandwidth_bytes_per_second for card in cards])


def peak(cards: list[GpuSpec], precision: Precision) -> Floats:
    return np.array([card.peak_flops_per_second[precision] for card in cards])
