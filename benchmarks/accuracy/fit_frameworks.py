"""Fit the time that a framework adds to isolated kernels: `python -m evidence.fit --only
frameworks`.

Writes hp_tool/catalog/data/efficiency/frameworks/megatron-core/*.yaml. The software of 2022 (A100
and older GPUs) is fitted to the 19 figures in Tables 4 and 5 of arXiv 2205.05198, whose runs wait
for most of their communication. Current software is fitted to NVIDIA's dense recipes, DGX Cloud's
benchmarks and MLPerf pre-training on H100, and to reduced models on B200; then the constants of
experts are fitted. The same fit determines the clocks that long trainings sustain
(`efficiency/clocks`) and the slowdown of Megatron's fused fp32 accumulation on B200. No published
row isolates this slowdown on H100, so half of B200's is assumed. fit_fsdp and fit_nanotron use
these clocks and run later. Priors limit all constants to physical values. Functions named left_out
fit without the rows of a model, a layout or a card.
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
from benchmarks.accuracy.fitting import (
    Fit,
    Floats,
    Values,
    compare_left_out,
    errors_by_setting,
    fit_settings,
    fixed_constants,
    framework_file,
    priors,
    split_by_key,
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
    with_fitted_release,
)
from benchmarks.accuracy.runs import (
    NEWEST,
    b200_cases,
    bridge_cases,
    dgxc_cases,
    hybrid_cases,
    megatron_2020_cases,
    mlperf_cases,
    newest,
    recipe_cases,
    table5_cases,
)
from evidence.cases import Case
from evidence.fitted_file import FittedFile
from evidence.table import Row
from hp_tool.catalog import efficiency as efficiency_
from hp_tool.catalog import gpu
from hp_tool.catalog.efficiency import efficiency_profile, gpu_efficiency, sustained_efficiency
from hp_tool.domain.efficiency import EfficiencyProfile, FrameworkEfficiency

COMMAND = "python -m evidence.fit --only frameworks"
GIVEN = fit_settings("frameworks")
FIXED = fixed_constants("frameworks")
"""Constants that these rows do not determine."""


def constants_2022(values: Values) -> Constants:
    """Return the profile of the software of 2022 with the free constants."""
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
        kernels = sustained_efficiency(
            gpu_efficiency(card), gpu=card, clocks=clocks("a100", trial.shares)
        )
        profile = EfficiencyProfile(gpu=kernels, framework=trial.framework)
        return (
            np.log1p([row.error for row in table4(layers, profile) + table5(steps, profile)])
            / GIVEN["noise_2022"]
        )

    return errors


FIT_2022 = Fit[Row, Constants](
    priors=priors("frameworks", "priors_2022"),
    constants=constants_2022,
    errors=errors_2022,
    in_deviations=False,
    near=0.0,
    options={"diff_step": 1e-3},
)


@functools.cache
def fit_2022(folder: Path, *, leave_out: str | None = None) -> Constants:
    """Return the constants of 2022, fitted without Table 5's rows of the model `leave_out`."""
    steps = [
        row for row in rows(folder, "korthikanti2022_table5") if row["run"].split()[0] != leave_out
    ]
    return FIT_2022([*rows(folder, "korthikanti2022_table4"), *steps])


def table5_left_out(folder: Path) -> list[Comparison]:
    """Return every figure of Table 5, predicted by constants fitted without its model's rows in
    that table.
    """
    cases = table5_cases(folder)
    compared = []
    for size in MODELS if cases else ():
        compared += compare_all(
            [case for case in cases if case.name == size], fit_2022(folder, leave_out=size).compare
        )
    return compared


PRIORS, EXPERT_PRIORS = priors("frameworks"), priors("frameworks", "priors_experts")
CLOCKS = {name: tuple(name.split()) for name in PRIORS if name.endswith((" bf16", " fp8"))}
"""Sustained fractions of boost clocks, by their names among the priors."""
REPEATED = ("MLPerf Training", "DGX Cloud benchmarks")
REPEATED_WEIGHT = 0.5
"""Weight of the rows of MLPerf and DGX Cloud, which repeat few layouts of one model many times."""


def errors_today(runs: Sequence[Prepared]) -> Callable[[Constants], Floats]:
    votes = np.array([REPEATED_WEIGHT if run.case.source in REPEATED else 1.0 for run in runs])
    weights = votes / GIVEN["noise"]
    return lambda trial: np.log([trial.ratio(run) for run in runs]) * weights


@functools.cache
def today_runs(folder: Path) -> tuple[Prepared, ...]:
    """Return all rows to which constants of current software may be fitted."""
    audited = [
        case
        for case in mlperf_cases(folder)
        if "lora" not in case.name and " v3.0" not in case.what
    ]
    experts = newest([case for case in recipe_cases(folder) if case.has_experts])
    return tuple(
        map(
            Prepared.from_case,
            [*bridge_cases(folder), *dgxc_cases(folder), *audited, *b200_cases(folder), *experts],
        )
    )


@functools.cache
def fit_today(runs: tuple[Prepared, ...], start: Constants) -> Constants:
    """Fit the constants of current software, which hides most of its communication. All dense rows
    together determine the framework's constants, launch times and clocks; then rows with experts
    determine the constants of experts. Results are cached, because several groups of evidence hold
    out the same rows.
    """
    # Little is known about a GPU that only ran experts; any run determines the release.
    dense = _fit_dense(
        tuple(run for run in runs if not run.has_experts), start, newest_release(runs)
    )
    framework = with_experts(runs, dense.framework, dense.shares)
    return dataclasses.replace(dense, framework=framework, saw=runs)


@functools.cache
def _fit_dense(runs: tuple[Prepared, ...], start: Constants, newest: str | None) -> Constants:
    framework = dataclasses.replace(start.framework, newest_release=newest, **GIVEN["unequal"])

    def constants(values: Values) -> Constants:
        own = {name: value for name, value in values.items() if name not in CLOCKS}
        own["fp32_accumulation"] = {"b200": own.pop("b200 accumulation")}
        shares = {die: values[name] for name, die in CLOCKS.items()}
        return Constants(with_constants(framework, own), shares)

    return Fit[Prepared, Constants](priors=PRIORS, constants=constants, errors=errors_today)(runs)


def with_experts(
    runs: Sequence[Prepared], framework: FrameworkEfficiency, shares: Shares | None = None
) -> FrameworkEfficiency:
    """Return the constants with the three constants of experts fitted to these runs; the prior
    means if there are no runs of MoE models. Releases of one configuration share one vote.

    If there are runs of current releases, runs of earlier releases are ignored.
    """
    experts = [run for run in runs if run.has_experts]
    chosen = [
        run for run in experts if (run.problem.workload.framework_version or NEWEST) >= NEWEST
    ] or experts
    if not chosen:
        means = {name: prior.mean for name, prior in EXPERT_PRIORS.items()}
        return with_constants(framework, means)
    return _fit_added("priors_experts", framework, shares)(chosen)


def _fit_added(
    name: str, framework: FrameworkEfficiency, shares: Shares | None = None
) -> Fit[Prepared, FrameworkEfficiency]:
    """Return the fit of the priors `name`; all other constants of `framework` stay unchanged."""
    noise = GIVEN["noise_experts"]
    return Fit(
        priors=priors("frameworks", name),
        constants=functools.partial(with_constants, framework),
        errors=functools.partial(errors_by_setting, noise=noise, shares=shares),
    )


def shipped() -> FrameworkEfficiency:
    """Return Megatron Core's default profile from the catalog."""
    return efficiency_.framework_constants("megatron-core", "default")


def fitted_experts(folder: Path) -> Iterator[FittedFile]:
    """Yield the constants of experts for each of Megatron Core's profiles (their launch times do
    not depend on the card). They are fitted to MoE recipes that state their settings, from the
    first release with the current dispatchers on, and to DeepSeek-V2 reduced to fit 8 B200.
    """
    framework = with_experts(today_runs(folder), shipped())
    constants = {name: getattr(framework, name) for name in EXPERT_PRIORS}
    for name in ("default", "a100", "v100"):
        yield FittedFile(file=f"frameworks/megatron-core/{name}.yaml", fields=constants, keeps=None)


def hybrid_runs(folder: Path) -> list[Prepared]:
    """Return the runs of Nemotron 3 Nano's recipes."""
    return [Prepared.from_case(case) for case in hybrid_cases(folder)]


def hybrids_left_out(folder: Path) -> list[Comparison]:
    """Return every row, predicted with the scan rate fitted to rows of other GPUs."""

    def fit(others: list[Prepared]) -> Callable[[Prepared], Comparison]:
        framework = _fit_added("priors_scan", shipped())(others)
        saw = [*today_runs(folder), *others]
        return lambda run: run.compare(framework, saw=saw)

    return compare_left_out(hybrid_runs(folder), lambda run: run.gpu.name, fit)


def fitted_mixers(folder: Path) -> Iterator[FittedFile]:
    """Yield the rate of Mamba 2's scan in training, fitted to recipes of Nemotron 3 Nano. No
    isolated timing of this kernel is published.
    """
    framework = _fit_added("priors_scan", shipped())(hybrid_runs(folder))
    fields = {name: getattr(framework, name) for name in GIVEN["priors_scan"]}
    yield FittedFile(file="frameworks/megatron-core/default.yaml", fields=fields, keeps=None)


def today_left_out(
    folder: Path, cases: Iterable[Case], key: str | Callable[[Case], Hashable]
) -> list[Comparison]:
    """Return these cases, each predicted by constants of current software fitted without the rows
    that share its `key`.
    """
    of = operator.attrgetter(key) if isinstance(key, str) else key
    rows: list[Comparison] = []
    for value, members, _ in split_by_key(cases, of):
        kept = tuple(run for run in today_runs(folder) if of(run.case) != value)
        rows += compare_all(members, fit_today(kept, fit_2022(folder)).compare)
    return rows


def amd_runs(folder: Path) -> list[Prepared]:
    """Return LoRA on MI300X and MI325X, the only published runs on their die that state a
    layout.
    """
    return [
        Prepared.from_case(case) for case in mlperf_cases(folder) if case.what.startswith("MI3")
    ]


def v100_runs(folder: Path) -> list[Prepared]:
    """Return Megatron-LM of 2020 on one to eight V100, the only published runs on their die that
    state a layout.
    """
    return [Prepared.from_case(case) for case in megatron_2020_cases(folder) if "V100" in case.what]


def fit_die(die: str, runs: Sequence[Prepared], framework: FrameworkEfficiency) -> Shares:
    """Fit the speed of matmuls on this die relative to a typical die at boost clocks. Kernels and
    clocks share one factor, because they were not timed separately.
    """

    def residuals(x: Floats) -> Floats:
        return (
            np.log([run.ratio(framework, {(die, "bf16"): x[0]}) for run in runs]) / GIVEN["noise"]
        )

    return {
        (die, "bf16"): float(least_squares(residuals, 0.6, bounds=(0.2, 1.0), loss="soft_l1").x[0])
    }


def die_left_out(runs: Sequence[Prepared], key: Callable[[Prepared], str]) -> list[Comparison]:
    """Return every row of one die, predicted by constants fitted to the die's rows with another
    `key`.
    """
    if not runs:
        return []
    card = runs[0].gpu
    framework = efficiency_profile(gpu=card, framework="megatron-core").framework

    def fit(others: list[Prepared]) -> Callable[[Prepared], Comparison]:
        shares = fit_die(card.silicon or "generic", others, framework)
        return Constants(with_fitted_release(framework, others), shares, tuple(others)).compare

    return compare_left_out(runs, key, fit)


def amd_left_out(folder: Path) -> list[Comparison]:
    """Return every AMD row, predicted by constants fitted on the other GPU's rows."""
    return die_left_out(amd_runs(folder), lambda run: run.gpu.name)


def megatron_2020_left_out(folder: Path) -> list[Comparison]:
    """Return every row of 2020. Rows on V100 are predicted by constants fitted to the other models;
    no constants were fitted to the A100 rows.
    """
    others = [
        Prepared.from_case(case).shipped()
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
        attention_kernel="fa2",  # Transformer Engine's default before Hopper
        fitted_on=f"{tables} (A100, 19 figures, software of 2022); host and trend of releases as "
        f"today's {by}; {untold}",
    )
    added = today.framework.fp32_accumulation
    modern = dataclasses.replace(
        today.framework,
        # Nobody measured it on B300: as B200. Nor on H100: halfway, on a logarithmic scale, between
        # nothing and B200's.
        attention_kernel="cudnn",  # Transformer Engine's default since Hopper
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
        # These rows are of software of 2020 and do not determine other releases.
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
