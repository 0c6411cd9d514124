"""Fit what a framework adds to isolated kernels: `python -m benchmarks.accuracy.fit_frameworks --data DIR`.

Writes hp_tool/catalog/data/efficiency/frameworks/megatron-core/*.yaml: software of 2022 (on A100 and older) from the 19 figures
of arXiv 2205.05198's Tables 4 and 5, which wait for most of their communication; today's from NVIDIA's dense recipes,
DGX Cloud's benchmarks and MLPerf pre-training on H100, and cut models on B200; experts as fit_training_experts says. With them
come the clocks that trainings sustain (`efficiency/clocks`), and what Megatron's fused accumulation in fp32 costs on B200: rows
that say it of H100 are missing, where half of it is assumed. fit_fsdp and fit_nanotron stand on these clocks: run them after.
Priors keep them physical; `fit(..., leave_out=MODEL)` and the functions named left_out fit without a model's, a layout's or a
card's rows.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import least_squares

import hp_tool
from benchmarks.accuracy.comparison import Comparison
from benchmarks.accuracy.data import Row, add_data_argument, data_folder, read, write_constants
from benchmarks.accuracy.dgxc_runs import SOURCE as DGXC
from benchmarks.accuracy.dgxc_runs import dgxc_cases
from benchmarks.accuracy.fit_training_experts import PRIORS as EXPERT_PRIORS
from benchmarks.accuracy.fit_training_experts import with_experts
from benchmarks.accuracy.heldout import b200_cases, bridge_cases, megatron_2020_cases
from benchmarks.accuracy.korthikanti import GPU, MODELS, table4, table5
from benchmarks.accuracy.mlperf_runs import mlperf_cases
from benchmarks.accuracy.moe_runs import newest
from benchmarks.accuracy.prepared import Prepared, Shares, clocks, seen, write_clocks
from benchmarks.accuracy.recipe_runs import recipe_cases
from hp_tool import documents
from hp_tool.catalog import gpu
from hp_tool.catalog.efficiency import efficiency, gpu_efficiency, sustained
from hp_tool.domain.efficiency import EfficiencyProfile, FrameworkEfficiency, Link

Floats = NDArray[np.float64]

OUTPUT = Path(hp_tool.__file__).parent / "catalog/data/efficiency/frameworks"
SCATTER = ("time_log_sd", "expert_time_log_sd", "earlier_expert_time_log_sd", "pair_log_sd", "expert_pair_log_sd")

PRIORS = {
    # name: (mean, standard deviation, lowest, highest)
    "elementwise_traffic_factor": (1.2, 0.3, 0.5, 4.0),
    "tensor_parallel_overlap": (0.5, 0.4, 0.0, 1.0),
    "optimizer_traffic_factor": (1.3, 0.3, 0.5, 5.0),
    "network_bandwidth_fraction": (0.7, 0.2, 0.1, 1.0),
    "clocks": (0.9, 0.05, 0.4, 1.0),  # of 16-bit matmuls on A100
}
NOISE = 0.03
"""Relative scatter taken for one published figure; it sets the figures against the priors."""

FIXED = FrameworkEfficiency(
    framework="megatron-core",
    elementwise_traffic_factor=1.0,
    attention_backward_slowdown=1.25,  # FlashAttention-2 and -3 reach 1.2 to 1.3 times their backward FLOP/s forward
    tensor_parallel_overlap=0.0,
    tensor_parallel_forward_overlap=0.0,  # these runs wait for their forward collectives
    context_parallel_overlap=0.9,  # ring attention: the transfer runs beside the attention of the step before
    expert_parallel_overlap=0.0,  # Megatron Core's default dispatcher waits for its all-to-all
    data_parallel_overlap=0.0,  # these runs reduce gradients after the backward pass
    pipeline_overlap=0.0,
    network=Link(bandwidth_fraction=0.7, latency_s=1e-5, latency_per_peer_s=2e-6, ramp_bytes=1.4e7),
    optimizer_traffic_factor=1.0,
    step_overhead_s=0.0,
    time_log_sd=0.08,
    fitted_gpus=(GPU,),
    fitted_silicon=("a100",),
    newest_release="22.05",
    memory_log_sd=0.03,
    fragmentation_fraction=0.03,
    fitted_on="",
)
"""What these rows do not tell, and where the values come from."""


def profile_2022(x: Floats) -> EfficiencyProfile:
    """The profile with the fitted constants in the order of PRIORS."""
    values = dict(zip(PRIORS, (float(f"{v:.4g}") for v in x), strict=True))
    shares: Shares = {("a100", "bf16"): values.pop("clocks")}
    link = dataclasses.replace(FIXED.network, bandwidth_fraction=values.pop("network_bandwidth_fraction"))
    kernels = sustained(gpu_efficiency(gpu(GPU)), gpu=gpu(GPU), clocks=clocks("a100", shares))
    return EfficiencyProfile(gpu=kernels, framework=dataclasses.replace(FIXED, network=link, **values))  # type: ignore[arg-type]


def compare(rows4: list[Row], rows5: list[Row], profile: EfficiencyProfile) -> list[Comparison]:
    return table4(rows4, profile) + table5(rows5, profile)


def fit(folder: Path, *, leave_out: str | None = None) -> EfficiencyProfile:
    """Maximum a posteriori fit; `leave_out` names a model of Table 5 whose rows are not seen."""
    return profile_2022(fitted_2022(folder, leave_out=leave_out))


def fitted_2022(folder: Path, *, leave_out: str | None = None) -> Floats:
    """The constants in the order of PRIORS."""
    rows4 = read(folder, "korthikanti2022_table4.csv")
    rows5 = [row for row in read(folder, "korthikanti2022_table5.csv") if row["model"].split()[0] != leave_out]
    mean, sd, low, high = (np.array(column) for column in zip(*PRIORS.values(), strict=True))

    def residuals(x: Floats) -> Floats:
        found = compare(rows4, rows5, profile_2022(x))
        return np.concatenate([[np.log1p(c.error) / NOISE for c in found], (x - mean) / sd])

    return least_squares(residuals, mean, bounds=(low, high), diff_step=1e-3).x


def leave_one_out(folder: Path) -> list[Comparison]:
    """Every Table 5 figure, predicted by constants that never saw its model's Table 5 rows."""
    rows = read(folder, "korthikanti2022_table5.csv")
    return [
        comparison
        for size in MODELS
        for comparison in table5([row for row in rows if row["model"].split()[0] == size], fit(folder, leave_out=size))
    ]


OVERLAPS = ("tensor_parallel_overlap", "tensor_parallel_forward_overlap", "pipeline_overlap", "data_parallel_overlap")
MODERN_PRIORS = {
    "elementwise_traffic_factor": (1.2, 0.4, 0.5, 4.0),
    **dict.fromkeys(OVERLAPS, (0.7, 0.3, 0.0, 1.0)),
    "network_bandwidth_fraction": (0.7, 0.2, 0.1, 1.0),
    "host_launch_s": (1e-4, 1e-4, 0.0, 5e-4),
    "yearly_gain": (0.0, 0.05, -0.2, 0.3),
}
ACCUMULATION_PRIORS = {"b200": (1.3, 0.5, 1.0, 4.0)}
"""Of fp32_accumulation by die: only the cut models on B200 keep their gradients in fp32."""
CLOCK_PRIORS: dict[tuple[str, str], tuple[float, float, float, float]] = {
    ("h100", "bf16"): (0.85, 0.1, 0.4, 1.0),
    ("h100", "fp8"): (0.85, 0.1, 0.4, 1.0),
    ("b200", "bf16"): (0.8, 0.15, 0.3, 1.0),
    ("b200", "fp8"): (0.85, 0.1, 0.4, 1.0),
}
MODERN_NOISE = 0.04
REPEATED = ("MLPerf Training", DGXC)
REPEATED_WEIGHT = 0.5
"""Of MLPerf's and DGX Cloud's rows: a few layouts of one model each, submitted or scaled many times."""


@dataclasses.dataclass(frozen=True)
class Today:
    """Today's Megatron Core, and the clocks fitted with it."""

    framework: FrameworkEfficiency
    shares: Shares

    def compare(self, run: Prepared, *, ahead: bool = False) -> Comparison:
        return run.compare(self.framework, self.shares, ahead=ahead)


@functools.cache
def today_runs(folder: Path) -> tuple[Prepared, ...]:
    """Every row that today's constants may be fitted on."""
    audited = [case for case in mlperf_cases(folder) if "lora" not in case.name and " v3.0" not in case.what]
    experts = newest([case for case in recipe_cases(folder) if case.has_experts])
    return tuple(map(Prepared.of, [*bridge_cases(folder), *dgxc_cases(folder), *audited, *b200_cases(folder), *experts]))


def fit_today(runs: Iterable[Prepared], start: FrameworkEfficiency) -> Today:
    """Software that hides most of its communication: its constants, its hosts' and its dies' clocks, on all dense rows at once,
    then what experts add, on theirs. A few rows out of line must not bend them.
    """
    runs = list(runs)
    chosen = [run for run in runs if run.problem.model.num_experts is None]
    # Of a card that only experts ran on little is known; a release is known by any.
    start = dataclasses.replace(seen(start, chosen), newest_release=seen(start, runs).newest_release)
    weights = np.array([REPEATED_WEIGHT if run.case.source in REPEATED else 1.0 for run in chosen]) / MODERN_NOISE
    priors = (*MODERN_PRIORS.values(), *CLOCK_PRIORS.values(), *ACCUMULATION_PRIORS.values())
    mean, sd, low, high = (np.array(column) for column in zip(*priors, strict=True))

    def constants(z: Floats, *, digits: int = 16) -> Today:
        values = [float(f"{value:.{digits}g}") for value in mean + z * sd]
        named = dict(zip(MODERN_PRIORS, values, strict=False))
        link = dataclasses.replace(start.network, bandwidth_fraction=named.pop("network_bandwidth_fraction"))
        shares = dict(zip(CLOCK_PRIORS, values[len(MODERN_PRIORS) :], strict=False))
        added = dict(zip(ACCUMULATION_PRIORS, values[-len(ACCUMULATION_PRIORS) :], strict=True))
        framework = dataclasses.replace(start, network=link, fp32_accumulation=added, **named)  # type: ignore[arg-type]
        return Today(framework, shares)

    def residuals(z: Floats) -> Floats:
        found = constants(z)
        errors = np.log([run.ratio(found.framework, found.shares) for run in chosen])
        return np.concatenate([errors * weights, z])

    bounds = ((low - mean) / sd, (high - mean) / sd)
    near = np.full(len(mean), 1e-2)
    fitted = least_squares(residuals, near, bounds=bounds, loss="soft_l1", diff_step=1e-2, xtol=1e-4, ftol=1e-4)
    found = constants(fitted.x, digits=4)
    return dataclasses.replace(found, framework=with_experts(runs, found.framework, found.shares))


def _left_out(folder: Path, runs: Iterable[Prepared], key: Callable[[Prepared], str]) -> list[Comparison]:
    """These runs, each predicted by constants that saw no row of its key."""
    start, found = fit(folder).framework, []
    for group, members in _grouped(runs, key).items():
        constants = fit_today([run for run in today_runs(folder) if key(run) != group], start)
        found += map(constants.compare, members)
    return found


def _grouped(runs: Iterable[Prepared], key: Callable[[Prepared], str]) -> dict[str, list[Prepared]]:
    grouped: dict[str, list[Prepared]] = {}
    for run in runs:
        grouped.setdefault(key(run), []).append(run)
    return grouped


def modern_leave_one_out(folder: Path) -> list[Comparison]:
    """Every dense recipe and MLPerf pre-training on H100, by constants that never saw its model."""
    dense = [run for run in today_runs(folder) if run.gpu.silicon == "h100" and run.problem.model.num_experts is None]
    return _left_out(folder, dense, lambda run: run.case.name)


def amd_runs(folder: Path) -> list[Prepared]:
    """LoRA on MI300X and MI325X, the only published runs of their die with a layout."""
    return [Prepared.of(case) for case in mlperf_cases(folder) if case.what.startswith("MI3")]


def v100_runs(folder: Path) -> list[Prepared]:
    """Megatron-LM of 2020 on one to eight V100, the only published runs of their die with a layout."""
    return [Prepared.of(case) for case in megatron_2020_cases(folder) if "V100" in case.what]


def fit_die(die: str, runs: Sequence[Prepared], framework: FrameworkEfficiency) -> Shares:
    """What matmuls of this die reach of a typical die's at boost: kernels and clocks in one, as nobody timed them apart."""

    def residuals(x: Floats) -> Floats:
        return np.log([run.ratio(framework, {(die, "bf16"): x[0]}) for run in runs]) / MODERN_NOISE

    return {(die, "bf16"): float(least_squares(residuals, 0.6, bounds=(0.2, 1.0), loss="soft_l1").x[0])}


def die_left_out(runs: Sequence[Prepared], key: Callable[[Prepared], str]) -> list[Comparison]:
    """Every row of one die, by what the rows of other keys say of the die."""
    card = runs[0].gpu
    framework, found = efficiency(gpu=card, framework="megatron-core").framework, []
    for group, members in _grouped(runs, key).items():
        others = [run for run in runs if key(run) != group]
        shares = fit_die(card.silicon or "generic", others, framework)
        found += [run.compare(seen(framework, others), shares) for run in members]
    return found


def amd_left_out(folder: Path) -> list[Comparison]:
    """Every AMD row, by what the other card's rows say of the die."""
    return die_left_out(amd_runs(folder), lambda run: run.gpu.name)


def megatron_2020_left_out(folder: Path) -> list[Comparison]:
    """Every row of 2020: on V100 by what the other models' rows say of the die; no constant saw those on A100."""
    others = [Prepared.of(case).shipped() for case in megatron_2020_cases(folder) if "V100" not in case.what]
    return [*die_left_out(v100_runs(folder), lambda run: run.case.name), *others] if others else []


def write(name: str, constants: FrameworkEfficiency, *, command: str = "benchmarks.accuracy.fit_frameworks") -> None:
    """The profile of one die (or `default`) as a data file; fit_intervals says how far its predictions scatter."""
    path = OUTPUT / constants.framework / f"{name}.yaml"
    fields = dataclasses.asdict(constants)
    known = documents.read(path) if path.is_file() else {}
    fields |= {key: known[key] for key in SCATTER if key in known}
    write_constants(path, fields, command=command)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_data_argument(parser)
    folder = data_folder(parser.parse_args())
    if folder is None:
        return
    command = "by python -m benchmarks.accuracy.fit_frameworks; see FIXED there for what those rows do not tell"
    old = fit(folder).framework
    today = fit_today(today_runs(folder), old)
    rows = (
        "dense recipes of Megatron Bridge and NeMo, DGX Cloud's benchmarks of Llama 3 in bf16 and fp8 and MLPerf pre-training "
        "from v3.1 on, on H100; dense models and "
        "DeepSeek-V2 cut to fit 8 B200 (18 step times); recipes on B200; today's recipes of experts"
    )
    old = dataclasses.replace(
        old,
        host_launch_s=today.framework.host_launch_s,
        **{name: getattr(today.framework, name) for name in EXPERT_PRIORS},
        attention_kernel="fa2",  # Transformer Engine's choice before Hopper
        fitted_on=f"Tables 4 and 5 of arXiv 2205.05198 (A100, 19 figures, software of 2022); host as today's {command}",
    )
    added = today.framework.fp32_accumulation
    modern = dataclasses.replace(
        today.framework,
        # Nobody measured it on B300: as B200. Nor on H100: halfway, on a logarithmic scale, between nothing and B200's.
        attention_kernel="cudnn",  # Transformer Engine's choice from Hopper on
        fp32_accumulation={"h100": float(f"{added['b200'] ** 0.5:.4g}"), **added, "b300": added["b200"]},
        fitted_on=f"{rows}; {command}",
    )
    write("a100", old)
    volta = dataclasses.replace(seen(old, v100_runs(folder)), newest_release=old.newest_release, attention_kernel=None)
    write("v100", volta)
    amd = amd_runs(folder)
    saw_all = seen(modern, [*(run for run in today_runs(folder) if run.problem.model.num_experts is None), *amd])
    write("default", dataclasses.replace(saw_all, newest_release=modern.newest_release))
    write(
        "cpu",
        dataclasses.replace(
            FIXED,
            fitted_gpus=(),
            fitted_silicon=(),
            newest_release=None,
            fitted_on="nothing: processes on a CPU hide nothing, and each search calibrates",
        ),
    )
    by = "by python -m benchmarks.accuracy.fit_frameworks"
    write_clocks({("a100", "bf16"): fitted_2022(folder)[-1]}, fitted_on=f"Tables 4 and 5 of arXiv 2205.05198 {by}")
    write_clocks(today.shares, fitted_on=f"{rows}; {by}")
    v100 = fit_die("v100", v100_runs(folder), old)
    write_clocks(v100, fitted_on=f"four runs of Megatron-LM 2020 on V100, kernels and clocks in one; {by}")
    write_clocks(
        fit_die("mi300x", amd, modern), fitted_on=f"LoRA of MLPerf on MI300X and MI325X, kernels and clocks in one; {by}"
    )
    for title, found in (("Table 5", leave_one_out(folder)), ("H100 recipes", modern_leave_one_out(folder))):
        errors = [abs(c.error) for c in found]
        print(f"{title} leaving one model out: mean {np.mean(errors):.2%}, worst {max(errors):.2%}")


if __name__ == "__main__":
    main()
