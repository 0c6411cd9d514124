"""Fit the time that FSDP adds to isolated kernels: `python -m evidence.fit --only fsdp`.

Writes hp_tool/catalog/data/efficiency/frameworks/torch-fsdp/*.yaml: nine constants, fitted to 139
MPT runs on A100 of 40 and 80 GB and 43 on H100. The Triton attention kernel of these runs was
written for A100. On H100 it uses A100's instructions and reaches about two thirds of H100's peak.
Other models do not use it: without ALiBi's biases, torch calls FlashAttention 2. In fp8,
Transformer Engine's fused modules replace eager ones. Kernel constants come from ops/ and clocks
from fit_frameworks, which runs first. `leave_one_model_out` and `across_gpus` predict every run by
constants fitted without its model or its GPU.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from benchmarks.accuracy.comparison import Comparison
from benchmarks.accuracy.fitting import (
    Fit,
    Values,
    compare_left_out,
    errors_of,
    fit_settings,
    fixed_constants,
    framework_file,
    priors,
    rounded,
    with_constants,
)
from benchmarks.accuracy.prepared import Prepared, with_fitted_release
from benchmarks.accuracy.runs import mpt_cases, mpt_h100_cases
from evidence.fitted_file import FittedFile
from hp_tool.catalog import gpu
from hp_tool.catalog.efficiency import gpu_efficiency
from hp_tool.domain.efficiency import FrameworkEfficiency
from hp_tool.loop.calibration.microbenchmarks import round_timing

COMMAND = "python -m evidence.fit --only fsdp"
CARDS = {"a100": "a100-sxm-80gb", "h100": "h100-sxm-80gb", "b200": "b200-sxm-180gb"}
START = fixed_constants("fsdp")
"""Constants that these rows do not determine."""


@dataclasses.dataclass(frozen=True)
class Fitted:
    """The framework's constants for each die."""

    by_die: dict[str, FrameworkEfficiency]
    saw: tuple[Prepared, ...] | None = None
    """Runs to which the constants were fitted."""

    def seen(self, runs: Sequence[Prepared]) -> Fitted:
        """Return the constants as profiles store them: four digits each, and the newest release
        among the fitted runs.
        """
        return Fitted(
            {
                die: dataclasses.replace(
                    with_fitted_release(framework, runs),
                    attention_kernels={
                        name: round_timing(seconds)
                        for name, seconds in framework.attention_kernels.items()
                    },
                )
                for die, framework in self.by_die.items()
            },
            tuple(runs),
        )

    def ratio(self, run: Prepared) -> float:
        return run.ratio(self.by_die[str(run.gpu.silicon)])

    def compare(self, run: Prepared) -> Comparison:
        return run.compare(self.by_die[str(run.gpu.silicon)], saw=self.saw)


def constants(values: Values) -> Fitted:
    """Return the profiles with the free constants."""
    values = dict(values)
    a100, h100, slow, reached = (
        values.pop(name)
        for name in ("a100 matmuls", "h100 matmuls", "attention_slowdown", "without wgmma")
    )
    shared = with_constants(START, values)
    by_die = {
        "a100": dataclasses.replace(
            shared, matmul_slowdown=a100, attention_kernels={"triton": slow}
        ),
        "h100": dataclasses.replace(
            shared,
            matmul_slowdown=h100,
            attention_kernels={"triton": slow * best_of_hopper() / reached},
        ),
    }
    return Fitted(
        {die: _with_own_kernel(framework, "fa2", die) for die, framework in by_die.items()}
    )


def _with_own_kernel(framework: FrameworkEfficiency, name: str, die: str) -> FrameworkEfficiency:
    """Return the constants with torch's attention kernel: FlashAttention 2, or cuDNN's on
    Blackwell.
    """
    return dataclasses.replace(
        framework, attention_kernel=name, attention_slowdown=published_attention_times(die)[name]
    )


@functools.cache
def published_attention_times(die: str) -> dict[str, float]:
    """Return the published times of named attention kernels on the die, relative to the kernel that
    was timed in isolation.
    """
    return gpu_efficiency(gpu(CARDS[die])).attention_kernels


@functools.cache
def best_of_hopper() -> float:
    """Return the fraction of the peak that the best attention kernels reach on H100, relative to
    A100.
    """
    h100, a100 = (
        gpu_efficiency(gpu(name)).attention.peak_fraction
        for name in ("h100-sxm-80gb", "a100-sxm-80gb")
    )
    return h100 / a100


FIT = Fit[Prepared, Fitted](
    priors=priors("fsdp"), constants=constants, errors=errors_of(fit_settings("fsdp")["noise"])
)


@functools.cache
def mpt_runs(folder: Path) -> tuple[Prepared, ...]:
    return tuple(Prepared.from_case(case) for case in (*mpt_cases(folder), *mpt_h100_cases(folder)))


@functools.cache
def fit_all_runs(runs: tuple[Prepared, ...]) -> Values:
    """Return the fit to all runs, which is the starting point of fits without some of the runs."""
    return FIT.values(runs)


def leave_one_model_out(runs: tuple[Prepared, ...]) -> list[Comparison]:
    """Return every run, predicted by constants fitted without its model."""
    return _leaving_out(runs, lambda run: run.case.name)


def across_gpus(runs: tuple[Prepared, ...]) -> list[Comparison]:
    """Return every run, predicted by constants fitted without its GPU."""
    return _leaving_out(runs, lambda run: run.gpu.name)


def _leaving_out(runs: tuple[Prepared, ...], key: Callable[[Prepared], str]) -> list[Comparison]:
    def fit(others: list[Prepared]) -> Callable[[Prepared], Comparison]:
        return FIT(others, starts=[fit_all_runs(runs)]).seen(others).compare

    return compare_left_out(runs, key, fit)


def fitted(folder: Path) -> Iterator[FittedFile]:
    runs = mpt_runs(folder)
    fitted = constants(rounded(fit_all_runs(runs))).seen(runs)
    rows = f"{len(runs)} MPT runs of llm-foundry on A100 of 40 and 80 GB and on H100 by {COMMAND}"
    for name, die in {"a100": "a100", "h100": "h100", "default": "h100"}.items():
        own = "" if name == die else "; as on H100: nobody measured other dies"
        own_kernel = ("fa2", die) if name == die else ("cudnn", "b200")
        profile = dataclasses.replace(
            _with_own_kernel(fitted.by_die[die], *own_kernel),
            fitted_on=f"{rows}; see START there for what those rows do not tell{own}",
        )
        yield framework_file(name, profile)
