"""Fit the width of intervals: `python -m evidence.fit --only intervals`, after all other
fits.

All widths come from rows that the constants were not fitted to. The scatter of a group is the
standard deviation for which the central 90% of a normal distribution would have contained 90% of
the group's configurations and one more (split conformal prediction, Lei et al., arXiv 1604.04173,
section 2.2). If the group's known variance is smaller than that, the difference is attributed to
what the group left out and stored in `catalog/data/efficiency/doubts.yaml`. The framework's own
scatter is stored in its profiles.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

from scipy.stats import t as student_t

from benchmarks.accuracy import evidence, inference
from benchmarks.accuracy.classes import fit_added_log_sd, held_out_rows
from benchmarks.accuracy.comparison import Comparison
from benchmarks.accuracy.fit_frameworks import today_runs
from benchmarks.accuracy.fit_fsdp import mpt_runs
from benchmarks.accuracy.fitting import FRAMEWORKS, fit_settings
from benchmarks.accuracy.groups import scatter_of, votes
from benchmarks.accuracy.pairs import across_releases, log_ratios, regular_scatter
from benchmarks.accuracy.prepared import Prepared
from benchmarks.accuracy.runs import dgxc_cases, gb300_cases, mlperf_cases, release_cases
from evidence.cases import Case
from evidence.fitted_file import FittedFile
from hp_tool.catalog import documents
from hp_tool.cost.uncertainty import CONFIDENCE, NORMAL_QUANTILE
from hp_tool.domain.familiarity import SERVING_DIMENSIONS

PAIRS = {"megatron-core": "Megatron Core", "torch-fsdp": "MPT under FSDP", "internevo": "InternEvo"}
"""Frameworks with published runs of one model on the same devices."""
RESERVED = ("Models cut to fit 8 B200, reserved", "Llama under torchtitan, reserved")
"""Frameworks that use PyTorch's allocator: Megatron Core and FSDP."""
COMMAND = "python -m evidence.fit --only intervals"
Known = tuple[Sequence[Comparison], float]
"""(row, known variance of ln(published / predicted)) for rows of one kind."""


def scatter(*kinds: Known) -> float:
    """Return the standard deviation that must be added to the known variances for the central 90%
    of normal distributions to contain 90% of the rows. Repeats of a configuration count once; each
    kind has the same weight.
    """
    return scatter_of([(row, known) for row in votes(rows)] for rows, known in kinds)


def scatter_by_model(*kinds: Sequence[Comparison], known: float) -> float:
    """Return the standard deviation that must be added to the known variance if the rows come from
    few models. The central 90% of the normal distribution then equals Student's t interval for one
    more row, with one degree of freedom fewer than models, because constants fitted to the other
    models make their errors dependent.
    """
    counted = [row for rows in kinds for row in votes(rows)]
    models = len({row.model for row in counted})
    mean_square = sum(row.log_ratio**2 for row in counted) / len(counted)
    bound = student_t.ppf((1.0 + CONFIDENCE) / 2.0, models - 1) * math.sqrt(
        mean_square * (1.0 + 1.0 / models)
    )
    return math.sqrt(max((bound / NORMAL_QUANTILE) ** 2 - known, 0.0))


def root_mean_variance(*deviations: float) -> float:
    """Return the root of the mean variance of these standard deviations."""
    return math.sqrt(sum(sd**2 for sd in deviations) / len(deviations))


def normal_log_sd(rows: Sequence[Comparison]) -> float:
    """Return the standard deviation of the most likely normal distribution of ln(published /
    predicted) around 0: the root mean square. Repeats of a setting count once.
    """
    counted = votes(rows)
    return math.sqrt(sum(row.log_ratio**2 for row in counted) / len(counted)) if counted else 0.0


def fit(folder: Path) -> tuple[dict[str, dict[str, float]], dict[str, float]]:
    """Return ({profile: its scatter}, {doubt: its standard deviation})."""
    found = evidence.groups(folder)
    groups = {group.title: group.rows for group in found}
    cut = [row for row in groups["Models cut to fit 8 B200"] if row.model.startswith("llama")]
    own = scatter(([*groups["Dense pre-training on H100 in fp8"], *cut], 0.0)) ** 2
    early = (
        scatter(
            (
                [*groups["Table 5 of arXiv 2205.05198"], *groups["Megatron-LM of 2020, 1B to 8B"]],
                0.0,
            )
        )
        ** 2
    )
    fsdp = scatter((groups["MPT under FSDP"], 0.0)) ** 2
    internevo = (
        max(
            scatter((rows, 0.0))
            for title, rows in groups.items()
            if title.startswith("InternEvo, unseen ")
        )
        ** 2
    )

    def on(title: str, *cards: str) -> list[Comparison]:
        return [row for row in groups[title] if row.gpu.startswith(cards)]

    adapters, mixtures = (
        on("LoRA of MLPerf", "h100-sxm", "b200"),
        groups["MoE models, releases from 26.02.01 on"],
    )
    lora = scatter((adapters, own)) ** 2
    # : both were held out.
    recent = {row.what for row in mixtures}
    later = [row for row in groups["The next release: MoE models"] if row.what in recent]
    experts = scatter_by_model(mixtures, later, known=own) ** 2
    kernels = scatter(
        (untimed_die_rows(today_runs(folder)), own), (untimed_die_rows(mpt_runs(folder)), fsdp)
    )
    strangers = (
        (groups["BLOOM's topology search, predicted as Megatron Core"], early),
        (groups["MPT under FSDP, constants of Megatron Core"], own),
        (groups["Dense pre-training on H100 in fp8, constants of FSDP"], fsdp),
    )
    trainer = root_mean_variance(*map(scatter, strangers))
    by_kind = held_out_rows(found)
    added = fit_added_log_sd(by_kind["training dense"], known={"trainer": trainer})
    of_mixtures = fit_added_log_sd(by_kind["training mixture"], known={"trainer": trainer, **added})
    older = scatter((groups["MoE models, earlier releases"], own + experts))
    peaks = groups["MLPerf, peak of allocated memory"]
    of_adapters = [row for row in peaks if row.model.endswith(" lora")]
    allocated = scatter(
        (groups["Models cut to fit 8 B200, allocated"], 0.0),
        ([r for r in peaks if r not in of_adapters], 0.0),
    )
    reserved = scatter(*((above_allocated(groups[title]), 0.0) for title in RESERVED))
    of_memory = {"memory_log_sd": allocated, "reserved_log_sd": reserved}
    pairs = {
        name: scatter((groups[f"Ratio of two runs: {title}"], 0.0)) for name, title in PAIRS.items()
    }
    pairs["nanotron"] = regular_scatter(
        log_ratios(groups["nanotron's grid"], lambda row: (row.model, row.part))
    )
    tuned = {  # the effect of fine-tuning under a framework that was measured in pre-training
        name: scatter((groups[f"Fine-tuning predicted as torch-fsdp, {figure}"], known))
        for name, figure, known in (
            ("tuning_log_sd", "step time", fsdp),
            ("tuning_memory_log_sd", "peak memory", allocated**2),
        )
    }
    of_experts = {"expert_time_log_sd": math.sqrt(experts), "earlier_expert_time_log_sd": older}
    # Five ratios of mixtures are too few for a deviation below that of dense models' ratios.
    of_experts["expert_pair_log_sd"] = max(
        scatter((groups["Ratio of two runs: MoE models"], 0.0)), pairs["megatron-core"]
    )
    shared, of_fsdp = {**of_experts, **of_memory}, {**of_memory, **tuned}
    times = {
        "megatron-core/default": (own, shared),
        "megatron-core/a100": (early, shared),
        "megatron-core/v100": (early, shared),
        "torch-fsdp/default": (fsdp, of_fsdp),
        "torch-fsdp/a100": (fsdp, of_fsdp),
        "torch-fsdp/h100": (fsdp, of_fsdp),
        "internevo/default": (internevo, {}),
    }
    profiles = {
        name: {"time_log_sd": math.sqrt(variance), **others}
        for name, (variance, others) in times.items()
    }
    profiles["nanotron/default"] = {}
    for name, widths in profiles.items():
        widths["pair_log_sd"] = pairs[name.partition("/")[0]]
    profiles["megatron-core/cpu"] = of_memory  # counted by the same code
    doubts = {
        "trainer_log_sd": trainer,
        "card_log_sd": added["gpu"],
        "silicon_log_sd": math.sqrt(max(added["die"] ** 2 - added["gpu"] ** 2, 0.0)),
        "family_log_sd": added["family"],
        "model_kind_log_sd": of_mixtures["model_kind"],
        "precision_log_sd": added["precision"],
        "scale_log_sd": added["scale"],
        "kernels_log_sd": kernels,
        "lora_log_sd": math.sqrt(lora),
        "lora_pair_log_sd": scatter(
            (groups["Ratio of two runs: LoRA of MLPerf"], pairs["megatron-core"] ** 2)
        ),
        "release_log_sd": added["release"],
        "unsaid_release_log_sd": normal_log_sd(
            [row for cases in dense_cases(folder) for row in across_releases(cases)]
        ),
        "feature_log_sd": root_mean_variance(math.sqrt(lora), math.sqrt(experts)),
        "memory_feature_log_sd": scatter((of_adapters, allocated**2)),
    }
    return profiles, doubts


def dense_cases(folder: Path) -> list[list[Case]]:
    """Return pre-training of dense models by publisher: MLPerf, DGX Cloud, recipes."""
    recipes = [*release_cases(folder), *gb300_cases(folder)]
    publishers = (mlperf_cases(folder), dgxc_cases(folder), recipes)
    return [
        [case for case in cases if case.task == "pretrain" and not case.has_experts]
        for cases in publishers
    ]


def above_allocated(rows: Iterable[Comparison]) -> list[Comparison]:
    """Return rows of reserved memory with the predicted allocated memory. The intervals of both are
    derived from the latter.
    """
    typical = (
        1.0
        + documents.read(FRAMEWORKS / "megatron-core" / "default.yaml")["fragmentation_fraction"]
    )
    return [dataclasses.replace(row, predicted=row.predicted / typical) for row in rows]


def untimed_die_rows(runs: Iterable[Prepared]) -> list[Comparison]:
    """Return dense runs predicted by the shipped constants of their framework and the kernels of a
    typical die.
    """
    rows = []
    for run in runs:
        if not run.has_experts:
            gpu = dataclasses.replace(run.gpu, silicon=None)
            problem = dataclasses.replace(
                run.problem, cluster=dataclasses.replace(run.problem.cluster, gpu=gpu)
            )
            rows.append(
                dataclasses.replace(run, problem=problem).compare(run.problem.profile.framework)
            )
    return rows


def _short(value: float) -> float:
    return float(f"{value:.2g}")


def fitted(folder: Path) -> Iterator[FittedFile]:
    """Yield the scatter of each framework's profile, and the doubts about features without data."""
    profiles, doubts = fit(folder)
    for name, widths in profiles.items():
        yield FittedFile(
            file=f"frameworks/{name}.yaml",
            fields={key: _short(value) for key, value in widths.items()},
            keeps=None,
        )
    fields = {name: _short(value) for name, value in doubts.items()}
    fitted_on = {name: fit_settings("intervals")["fitted_on"][name] for name in doubts}
    yield FittedFile(
        file="doubts.yaml", fields=fields | {"fitted_on": fitted_on}, keeps=("serving",)
    )


def fitted_serving(folder: Path) -> Iterator[FittedFile]:
    """Yield what each dimension adds to the intervals of serving queries that differ from every
    measured run in it. Takes minutes: it fits dense models without their model, GPU or precision.

    If no left-out run differs in a dimension, the dimension adds as much as the one that adds most.
    """
    by_kind = held_out_rows(
        [
            *evidence.section("serving", folder),
            *inference.compare_shipped(folder),
            *inference.compare_refitted(folder),
        ]
    )
    added = {}
    for figure in inference.FIGURES:
        own = fit_added_log_sd(by_kind[f"serving dense, {figure}"], units=("release",))
        most = max(own.values())
        added[figure] = {name: _short(own.get(name, most)) for name in SERVING_DIMENSIONS}
    yield FittedFile(file="doubts.yaml", fields={"serving": added}, keeps=None)
