"""Fit what state spaces take in training: `python -m evidence.fit --only training_mixers`.

One constant of today's Megatron Core, on top of all others: the rate of the scan that it trains
Mamba 2 with, which nobody timed alone, on recipes of Nemotron 3 Nano. Its prior, a tenth of H100's
peak, is judged.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from pathlib import Path

from benchmarks.accuracy.comparison import Comparison
from benchmarks.accuracy.fit_frameworks import today_runs
from benchmarks.accuracy.fit_training_experts import NOISE
from benchmarks.accuracy.fitting import (
    Fit,
    Prior,
    errors_by_setting,
    left_out,
    with_constants,
)
from benchmarks.accuracy.prepared import Prepared
from benchmarks.accuracy.runs import hybrid_cases
from evidence.fitted_file import FittedFile
from hp_tool.catalog import efficiency
from hp_tool.domain.efficiency import FrameworkEfficiency

CONSTANT = "state_scan_flops_per_second"
_framework = functools.partial(efficiency._framework, "megatron-core", "default")
PRIORS = {CONSTANT: Prior(100e12, 100e12, 5e12, 500e12)}


def with_scan(runs: Sequence[Prepared], framework: FrameworkEfficiency) -> FrameworkEfficiency:
    """The constants with the scan's rate fitted on these runs; releases of one configuration share
    its vote.
    """

    fit = Fit[Prepared, FrameworkEfficiency](
        priors=PRIORS,
        constants=functools.partial(with_constants, framework),
        errors=functools.partial(errors_by_setting, noise=NOISE),
    )
    return fit(runs)


def hybrids_left_out(folder: Path) -> list[Comparison]:
    """Every row, by what other cards' rows say of the scan."""
    rows: list[Comparison] = []
    for _, members, others in left_out(hybrid_runs(folder), lambda run: run.gpu.name):
        framework = with_scan(others, _framework())
        saw = [*today_runs(folder), *others]
        rows += [run.compare(framework, saw=saw) for run in members]
    return rows


def hybrid_runs(folder: Path) -> list[Prepared]:
    """Recipes of Nemotron 3 Nano."""
    return [Prepared.of(case) for case in hybrid_cases(folder)]


def fitted(folder: Path) -> Iterator[FittedFile]:
    """Yield the constant of today's Megatron Core."""
    framework = with_scan(hybrid_runs(folder), _framework())
    yield FittedFile(
        file="frameworks/megatron-core/default.yaml",
        fields={CONSTANT: getattr(framework, CONSTANT)},
        keeps=None,
    )
