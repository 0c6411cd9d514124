"""Kernels timed alone (ops/*.csv), by card and shape, and robust fits of their seconds."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
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


Free = tuple[float, float, float]
"""(start, least, most) of a constant."""


def fit_times(
    title: str, predicted_s: Callable[..., Floats], seconds: Floats, **free: Free
) -> Values:
    """Return the constants of `predicted_s(**constants)` by robust least squares on log ratios, and
    print how far it is off.
    """

    def residuals(x: Floats) -> Floats:
        return np.asarray(np.log(predicted_s(**dict(zip(free, x, strict=True))) / seconds))

    x = robust_fit(residuals, *(list(column) for column in zip(*free.values(), strict=True)))
    errors = np.abs(np.expm1(residuals(x)))
    values = dict(zip(free, map(float, x), strict=True))
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
