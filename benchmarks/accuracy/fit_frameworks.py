"""Fit what a framework adds to isolated kernels: `python -m evidence.fit --only frameworks`.

Writes hp_tool/catalog/data/efficiency/frameworks/megatron-core/*.yaml: software of 2022 (on A100
and older) from the 19 figures of arXiv 2205.05198's Tables 4 and 5, which wait for most of their
communication; today's from NVIDIA's dense recipes, DGX Cloud's benchmarks and MLPerf pre-training
on H100, and cut models on B200; experts as fit_training_experts says. With them come the clocks
that trainings sustain (`efficiency/clocks`), and what Megatron's fused accumulation in fp32 costs
on B200: rows that say it of H100 are missing, where half of it is assumed. fit_fsdp and
fit_nanotron stand on these clocks: run them after. Priors keep them physical; the functions named
left_out fit without a model's, a layout's or a card's rows.
"""

from __future__ import annotations

import dataclasses
import functools
import operator
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from pathlib import Path

import numpy as np
from scipy.optimize import least_squares

from benchmarks.accuracy.comparison import Comparison
from benchmarks.accuracy.data import rows
from benchmarks.accuracy.fit_training_experts import PRIORS as EXPERT_PRIORS
from benchmarks.accuracy.fit_training_experts import with_experts
from benchmarks.accuracy.fitting import (
    Fit,
    Floats,
    Prior,
    Values,
    framework_file,
    left_out,
    with_constants,
)
from benchmarks.accuracy.korthikanti import GPU, MODELS, table4, table5
from benchmarks.accuracy.prepared import (
    Constants,
    Prepared,
    Shares,
    clock_files,
    clocks,
    compare_all,
    newest_release,
    seen,
)
from benchmarks.accuracy.runs import (
    b200_cases,
    bridge_cases,
    dgxc_cases,
    megatron_2020_cases,
    mlperf_cases,
    newest,
    recipe_cases,
    table5_cases,
)
from evidence.cases import Case
from evidence.fitted_file import FittedFile
from evidence.table import Row
from hp_tool.catalog import gpu
from hp_tool.catalog.efficiency import efficiency, gpu_efficiency, sustained
from hp_tool.domain.efficiency import EfficiencyProfile, FrameworkEfficiency, Link

COMMAND = "python -m evidence.fit --only frameworks"
NOISE_2022 = 0.03
"""Relative scatter taken for one published figure; it sets the figures against the priors."""

FIXED = FrameworkEfficiency(
    framework="megatron-core",
    elementwise_traffic_factor=1.0,
    # FlashAttention-2 and -3 reach 1.2 to 1.3 times their backward FLOP/s forward
    attention_backward_slowdown=1.25,
    tensor_parallel_overlap=0.0,
    tensor_parallel_forward_overlap=0.0,  # these runs wait for their forward collectives
    # ring attention: the transfer runs beside the attention of the step before
    context_parallel_overlap=0.9,
    expert_parallel_overlap=0.0,  # Megatron Core's default dispatcher waits for its all-to-all
    data_parallel_overlap=0.0,  # these runs reduce gradients after the backward pass
    pipeline_overlap=0.0,
    network=Link(bandwidth_fraction=0.7, latency_s=1e-5, latency_per_peer_s=2e-6, ramp_bytes=1.4e7),
    optimizer_traffic_factor=1.0,
    step_overhead_s=0.0,
    time_log_sd=0.08,
    newest_release="22.05",
    memory_log_sd=0.03,
    fragmentation_fraction=0.03,
    fitted_on="",
)
"""What these rows do not tell, and where the values come from."""


def constants_2022(values: Values) -> Constants:
    """Return the software of 2022 with the free constants."""
    values = dict(values)
    return Constants(
        shares={("a100", "bf16"): values.pop("clocks")}, framework=with_constants(FIXED, values)
    )


def errors_2022(rows: Sequence[Row]) -> Callable[[Constants], Floats]:
    layers, steps = (
        [row for row in rows if (row["step_s"] is None) == layer] for layer in (True, False)
    )
    card = gpu(GPU)

    def errors(trial: Constants) -> Floats:
        kernels = sustained(gpu_efficiency(card), gpu=card, clocks=clocks("a100", trial.shares))
        profile = EfficiencyProfile(gpu=kernels, framework=trial.framework)
        return (
            np.log1p([row.error for row in table4(layers, profile) + table5(steps, profile)])
            / NOISE_2022
        )

    return errors


FIT_2022 = Fit[Row, Constants](
    priors={
        "elementwise_traffic_factor": Prior(1.2, 0.3, 0.5, 4.0),
        "tensor_parallel_overlap": Prior(0.5, 0.4, 0.0, 1.0),
        "optimizer_traffic_factor": Prior(1.3, 0.3, 0.5, 5.0),
        "network_bandwidth_fraction": Prior(0.7, 0.2, 0.1, 1.0),
        "clocks": Prior(0.9, 0.05, 0.4, 1.0),  # of 16-bit matmuls on A100
    },
    constants=constants_2022,
    errors=errors_2022,
    in_deviations=False,
    near=0.0,
    options={"diff_step": 1e-3},
)


@functools.cache
def fit_2022(folder: Path, *, leave_out: str | None = None) -> Constants:
    """Return the constants of 2022; `leave_out` names a model of Table 5 whose rows are not
    seen.
    """
    steps = [
        row for row in rows(folder, "korthikanti2022_table5") if row["run"].split()[0] != leave_out
    ]
    return FIT_2022([*rows(folder, "korthikanti2022_table4"), *steps])


def table5_left_out(folder: Path) -> list[Comparison]:
    """Every Table 5 figure, predicted by constants that never saw its model's Table 5 rows."""
    cases = table5_cases(folder)
    compared = []
    for size in MODELS if cases else ():
        compared += compare_all(
            [case for case in cases if case.name == size], fit_2022(folder, leave_out=size).compare
        )
    return compared


OVERLAPS = (
    "tensor_parallel_overlap",
    "tensor_parallel_forward_overlap",
    "pipeline_overlap",
    "data_parallel_overlap",
)
CLOCKS = {
    ("h100", "bf16"): Prior(0.85, 0.1, 0.4, 1.0),
    ("h100", "fp8"): Prior(0.85, 0.1, 0.4, 1.0),
    ("b200", "bf16"): Prior(0.8, 0.15, 0.3, 1.0),
    ("b200", "fp8"): Prior(0.85, 0.1, 0.4, 1.0),
}
TODAY = {
    "elementwise_traffic_factor": Prior(1.2, 0.4, 0.5, 4.0),
    **dict.fromkeys(OVERLAPS, Prior(0.7, 0.3, 0.0, 1.0)),
    "network_bandwidth_fraction": Prior(0.7, 0.2, 0.1, 1.0),
    "host_launch_s": Prior(1e-4, 1e-4, 0.0, 5e-4),
    "yearly_gain": Prior(0.0, 0.05, -0.2, 0.3),
    **CLOCKS,
    "b200 accumulation": Prior(
        1.3, 0.5, 1.0, 4.0
    ),  # only the cut models on B200 keep their gradients in fp32
}
NOISE = 0.04
UNEQUAL = {"device_log_sd": 0.0113, "micro_batch_log_sd": 0.0264}
"""Devices of a job, from weak scaling of Llama 3 and MPT on 8 to 2,048 H100: `python -m
benchmarks.accuracy.weak_scaling`. The A100 of Tables 4 and 5 tell nothing of it.
"""
REPEATED = ("MLPerf Training", "DGX Cloud benchmarks")
REPEATED_WEIGHT = 0.5
"""Of MLPerf's and DGX Cloud's rows: a few layouts of one model each, submitted or scaled many
times.
"""


def errors_today(runs: Sequence[Prepared]) -> Callable[[Constants], Floats]:
    weights = (
        np.array([REPEATED_WEIGHT if run.case.source in REPEATED else 1.0 for run in runs]) / NOISE
    )
    return lambda trial: np.log([trial.ratio(run) for run in runs]) * weights


@functools.cache
def today_runs(folder: Path) -> tuple[Prepared, ...]:
    """Every row that today's constants may be fitted on."""
    audited = [
        case
        for case in mlperf_cases(folder)
        if "lora" not in case.name and " v3.0" not in case.what
    ]
    experts = newest([case for case in recipe_cases(folder) if case.has_experts])
    return tuple(
        map(
            Prepared.of,
            [*bridge_cases(folder), *dgxc_cases(folder), *audited, *b200_cases(folder), *experts],
        )
    )


@functools.cache
def fit_today(runs: tuple[Prepared, ...], start: Constants) -> Constants:
    """Software that hides most of its communication: its constants, its hosts' and its dies'
    clocks, on all dense rows at once, then what experts add, on theirs. Groups of evidence leave
    the same rows out again and again: a fit is computed once.
    """
    # Of a card that only experts ran on little is known; a release is known by any.
    dense = _fit_dense(
        tuple(run for run in runs if not run.has_experts), start, newest_release(runs)
    )
    framework = with_experts(runs, dense.framework, dense.shares)
    return dataclasses.replace(dense, framework=framework, saw=runs)


@functools.cache
def _fit_dense(runs: tuple[Prepared, ...], start: Constants, newest: str | None) -> Constants:
    framework = dataclasses.replace(start.framework, newest_release=newest, **UNEQUAL)

    def constants(values: Values) -> Constants:
        own = {name: value for name, value in values.items() if name not in CLOCKS}
        own["fp32_accumulation"] = {"b200": own.pop("b200 accumulation")}
        return Constants(with_constants(framework, own), {name: values[name] for name in CLOCKS})

    return Fit[Prepared, Constants](priors=TODAY, constants=constants, errors=errors_today)(runs)


def today_left_out(
    folder: Path, cases: Iterable[Case], key: str | Callable[[Case], Hashable]
) -> list[Comparison]:
    """These cases, each predicted by today's constants that saw no row of its `key`, of which a
    name is a property of Case.
    """
    of = operator.attrgetter(key) if isinstance(key, str) else key
    rows: list[Comparison] = []
    for value, members, _ in left_out(cases, of):
        kept = tuple(run for run in today_runs(folder) if of(run.case) != value)
        rows += compare_all(members, fit_today(kept, fit_2022(folder)).compare)
    return rows


def amd_runs(folder: Path) -> list[Prepared]:
    """LoRA on MI300X and MI325X, the only published runs of their die with a layout."""
    return [Prepared.of(case) for case in mlperf_cases(folder) if case.what.startswith("MI3")]


def v100_runs(folder: Path) -> list[Prepared]:
    """Megatron-LM of 2020 on one to eight V100, the only published runs of their die with a
    layout.
    """
    return [Prepared.of(case) for case in megatron_2020_cases(folder) if "V100" in case.what]


def fit_die(die: str, runs: Sequence[Prepared], framework: FrameworkEfficiency) -> Shares:
    """What matmuls of this die reach of a typical die's at boost: kernels and clocks in one, as
    nobody timed them apart.
    """

    def residuals(x: Floats) -> Floats:
        return np.log([run.ratio(framework, {(die, "bf16"): x[0]}) for run in runs]) / NOISE

    return {
        (die, "bf16"): float(least_squares(residuals, 0.6, bounds=(0.2, 1.0), loss="soft_l1").x[0])
    }


def die_left_out(runs: Sequence[Prepared], key: Callable[[Prepared], str]) -> list[Comparison]:
    """Every row of one die, by what the rows of other keys say of the die."""
    if not runs:
        return []
    card = runs[0].gpu
    framework, rows = efficiency(gpu=card, framework="megatron-core").framework, []
    for _, members, others in left_out(runs, key):
        shares = fit_die(card.silicon or "generic", others, framework)
        rows += map(Constants(seen(framework, others), shares, tuple(others)).compare, members)
    return rows


def amd_left_out(folder: Path) -> list[Comparison]:
    """Every AMD row, by what the other card's rows say of the die."""
    return die_left_out(amd_runs(folder), lambda run: run.gpu.name)


def megatron_2020_left_out(folder: Path) -> list[Comparison]:
    """Every row of 2020: on V100 by what the other models' rows say of the die; no constant saw
    those on A100.
    """
    others = [
        Prepared.of(case).shipped()
        for case in megatron_2020_cases(folder)
        if "V100" not in case.what
    ]
    return [*die_left_out(v100_runs(folder), lambda run: run.case.name), *others] if others else []


def fitted(folder: Path) -> Iterator[FittedFile]:
    by = f"by {COMMAND}"
    untold = "see FIXED there for what those rows do not tell"
    tables = "Tables 4 and 5 of arXiv 2205.05198"
    rows = (
        "dense recipes of Megatron Bridge and NeMo, DGX Cloud's benchmarks of Llama 3 in bf16 and "
        "fp8 and MLPerf pre-training "
        "from v3.1 on, on H100; dense models and "
        "DeepSeek-V2 cut to fit 8 B200 (18 step times); recipes on B200; today's recipes of experts"
    )
    earlier = fit_2022(folder)
    today = fit_today(today_runs(folder), earlier)
    old = dataclasses.replace(
        earlier.framework,
        **{
            name: getattr(today.framework, name)
            for name in ("host_launch_s", "yearly_gain", *EXPERT_PRIORS)
        },
        attention_kernel="fa2",  # Transformer Engine's choice before Hopper
        fitted_on=f"{tables} (A100, 19 figures, software of 2022); host and trend of releases as "
        f"today's {by}; {untold}",
    )
    added = today.framework.fp32_accumulation
    modern = dataclasses.replace(
        today.framework,
        # Nobody measured it on B300: as B200. Nor on H100: halfway, on a logarithmic scale, between
        # nothing and B200's.
        attention_kernel="cudnn",  # Transformer Engine's choice from Hopper on
        fp32_accumulation={
            "h100": float(f"{added['b200'] ** 0.5:.4g}"),
            **added,
            "b300": added["b200"],
        },
        fitted_on=f"{rows}; {by}; {untold}",
    )
    nothing = "nothing: processes on a CPU hide nothing, and each search calibrates"
    profiles = {
        "a100": old,
        # Its rows are of 2020's software, and tell nothing of other releases.
        "v100": dataclasses.replace(old, yearly_gain=0.0, attention_kernel=None),
        "default": modern,
        "cpu": dataclasses.replace(FIXED, newest_release=None, fitted_on=nothing),
    }
    for name, profile in profiles.items():
        yield framework_file(name, profile)
    at_once = "kernels and clocks in one"
    yield from clock_files(
        (earlier.shares, f"{tables} {by}"),
        (today.shares, f"{rows}; {by}"),
        (
            fit_die("v100", v100_runs(folder), old),
            f"four runs of Megatron-LM 2020 on V100, {at_once}; {by}",
        ),
        (
            fit_die("mi300x", amd_runs(folder), modern),
            f"LoRA of MLPerf on MI300X and MI325X, {at_once}; {by}",
        ),
    )
