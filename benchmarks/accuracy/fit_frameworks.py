"""Fit what a framework adds to isolated kernels: `python -m benchmarks.accuracy.fit_frameworks --data DIR`.

Writes hp_tool/catalog/data/efficiency/frameworks/megatron-core/*.yaml, by GPU because software and GPU changed together:
A100 (and older) five constants on the 19 figures of arXiv 2205.05198's Tables 4 and 5, software of 2022 that waits for most
of its communication; every other GPU six constants on NVIDIA's dense fp8 recipes for H100, software that hides it. Priors
keep them physical; `fit(..., leave_out=MODEL)` and `modern_leave_one_out` fit without one model's rows.
"""

from __future__ import annotations

import argparse
import dataclasses
import math
from pathlib import Path

import numpy as np
import yaml
from numpy.typing import NDArray
from scipy.optimize import least_squares

import hp_tool
from benchmarks.accuracy.data import Row, add_data_argument, data_folder, read
from benchmarks.accuracy.fsdp_memory import scatter_above
from benchmarks.accuracy.heldout import Case, b200_cases, bridge_cases
from benchmarks.accuracy.korthikanti import GPU, MODELS, Comparison, table4, table5
from benchmarks.accuracy.moe_runs import moe_cases, newest
from hp_tool.catalog import gpu
from hp_tool.catalog.efficiency import gpu_efficiency
from hp_tool.cost.candidates import Candidates
from hp_tool.cost.overlap import with_overlap
from hp_tool.cost.step_time import without_host
from hp_tool.domain.efficiency import EfficiencyProfile, FrameworkEfficiency, Link
from hp_tool.training.evaluate import resolve_config
from hp_tool.training.problem import resolve_training

Floats = NDArray[np.float64]

OUTPUT = Path(hp_tool.__file__).parent / "catalog/data/efficiency/frameworks"

PRIORS = {
    # name: (mean, standard deviation, lowest, highest)
    "matmul_slowdown": (1.05, 0.08, 0.8, 2.0),
    "elementwise_traffic_factor": (1.2, 0.3, 0.5, 4.0),
    "tensor_parallel_overlap": (0.5, 0.4, 0.0, 1.0),
    "optimizer_traffic_factor": (1.3, 0.3, 0.5, 5.0),
    "network_bandwidth_fraction": (0.7, 0.2, 0.1, 1.0),
}
NOISE = 0.03
"""Relative scatter taken for one published figure; it sets the figures against the priors."""

FIXED = FrameworkEfficiency(
    framework="megatron-core",
    matmul_slowdown=1.0,
    narrow_matmul_slowdown=1.0,
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
    memory_log_sd=0.03,
    fragmentation_fraction=0.03,
    fitted_on="",
)
"""What these rows do not tell, and where the values come from."""


def framework(x: Floats) -> FrameworkEfficiency:
    """The profile with the fitted constants in the order of PRIORS."""
    values = dict(zip(PRIORS, (float(f"{v:.4g}") for v in x), strict=True))
    link = dataclasses.replace(FIXED.network, bandwidth_fraction=values.pop("network_bandwidth_fraction"))
    return dataclasses.replace(FIXED, network=link, **values)


def compare(rows4: list[Row], rows5: list[Row], profile: EfficiencyProfile) -> list[Comparison]:
    return table4(rows4, profile) + table5(rows5, profile)


def fit(folder: Path, *, leave_out: str | None = None) -> EfficiencyProfile:
    """Maximum a posteriori fit; `leave_out` names a model of Table 5 whose rows are not seen."""
    rows4 = read(folder, "korthikanti2022_table4.csv")
    rows5 = [row for row in read(folder, "korthikanti2022_table5.csv") if row["model"].split()[0] != leave_out]
    device = gpu_efficiency(gpu(GPU))
    mean, sd, low, high = (np.array(column) for column in zip(*PRIORS.values(), strict=True))

    def residuals(x: Floats) -> Floats:
        found = compare(rows4, rows5, EfficiencyProfile(gpu=device, framework=framework(x)))
        return np.concatenate([[np.log1p(c.error) / NOISE for c in found], (x - mean) / sd])

    x = least_squares(residuals, mean, bounds=(low, high), diff_step=1e-3).x
    return EfficiencyProfile(gpu=device, framework=framework(x))


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
    "narrow_matmul_slowdown": (1.1, 0.15, 0.8, 2.0),
    "elementwise_traffic_factor": (1.2, 0.4, 0.5, 4.0),
} | dict.fromkeys(OVERLAPS, (0.7, 0.3, 0.0, 1.0))
MODERN_NOISE = 0.04
SPREAD = {
    "2022": 0.065,  # the twelve rows of 2020 on V100 and A100, never fitted; Table 5 leaving one model out scatters by 0.024
    "today": 0.1,  # H100 recipes leaving one model out scatter by 0.055; 16-bit matmuls there are interpolated
    "b200": 0.1,  # dense cut models leaving one layout out scatter by 0.05, on one node
}
"""Standard deviations of log(measured / predicted) behind the stated intervals; `python -m benchmarks.accuracy` prints them."""


def step_ratio(case: Case, framework: FrameworkEfficiency) -> float:
    """Predicted over published step time under these constants."""
    problem = resolve_training(case.query)
    training = case.query.training
    assert training is not None
    framework = with_overlap(framework, overlap=training.overlap, newest=framework)
    if training.cuda_graphs:
        framework = without_host(framework)
    problem = dataclasses.replace(problem, profile=EfficiencyProfile(gpu=problem.profile.gpu, framework=framework))
    candidate = Candidates.alone(resolve_config(case.query.parallel, num_gpus=problem.cluster.num_gpus))
    return float(problem.costs(candidate).step_s) / case.step_s


def fit_modern(cases: list[Case], start: FrameworkEfficiency) -> FrameworkEfficiency:
    """Today's Megatron Core, which hides most of its communication: six constants on dense fp8 recipes."""
    mean, sd, low, high = (np.array(column) for column in zip(*MODERN_PRIORS.values(), strict=True))

    def constants(x: Floats) -> FrameworkEfficiency:
        return dataclasses.replace(start, **{n: float(f"{v:.4g}") for n, v in zip(MODERN_PRIORS, x, strict=True)})

    def residuals(x: Floats) -> Floats:
        found = [math.log(step_ratio(case, constants(x))) / MODERN_NOISE for case in cases]
        return np.concatenate([found, (x - mean) / sd])

    return constants(least_squares(residuals, mean, bounds=(low, high), diff_step=1e-3).x)


HOST_PRIORS = {
    # name: (mean, standard deviation, lowest, highest); nanotron's hosts take 4 ms a layer
    "matmul_slowdown": (1.3, 0.3, 0.8, 3.0),
    "host_layer_s": (4e-3, 2e-3, 0.0, 2e-2),
    "expert_overhead_s": (1e-3, 2e-3, 0.0, 1e-2),
}


def fit_host(cases: list[Case], start: FrameworkEfficiency) -> FrameworkEfficiency:
    """16-bit matmul slowdown and the host's two constants, on runs whose overlap is known (cut models) and on recipes with
    experts: layers that are small enough tell the host's pace.
    """
    mean, sd, low, high = (np.array(column) for column in zip(*HOST_PRIORS.values(), strict=True))

    def constants(x: Floats) -> FrameworkEfficiency:
        found = zip(HOST_PRIORS, (float(f"{v:.4g}") for v in x * sd), strict=True)
        return dataclasses.replace(start, **dict(found))  # type: ignore[arg-type]

    def residuals(x: Floats) -> Floats:
        found = [math.log(step_ratio(case, constants(x))) / MODERN_NOISE for case in cases]
        return np.concatenate([found, x - mean / sd])

    bounds = (low / sd, high / sd)
    return constants(least_squares(residuals, mean / sd, bounds=bounds, loss="soft_l1", diff_step=1e-3).x)


def modern_leave_one_out(folder: Path) -> list[Comparison]:
    """Every dense H100 recipe, predicted by constants that never saw its model."""
    cases = dense_h100(folder)
    found = []
    for name in dict.fromkeys(case.name for case in cases):
        constants = fit_modern([case for case in cases if case.name != name], fit(folder).framework)
        found += [compare_step(case, constants) for case in cases if case.name == name]
    return found


def b200_leave_one_out(folder: Path) -> list[Comparison]:
    """Every dense cut model on B200, predicted by a slowdown and a host that never saw its layout (its three batch sizes go
    together); runs with experts tell of the host.
    """
    cases, others = dense_b200(folder), sparse_b200(folder) + newest(moe_cases(folder))
    start = fit_modern(dense_h100(folder), fit(folder).framework)
    found = []
    for layout in dict.fromkeys(case.layout for case in cases):
        constants = fit_host([case for case in cases if case.layout != layout] + others, start)
        found += [compare_step(case, constants) for case in cases if case.layout == layout]
    return found


def moe_left_out(folder: Path) -> list[Comparison]:
    """Recipes with experts, predicted by constants that saw none of them."""
    constants = fit_host(dense_b200(folder) + sparse_b200(folder), fit_modern(dense_h100(folder), fit(folder).framework))
    return [compare_step(case, constants) for case in moe_cases(folder)]


def widths(folder: Path) -> dict[str, float]:
    """Standard deviations behind the intervals that all GPUs share, of rows that no constant saw: step times of today's
    recipes with experts, of those of earlier releases, and memory that the allocator holds.
    """
    found = moe_left_out(folder)
    recent = {case.what for case in newest(moe_cases(folder))}
    today, earlier = ([math.log1p(c.error) for c in found if (c.what in recent) == wanted] for wanted in (True, False))
    return {
        "expert_time_log_sd": float(f"{math.sqrt(np.square(today).mean()):.2g}"),
        "earlier_expert_time_log_sd": float(f"{math.sqrt(np.square(earlier).mean()):.2g}"),
        "reserved_log_sd": scatter_above(folder),
    }


def compare_step(case: Case, constants: FrameworkEfficiency) -> Comparison:
    """A case beside the step time these constants predict, whether or not layers divide as our rules want."""
    predicted = step_ratio(case, constants) * case.step_s
    return Comparison(source="run", model=case.name, what=case.what, published=case.step_s, predicted=predicted)


def dense_b200(folder: Path) -> list[Case]:
    return [case for case in b200_cases(folder) if case.name.startswith("llama")]


def sparse_b200(folder: Path) -> list[Case]:
    return [case for case in b200_cases(folder) if not case.name.startswith("llama")]


def dense_h100(folder: Path) -> list[Case]:
    return [case for case in bridge_cases(folder) if case.what.startswith("H100")]


def write(name: str, constants: FrameworkEfficiency, *, command: str = "benchmarks.accuracy.fit_frameworks") -> None:
    """The profile of one GPU (or `default`) as a data file."""
    folder = OUTPUT / constants.framework
    folder.mkdir(parents=True, exist_ok=True)
    text = yaml.safe_dump(dataclasses.asdict(constants), sort_keys=False, width=120)
    (folder / f"{name}.yaml").write_text(f"# Written by python -m {command}; do not edit by hand.\n{text}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_data_argument(parser)
    folder = data_folder(parser.parse_args())
    if folder is None:
        return
    command = "by python -m benchmarks.accuracy.fit_frameworks; see FIXED there for what those rows do not tell"
    ampere = fit(folder).framework
    ampere = dataclasses.replace(
        ampere,
        narrow_matmul_slowdown=ampere.matmul_slowdown,
        time_log_sd=SPREAD["2022"],
        fitted_on=f"Tables 4 and 5 of arXiv 2205.05198 (A100, 19 figures, software of 2022) {command}",
    )
    ampere = dataclasses.replace(ampere, **widths(folder))  # type: ignore[arg-type]
    modern = fit_modern(dense_h100(folder), ampere)
    blackwell = fit_host(dense_b200(folder) + sparse_b200(folder) + newest(moe_cases(folder)), modern)
    between = float(f"{math.sqrt(ampere.matmul_slowdown * blackwell.matmul_slowdown):.4g}")
    cut = "dense cut models on 8 B200, 12 step times"
    hosts = "hosts: those, DeepSeek-V2 cut to fit 8 B200 (6 step times), today's recipes of Qwen3-30B-A3B"
    recipes = "dense fp8 recipes of Megatron Bridge and NeMo on H100 (overlaps, narrow matmuls, elementwise kernels)"
    modern = dataclasses.replace(
        modern,
        matmul_slowdown=between,
        host_layer_s=blackwell.host_layer_s,
        expert_overhead_s=blackwell.expert_overhead_s,
        time_log_sd=SPREAD["today"],
        fitted_on=f"{recipes}; 16-bit matmuls: the geometric mean of A100's slowdown and B200's ({cut}); {hosts}; {command}",
    )
    for name in ("a100-sxm-80gb", "a100-sxm-40gb", "v100-sxm-32gb"):
        write(name, ampere)
    write("default", modern)
    write("cpu", dataclasses.replace(FIXED, fitted_on="nothing: processes on a CPU hide nothing, and each search calibrates"))
    write(
        "b200-sxm-180gb",
        dataclasses.replace(
            modern,
            matmul_slowdown=blackwell.matmul_slowdown,
            time_log_sd=SPREAD["b200"],
            fitted_on=f"{recipes}; 16-bit matmuls: {cut}; {hosts}; {command}",
        ),
    )
    for title, found in (("Table 5", leave_one_out(folder)), ("H100 recipes", modern_leave_one_out(folder))):
        errors = [abs(c.error) for c in found]
        print(f"{title} leaving one model out: mean {np.mean(errors):.2%}, worst {max(errors):.2%}")


if __name__ == "__main__":
    main()
