"""Fit what FSDP adds to isolated kernels: `python -m benchmarks.accuracy.fit_fsdp --data DIR`.

Writes hp_tool/catalog/data/efficiency/frameworks/torch-fsdp/*.yaml: ten constants on 139 MPT runs on A100 of 40 and 80 GB and
43 on H100. The attention kernel of these runs, in Triton, was written for A100: H100 runs it by the instruction of A100, at
some two thirds of its peak. It is theirs alone: without ALiBi's biases torch calls FlashAttention 2. In fp8 Transformer
Engine's fused modules stand in for eager ones. Kernels come from ops/, clocks from fit_frameworks: run it first.
`leave_one_model_out` and `across_gpus` predict every run by constants that never saw its model, or its GPU.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

import numpy as np
from scipy.optimize import least_squares

from benchmarks.accuracy.comparison import Comparison
from benchmarks.accuracy.data import add_data_argument, data_folder
from benchmarks.accuracy.fit_frameworks import FIXED, Floats, write
from benchmarks.accuracy.fsdp_runs import mpt_cases, mpt_h100_cases
from benchmarks.accuracy.prepared import Prepared, seen
from hp_tool.catalog import gpu
from hp_tool.catalog.efficiency import gpu_efficiency
from hp_tool.domain.efficiency import FrameworkEfficiency

PRIORS = {
    # name: (mean, standard deviation, lowest, highest)
    "elementwise_traffic_factor": (1.5, 0.5, 0.5, 6.0),
    "narrow_traffic_factor": (1.3, 0.3, 0.5, 6.0),
    "data_parallel_overlap": (0.8, 0.2, 0.0, 1.0),
    "optimizer_traffic_factor": (1.4, 0.4, 0.5, 8.0),
    "network_bandwidth_fraction": (0.7, 0.2, 0.1, 1.0),
    "latency_per_peer_s": (5e-6, 1e-5, 0.0, 1e-4),
    "attention_slowdown": (1.2, 0.4, 0.7, 5.0),  # of the Triton kernel on A100
    "a100 matmuls": (1.0, 0.05, 0.8, 1.2),
    "h100 matmuls": (1.0, 0.05, 0.8, 1.2),
    "without wgmma": (0.63, 0.05, 0.4, 0.9),  # arXiv 2402.13499; 2/3 by FlashAttention-3's authors
}
NOISE = 0.04
"""Relative scatter taken for one published run; it sets the runs against the priors."""
CARDS = {"a100": "a100-sxm-80gb", "h100": "h100-sxm-80gb", "b200": "b200-sxm-180gb"}
START = dataclasses.replace(FIXED, framework="torch-fsdp")


@dataclasses.dataclass(frozen=True)
class Fitted:
    """The framework's constants on each die."""

    by_die: dict[str, FrameworkEfficiency]

    def seen(self, runs: Sequence[Prepared]) -> Fitted:
        """Return the constants with the cards of the runs that they were fitted on."""
        return Fitted({die: seen(framework, runs) for die, framework in self.by_die.items()})

    def step_s(self, run: Prepared) -> float:
        return run.step_s(self.by_die[str(run.gpu.silicon)])

    def compare(self, run: Prepared) -> Comparison:
        return run.compare(self.by_die[str(run.gpu.silicon)])


def constants(x: Iterable[float], *, digits: int = 4) -> Fitted:
    """The profiles with the fitted constants in the order of PRIORS."""
    values = dict(zip(PRIORS, (float(f"{v:.{digits}g}") for v in x), strict=True))
    link = dataclasses.replace(
        START.network,
        bandwidth_fraction=values.pop("network_bandwidth_fraction"),
        latency_per_peer_s=values.pop("latency_per_peer_s"),
    )
    a100, h100, slow, reached = (
        values.pop(name) for name in ("a100 matmuls", "h100 matmuls", "attention_slowdown", "without wgmma")
    )
    shared = dataclasses.replace(START, network=link, **values)  # type: ignore[arg-type]
    hopper = float(f"{slow * best_of_hopper() / reached:.{digits}g}")
    by_die = {
        "a100": dataclasses.replace(shared, matmul_slowdown=a100, attention_kernels={"triton": slow}),
        "h100": dataclasses.replace(shared, matmul_slowdown=h100, attention_kernels={"triton": hopper}),
    }
    return Fitted({die: _with_own_kernel(framework, "fa2", die) for die, framework in by_die.items()})


def _with_own_kernel(framework: FrameworkEfficiency, name: str, die: str) -> FrameworkEfficiency:
    """The constants with the kernel that torch's attention calls there: FlashAttention 2, on Blackwell cuDNN's."""
    return dataclasses.replace(framework, attention_kernel=name, attention_slowdown=published(die)[name])


@functools.cache
def published(die: str) -> dict[str, float]:
    """Seconds of named attention kernels on the die over those of the one timed alone."""
    return gpu_efficiency(gpu(CARDS[die])).attention_kernels


@functools.cache
def best_of_hopper() -> float:
    """Share of the peak that the best attention kernels reach on H100, against A100."""
    h100, a100 = (gpu_efficiency(gpu(name)).attention.peak_fraction for name in ("h100-sxm-80gb", "a100-sxm-80gb"))
    return h100 / a100


def fit(runs: Sequence[Prepared], *, start: Floats | None = None) -> Floats:
    """Maximum a posteriori with a soft-l1 loss: a few runs short of memory or network must not bend it. `start` is near."""
    mean, sd, low, high = (np.array(column) for column in zip(*PRIORS.values(), strict=True))

    def residuals(z: Floats) -> Floats:
        found = constants(mean + z * sd, digits=16)
        return np.concatenate([[np.log(found.step_s(run) / run.case.step_s) / NOISE for run in runs], z])

    near = np.full(len(mean), 1e-2) if start is None else (start - mean) / sd
    bounds = ((low - mean) / sd, (high - mean) / sd)
    found = least_squares(residuals, near, bounds=bounds, loss="soft_l1", diff_step=1e-2, xtol=1e-4, ftol=1e-4)
    return mean + found.x * sd


def mpt_runs(folder: Path) -> list[Prepared]:
    return [Prepared.of(case) for case in (*mpt_cases(folder), *mpt_h100_cases(folder))]


def leave_one_model_out(runs: Sequence[Prepared]) -> list[Comparison]:
    """Every run, predicted by constants that never saw its model."""
    return _leaving_out(runs, lambda run: run.case.name)


def across_gpus(runs: Sequence[Prepared]) -> list[Comparison]:
    """Every run, predicted by constants that never saw its GPU."""
    return _leaving_out(runs, lambda run: run.problem.cluster.gpu.name)


def _leaving_out(runs: Sequence[Prepared], key: Callable[[Prepared], str]) -> list[Comparison]:
    found, everything = [], fit(runs)
    for group in dict.fromkeys(map(key, runs)):
        others = [run for run in runs if key(run) != group]
        fitted = constants(fit(others, start=everything)).seen(others)
        found += [fitted.compare(run) for run in runs if key(run) == group]
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_data_argument(parser)
    folder = data_folder(parser.parse_args())
    if folder is None:
        return
    runs = mpt_runs(folder)
    fitted = constants(fit(runs)).seen(runs)
    rows = f"{len(runs)} MPT runs of llm-foundry on A100 of 40 and 80 GB and on H100 by python -m benchmarks.accuracy.fit_fsdp"
    dies = {"a100": "a100", "h100": "h100", "default": "h100"}
    for name, die in dies.items():
        own = "" if name == die else "; as on H100: nobody measured other dies"
        own_kernel = ("fa2", die) if name == die else ("cudnn", "b200")
        found = dataclasses.replace(
            _with_own_kernel(fitted.by_die[die], *own_kernel),
            fitted_on=f"{rows}; see START there for what those rows do not tell{own}",
        )
        write(name, found, command="benchmarks.accuracy.fit_fsdp")
    for title, comparisons in (("one model", leave_one_model_out(runs)), ("one GPU", across_gpus(runs))):
        errors = np.array([abs(c.error) for c in comparisons])
        print(f"MPT leaving {title} out: mean {errors.mean():.2%}, median {np.median(errors):.2%}, worst {errors.max():.2%}")


if __name__ == "__main__":
    main()
