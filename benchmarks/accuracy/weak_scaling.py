"""Weak scaling: how much longer a step takes on more GPUs with the same work for each, measured and
predicted: `python -m benchmarks.accuracy.weak_scaling [--data DIR]`.

Also fits the constants of `cost.stragglers`: how much the devices of a job differ in speed, and how
much one device's micro-batches differ. Each series is predicted by constants fitted to the other
series.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import math
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from scipy.optimize import least_squares

from benchmarks.accuracy.comparison import Comparison
from benchmarks.accuracy.data import add_data_argument, data_folder
from benchmarks.accuracy.prepared import Prepared
from benchmarks.accuracy.runs import dgxc_cases, mpt_h100_cases
from evidence.cases import Case
from hp_tool.catalog.efficiency import efficiency_profile

Series = tuple[Case, ...]
CONSTANTS = ("device_log_sd", "micro_batch_log_sd")


def num_gpus(case: Case) -> int:
    assert case.cluster.num_gpus is not None
    return case.cluster.num_gpus


@functools.cache
def weak_series(folder: Path) -> tuple[Series, ...]:
    """Return runs that differ only in the number of GPUs and the batch size, which is proportional
    to it, in ascending order of GPUs: DGX Cloud's Llama 3 by release and precision, and MPT on
    H100.
    """
    grouped: dict[object, list[Case]] = defaultdict(list)
    for case in (*dgxc_cases(folder), *mpt_h100_cases(folder)):
        training, gpus = case.query.training, num_gpus(case)
        assert training is not None and isinstance(training.global_batch_size, int)
        alike = (
            case.name,
            dataclasses.replace(training, global_batch_size=1),
            training.global_batch_size / gpus,
            dataclasses.replace(case.query.parallel, data_parallel_size=None),
        )
        grouped[repr(alike)].append(case)
    series = (sorted(cases, key=num_gpus) for cases in grouped.values())
    return tuple(
        tuple(cases) for cases in series if cases[0].cluster.num_gpus < cases[-1].cluster.num_gpus
    )


def predicted_s(case: Case, values: Sequence[float]) -> float:
    """Return the step time predicted by the shipped constants with these values of CONSTANTS."""
    run = Prepared.from_case(case)
    assert case.query.training is not None
    framework = efficiency_profile(gpu=run.gpu, framework=case.query.training.framework).framework
    return run.step_s(
        dataclasses.replace(
            framework,
            device_log_sd=float(values[0]),
            micro_batch_log_sd=float(values[1]),
        )
    )


def fit(series: Sequence[Series]) -> tuple[float, ...]:
    """Return the values of CONSTANTS for which the predicted growth of these series is closest to
    the measured growth. Errors that all runs of a series share cancel.
    """

    def residuals(values: Sequence[float]) -> np.ndarray:
        shapes = [
            np.log([predicted_s(case, values) / case.step_s for case in cases]) for cases in series
        ]
        return np.concatenate([shape - shape.mean() for shape in shapes])

    return tuple(least_squares(residuals, (0.01, 0.02), bounds=(0.0, 0.2), diff_step=0.1).x)


def compare_growth(series: Series, values: Sequence[float]) -> list[Comparison]:
    """Return the published and predicted step time of each run relative to the run on the fewest
    GPUs.
    """
    first, *others = series
    base = predicted_s(first, values)
    return [
        Comparison(
            source=case.source,
            model=case.name,
            what=f"{case.what}, against x{num_gpus(first)}",
            published=case.step_s / first.step_s,
            predicted=predicted_s(case, values) / base,
            gpu=case.card,
            part=case.card,
        )
        for case in others
    ]


def ratios_left_out(folder: Path) -> list[Comparison]:
    """Return the growth of every series, predicted by constants fitted without it."""
    every = weak_series(folder)
    return [
        row
        for series in every
        for row in compare_growth(series, fit([other for other in every if other is not series]))
    ]


def main(arguments: list[str] | None = None) -> None:
    """Print the fitted constants, and the growth of the largest job of each series."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.accuracy.weak_scaling", description=__doc__
    )
    add_data_argument(parser)
    every = weak_series(data_folder(parser.parse_args(arguments)))
    values = fit(every)
    print(", ".join(f"{name} {value:.4f}" for name, value in zip(CONSTANTS, values, strict=True)))
    for series in every:
        own = fit([other for other in every if other is not series])
        largest, flat = compare_growth(series, own)[-1], compare_growth(series, (0.0, 0.0))[-1]
        print(
            f"{largest.model:14} {largest.what:76} measured {largest.published - 1.0:+6.1%}, "
            f"predicted {largest.predicted - 1.0:+6.1%} "
            f"(equal devices {flat.predicted - 1.0:+6.1%})"
        )
    errors = [
        abs(math.expm1(row.log_ratio)) for row in (compare_growth(s, values)[-1] for s in every)
    ]
    print(f"mean difference {np.mean(errors):.2%} of the largest jobs, seen")


if __name__ == "__main__":
    main()
