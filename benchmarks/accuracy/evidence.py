"""All groups of evidence in the folder of measured figures. Each group is predicted by constants
that were fitted without its held-out rows; groups.csv describes what was held out.
"""

from __future__ import annotations

import dataclasses
import math
import os
from collections import defaultdict
from collections.abc import Callable, Container, Hashable, Iterable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from statistics import median

from benchmarks.accuracy import fit_frameworks as megatron
from benchmarks.accuracy import fit_fsdp as fsdp
from benchmarks.accuracy import fit_internevo as internevo
from benchmarks.accuracy import fit_nanotron as nanotron
from benchmarks.accuracy import fit_trainers as trainers
from benchmarks.accuracy import headlines, inference, kv_cache
from benchmarks.accuracy.comparison import Comparison
from benchmarks.accuracy.data import rows as rows_of
from benchmarks.accuracy.grid_rows import grid_rows
from benchmarks.accuracy.grid_rows import groups as grid_groups
from benchmarks.accuracy.groups import Group, Rows, as_groups, votes, with_gpu
from benchmarks.accuracy.korthikanti import GPU, figures, table4
from benchmarks.accuracy.pairs import cells, pairs
from benchmarks.accuracy.plain_recipe import (
    plain_answers,
    runs_by_kind,
    todays_cases,
    with_usual,
    without_model,
)
from benchmarks.accuracy.prepared import Constants, Prepared, compare_all
from benchmarks.accuracy.runs import (
    b200_cases,
    bloom_cases,
    cdna4_cases,
    dgxc_cases,
    gb300_cases,
    internevo_cases,
    mlperf_cases,
    newest,
    pretraining,
    release_cases,
    reserved_cases,
    round_6_cases,
    schedule_cases,
    titan_cases,
    trl_cases,
)
from benchmarks.accuracy.serving_runs import dense_runs
from benchmarks.accuracy.weak_scaling import ratios_left_out
from evidence.cases import Case
from hp_tool.catalog import gpu
from hp_tool.catalog.efficiency import efficiency_profile
from hp_tool.cost.uncertainty import NORMAL_QUANTILE
from hp_tool.domain.familiarity import arithmetic_precision, family_of
from hp_tool.errors import InputError

H100 = "h100-sxm-80gb"
FEW_GPUS = 512
"""Maximum number of GPUs of the runs that constants are fitted to when they predict larger jobs, of
up to 11,616 GPUs.
"""
FEWEST_SEEN = 4
"""Minimum number of earlier configurations needed to predict a month; months with fewer are
skipped.
"""
SERIES = ("model", "gpu", "date", "micro_batch_size")
"""Properties common to the runs of an MLPerf series. Submitters and layouts differ within a series,
because most submitters have results for a single size only.
"""


def groups(folder: Path, *, only: Container[str] | None = None) -> list[Group]:
    """Return every group of evidence that has rows, computed by one process per core.

    Args:
        folder: The folder of measured figures.
        only: Names of the SECTIONS to compute; all of them by default.
    """
    names = [name for name in SECTIONS if only is None or name in only]
    # Longest first, so that the cores finish together.
    order = sorted(names, key=lambda name: -SECONDS.get(name, 0.0))
    # Spawned: a process that inherits the threads of a numeric library may hang.
    with ProcessPoolExecutor(max_workers=os.cpu_count(), mp_context=get_context("spawn")) as pool:
        pending = {name: pool.submit(section, name, folder) for name in order}
        found = [group for name in names for group in pending[name].result()]
    short = {each.title: each.rows for each in found if not each.is_long}
    in_quick = {title for title, rows in _pairs(folder, short).items() if rows}
    for each in as_groups(_pairs(folder, {each.title: each.rows for each in found})):
        found.append(dataclasses.replace(each, is_long=each.title not in in_quick))
    return [each for each in found if each.rows]


def section(name: str, folder: Path) -> list[Group]:
    """Return the groups of a section, including those without rows."""
    return as_groups(SECTIONS[name](folder), is_long=name in LONG)


def _paper(folder: Path) -> Rows:
    """Return the comparisons for arXiv 2205.05198 and Megatron-LM of 2020, which ran the software
    that the constants of 2022 describe.
    """
    rows4 = rows_of(folder, "korthikanti2022_table4")
    shipped = efficiency_profile(gpu=gpu(GPU), framework="megatron-core")
    memory = figures(folder)
    return {
        "Table 5 of arXiv 2205.05198": megatron.table5_left_out(folder) if rows4 else [],
        "Table 4 of arXiv 2205.05198, one layer": [
            with_gpu(row, GPU) for row in table4(rows4, shipped)
        ],
        "Figures 1 and 7 of arXiv 2205.05198": [with_gpu(row, GPU) for row in memory],
        "Megatron-LM of 2020, 1B to 8B": megatron.megatron_2020_left_out(folder),
    }


def _today(folder: Path) -> Rows:
    """Return the comparisons for pre-training with current Megatron Core: recipes by release,
    MLPerf rounds, and reduced models.
    """
    if not megatron.today_runs(folder) or not rows_of(folder, "korthikanti2022_table4"):
        return {}
    cases = pretraining(folder)
    dense, sparse = (
        [case for case in cases if case.has_experts == wanted] for wanted in (False, True)
    )
    cut, recent = b200_cases(folder), newest(sparse)
    measured_dies = [
        case for case in (*dense, *cut) if not case.has_experts and case.card != "gb200-nvl72"
    ]

    def without(key: str, cases: Iterable[Case]) -> list[Comparison]:
        return megatron.today_left_out(folder, cases, key)

    def cloud(precision: str) -> list[Comparison]:
        return without("name", select_cases(dgxc_cases(folder), precision=precision))

    unseen, today = without("name", sparse), {case.what for case in recent}
    gb200 = compare_all(select_cases(dense, card="gb200-nvl72"), Prepared.shipped)
    return {
        "Dense pre-training on H100 in fp8": without("name", select_cases(dense, card=H100)),
        "Dense pre-training on H100 in 16 bits (DGX Cloud)": cloud("bf16"),
        "Dense pre-training on H100 in fp8 (DGX Cloud)": cloud("fp8"),
        "Dense pre-training on an unseen GPU die": without("die", measured_dies),
        "Dense recipes on GB200": gb200,
        "Models cut to fit 8 B200": without("layout", cut),
        "MoE models, releases from 26.02.01 on": [row for row in unseen if row.what in today],
        "MoE models on an unseen GPU": without("card", recent),
        "MoE models, unseen release": without("release", recent),
        "MoE models, earlier releases": [row for row in unseen if row.what not in today],
    }


def _plain(folder: Path) -> Rows:
    """Return the comparisons for current runs as minimal queries (model, GPUs, precision, batch and
    layout), alone and with the settings of the current recipe.
    """
    if not megatron.today_runs(folder):
        return {}
    questions: dict[str, Callable[[Sequence[Case]], list[Comparison]]] = {
        "": lambda cases: plain_answers(folder, cases),
        ", current recipe": lambda cases: without_model(folder, todays_cases(cases)),
    }
    return {
        f"Minimal query{how}: {what}": answers(cases)
        for how, answers in questions.items()
        for what, cases in runs_by_kind(folder).items()
    }


def _unfamiliar(folder: Path) -> Rows:
    """Return the comparisons for trainings predicted by constants that were fitted without their
    family, kind, precision or scale.
    """
    if not megatron.today_runs(folder):
        return {}
    cases = pretraining(folder)
    dense = select_cases(cases, has_experts=False, card=H100)
    known = select_cases(
        (run.case for run in megatron.today_runs(folder)), has_experts=False, card=H100
    )

    def family(case: Case) -> str:
        return family_of(case.name)

    def precision(case: Case) -> str:
        return arithmetic_precision(case.training.precision)

    def is_large(case: Case) -> bool:
        return Prepared.from_case(case).problem.cluster.num_gpus > FEW_GPUS

    def without(key: Callable[[Case], Hashable], cases: Iterable[Case]) -> list[Comparison]:
        return megatron.today_left_out(folder, cases, key)

    return {
        "Dense pre-training, unseen model family": without(family, sorted(dense, key=family)),
        "MoE models, constants of dense models": without(
            lambda case: case.has_experts, newest(select_cases(cases, has_experts=True))
        ),
        "Dense pre-training, unseen precision": without(precision, sorted(known, key=precision)),
        "Dense pre-training on more GPUs than fitted": without(is_large, filter(is_large, dense)),
    }


def _hybrids(folder: Path) -> Rows:
    return {"Nemotron 3 Nano on an unseen GPU": megatron.hybrids_left_out(folder)}


def _tuning(folder: Path) -> Rows:
    """Return the comparisons for fine-tuning and for the scaling of jobs. Only the constants of
    AMD's die were fitted to fine-tuning runs.
    """
    tuned = [case for case in release_cases(folder) if case.task != "pretrain"]
    tuned += select_cases(gb300_cases(folder), task="lora")
    scaling = strong_scaling(folder)
    return {
        "LoRA of MLPerf": compare_all(_lora(folder), Prepared.shipped),
        "Strong scaling in MLPerf's pre-training": [
            row for row in scaling if "lora" not in row.model
        ],
        "Strong scaling in MLPerf's LoRA": [row for row in scaling if "lora" in row.model],
        "Weak scaling on H100": ratios_left_out(folder),
        "LoRA of MLPerf on AMD": megatron.amd_left_out(folder),
        "Fine-tuning recipes": compare_all(tuned, Prepared.shipped),
    }


def _lora(folder: Path) -> list[Case]:
    """Return MLPerf's LoRA runs, except those on AMD GPUs."""
    return [
        case
        for case in mlperf_cases(folder)
        if "lora" in case.name and not case.card.startswith("mi3")
    ]


def select_cases(cases: Iterable[Case], **values: object) -> list[Case]:
    """Return the cases whose properties have these values; `precision` refers to the training
    precision.
    """

    def is_so(case: Case) -> bool:
        stated = {"precision": case.training.precision}
        return all(
            (stated[name] if name in stated else getattr(case, name)) == value
            for name, value in values.items()
        )

    return [case for case in cases if is_so(case)]


def strong_scaling(folder: Path) -> list[Comparison]:
    """Compare each MLPerf run with the smallest run of its series: the ratio of GPU-seconds per
    sequence, published and predicted by the shipped constants. Errors that both runs share
    (kernels, clocks, the release) cancel.
    """
    grouped: dict[tuple[object, ...], list[tuple[int, Comparison]]] = defaultdict(list)
    for row, case in zip(rows_of(folder, "training_mlperf"), mlperf_cases(folder), strict=False):
        run = Prepared.from_case(case)
        share = row["num_gpus"] / row["global_batch_size"]
        found = run.compare(efficiency_profile(gpu=run.gpu, framework="megatron-core").framework)
        each = dataclasses.replace(
            found, published=found.published * share, predicted=found.predicted * share
        )
        grouped[tuple(row[key] for key in SERIES)].append((row["num_gpus"], each))
    ratios = []
    for members in grouped.values():
        fewest = min(gpus for gpus, _ in members)
        base = [one for gpus, one in members if gpus == fewest]
        ratios += [
            dataclasses.replace(
                one,
                what=f"{one.what}, against x{fewest}",
                published=one.published / (sum(each.published for each in base) / len(base)),
                predicted=one.predicted / (sum(each.predicted for each in base) / len(base)),
                low=None,
                high=None,
            )
            for gpus, one in members
            if gpus > fewest
        ]
    return ratios


def _new_dies(folder: Path) -> Rows:
    """Return predictions for new dies: by the constants of the previous die, and for B300 by
    kernels timed on it. LoRA runs are in `_tuning`.
    """
    recipes = [case for case in gb300_cases(folder) if case.task != "lora"]
    newest_round = [with_usual(case) for case in round_6_cases(folder)]
    return {
        "Recipes on GB300": compare_all(recipes, Prepared.shipped),
        "Llama 3.1 8B of MLPerf on MI355X": compare_all(cdna4_cases(folder), Prepared.shipped),
        "MLPerf 6.0 on Blackwell": compare_all(newest_round, Prepared.shipped),
    }


def _fsdp(folder: Path) -> Rows:
    """Return MPT on A100 and H100, and torchtitan's Llama, which was not used in any fit."""
    mpt = fsdp.mpt_runs(folder)
    sizes = fsdp.leave_one_model_out(mpt) if mpt else []
    return {
        "MPT under FSDP": sizes,
        "MPT under FSDP on H100": [row for row in sizes if row.gpu.startswith("h100")],
        "MPT under FSDP on an unseen GPU": fsdp.across_gpus(mpt) if mpt else [],
        "Llama under eager torchtitan": compare_all(titan_cases(folder)[0], Prepared.shipped),
        "TRL at a million tokens": compare_all(trl_cases(folder), Prepared.shipped),
    }


def _internevo(folder: Path) -> Rows:
    """Return InternLM-7B's runs, each predicted by constants fitted without its number of GPUs, and
    without its layout.
    """
    runs = [Prepared.from_case(case) for case in internevo_cases(folder)]
    if not runs:
        return {}
    return {
        **{
            f"InternEvo, unseen {name}": internevo.leave_one_out(runs, key)
            for name, key in internevo.LEFT_OUT.items()
        },
        "InternEvo, memory in use": [
            with_gpu(row, row.gpu) for row in internevo.memory_left_out(folder)
        ],
    }


def _nanotron(folder: Path) -> Rows:
    if not grid_rows(folder):
        return {}
    found = nanotron.cells(folder)
    return {
        "nanotron's grid": nanotron.compare_step_times(found["model_left_out"]),
        "nanotron's grid, unseen number of nodes": nanotron.compare_step_times(
            found["nodes_left_out"]
        ),
        "nanotron's grid, memory": nanotron.compare_memory(found["model_left_out"]),
    }


def _memory(folder: Path) -> Rows:
    """Return allocated bytes, predicted by formulas alone, and bytes reserved by the allocator. The
    number of micro-batches does not affect memory.
    """
    cut = [case for case in b200_cases(folder) if case.allocated_bytes]
    audited = [case for case in mlperf_cases(folder) if case.allocated_bytes]
    titan = compare_all(reserved_cases(folder), Prepared.reserved)

    def of_cut(by: Callable[[Prepared], Comparison]) -> list[Comparison]:
        return [
            dataclasses.replace(row, setting=case.layout)
            for case, row in zip(cut, compare_all(cut, by), strict=True)
        ]

    return {
        "Models cut to fit 8 B200, allocated": of_cut(Prepared.allocated),
        "MLPerf, peak of allocated memory": compare_all(audited, Prepared.allocated),
        "Models cut to fit 8 B200, reserved": of_cut(Prepared.reserved),
        "Llama under torchtitan, reserved": [
            with_gpu(dataclasses.replace(row, setting=""), "h100-sxm-96gb") for row in titan
        ],
    }


def _other_software(folder: Path) -> Rows:
    """Return runs predicted by the constants of another framework, with the interval that an
    estimate has for an unmeasured framework.
    """
    mpt = [run.case for run in fsdp.mpt_runs(folder)]
    dense = select_cases(pretraining(folder), has_experts=False, card=H100)
    constants = efficiency_profile(gpu=gpu(H100), framework="megatron-core").framework
    by_megatron = [
        nanotron.predict_cell(each, constants) for each in grid_groups(grid_rows(folder))
    ]
    return {
        "MPT under FSDP, constants of Megatron Core": _by_framework(mpt, "megatron-core"),
        "Dense pre-training on H100 in fp8, constants of FSDP": _by_framework(dense, "torch-fsdp"),
        "nanotron's grid, constants of Megatron Core": [
            dataclasses.replace(row, low=None, high=None)
            for row in nanotron.compare_step_times(by_megatron)
        ],
        "BLOOM's topology search, predicted as Megatron Core": _by_framework(
            bloom_cases(folder), "megatron-core"
        ),
        "Primus' schedules relative to 1F1B": _schedules(folder),
    }


def _by_framework(cases: Iterable[Case], name: str) -> list[Comparison]:
    """Return the cases predicted by the constants of another framework, as for an unmeasured
    framework.
    """

    def compare(run: Prepared) -> Comparison:
        constants = efficiency_profile(gpu=run.gpu, framework=name)
        base, added = constants.framework.time_log_sd, constants.doubts.trainer_log_sd
        row = run.compare(constants.framework)
        return dataclasses.replace(
            row.within(NORMAL_QUANTILE * math.hypot(base, added)),
            differs=("trainer",),
            base_log_sd=base,
            refused=None,
        )

    return compare_all(cases, compare)


def _schedules(folder: Path) -> list[Comparison]:
    rows = []
    for base, other in schedule_cases(folder):
        plain, row = compare_all([base, other], Prepared.shipped)
        predicted = row.predicted / plain.predicted if math.isfinite(row.predicted) else math.nan
        published = row.published / plain.published
        rows.append(
            dataclasses.replace(row, published=published, predicted=predicted, low=None, high=None)
        )
    return rows


def _published(folder: Path) -> Rows:
    """Return figures that are in this repository with their layouts, so fits may have used them."""

    def of(source: str, where: str, *, ranges: bool = False) -> list[Comparison]:
        """Return the headlines of one source. A published range is represented by its bound nearest
        to the prediction, and an added time by the layer's time relative to that without
        recomputation.
        """
        rows = []
        for row in headlines.evaluate(source):
            if row.error is not None and ("overhead" in row.what) == ranges:
                predicted = 1.0 + row.predicted / 100.0 if ranges else row.predicted
                compared = Comparison(
                    source=row.source,
                    model="",
                    what=row.what,
                    published=predicted / (1.0 + row.error),
                    predicted=predicted,
                )
                rows.append(with_gpu(compared, where))
        return rows

    return {
        "arXiv 2104.04473, table 1": of("2104.04473", GPU),
        "arXiv 2205.05198, time of a recomputed layer": of("2205.05198", GPU, ranges=True),
        "arXiv 1909.08053, GPT-2 on V100": of("1909.08053", "v100-sxm-32gb"),
        "Megatron-LM's README on H100, with hp_tool's layout": of("README, H100", H100),
        "arXiv 2407.21783, Llama 3.1 405B with its recipe": of("2407.21783", H100),
    }


def serving(folder: Path) -> Rows:
    """Return cache sizes that engines printed, and serving runs that no fit of their release
    used.
    """
    unseen = inference.compare_unseen(dense_runs(folder))
    return {
        **kv_cache.by_title(folder),
        **{
            f"Serving: {words}": inference.comparisons(unseen, what)
            for what, words in (
                ("tpot", "time per output token"),
                ("throughput", "tokens/s per GPU"),
                ("ttft", "time to first token, below the cache's limit"),
            )
        },
    }


def _ahead(folder: Path) -> Rows:
    """Return every MLPerf round and release, predicted by constants fitted to earlier
    publications.
    """
    if not rows_of(folder, "korthikanti2022_table4"):
        return {}
    cases, lora = pretraining(folder), _lora(folder)
    audited = select_cases(cases, source="MLPerf Training")
    releases = [case for case in cases if case.source != "MLPerf Training"]
    known = [*cases, *b200_cases(folder)]
    rows = predicted_ahead([*cases, *lora], known=known, start=megatron.fit_2022(folder))

    def of(chosen: Sequence[Case]) -> list[Comparison]:
        wanted = {(case.name, case.what) for case in chosen}
        return [row for row in rows if (row.model, row.what) in wanted]

    return {
        "The next round: MLPerf's pre-training": of(audited),
        "The next round: MLPerf's LoRA": of(lora),
        "The next release: dense recipes": of(select_cases(releases, has_experts=False)),
        "The next release: MoE models": of(select_cases(releases, has_experts=True)),
    }


def predicted_ahead(
    cases: Sequence[Case], *, known: Sequence[Case], start: Constants
) -> list[Comparison]:
    """Return every case predicted by constants fitted to the `known` cases of earlier months;
    `part` is its month. `start` contains the values that these rows do not determine. Each setting
    has one vote: its newest case, with the median step time of all releases.
    """
    predictions = []
    for date in sorted({case.date for case in cases}):
        settings: dict[str, list[Case]] = {}
        for case in known:
            if case.date < date:
                settings.setdefault(case.setting, []).append(case)
        seen = []
        for members in settings.values():
            step_s = median(case.step_s for case in members)
            try:
                seen.append(Prepared.from_case(dataclasses.replace(members[-1], step_s=step_s)))
            except InputError:  # no query can describe it
                continue
        if len(seen) >= FEWEST_SEEN:
            constants = megatron.fit_today(tuple(seen), start)
            rows = compare_all(select_cases(cases, date=date), constants.compare)
            predictions += [dataclasses.replace(row, part=date) for row in rows]
    return predictions


def _pairs(folder: Path, rows: Mapping[str, list[Comparison]]) -> Rows:
    """Return ratios of step times within a cell, for runs that were held out by model or layout."""
    known = cells(folder)
    megatron_core = [
        *rows.get("Dense pre-training on H100 in fp8", []),
        *rows.get("Models cut to fit 8 B200", []),
    ]
    dense = [row for row in megatron_core if (row.model, row.what) in known]
    # Of one kind, too few of one release: repeats of a layout count once, and devices alone make a
    # cell.
    experts, adapters = (
        votes(rows.get(title, []))
        for title in ("MoE models, releases from 26.02.01 on", "LoRA of MLPerf")
    )
    mpt, evo = (rows.get(each, []) for each in ("MPT under FSDP", "InternEvo, unseen layout"))

    def cell(row: Comparison) -> Hashable:
        return known[(row.model, row.what)]

    def devices(row: Comparison) -> Hashable:
        source, name, _, *devices = known[(row.model, row.what)]
        return source, name, *devices

    core = "megatron-core"
    return {
        f"Ratio of two runs: {what}": ratios
        for what, ratios in (
            ("Megatron Core", pairs(dense, cell, framework=core)),
            ("MoE models", pairs(experts, devices, framework=core, kind="experts")),
            ("LoRA of MLPerf", pairs(adapters, devices, framework=core, kind="adapters")),
            ("MPT under FSDP", pairs(mpt, cell, framework="torch-fsdp")),
            ("InternEvo", pairs(evo, cell, framework="internevo")),
        )
    }


SECTIONS: dict[str, Callable[[Path], Rows]] = {
    "paper": _paper,
    "today": lambda folder: _today(folder) | _plain(folder),
    "unfamiliar": _unfamiliar,
    "hybrids": _hybrids,
    "tuning": _tuning,
    "new dies": _new_dies,
    "fsdp": _fsdp,
    "internevo": _internevo,
    "nanotron": _nanotron,
    "memory": _memory,
    "trainers": trainers.by_title,
    "other software": _other_software,
    "ahead": _ahead,
    "published": _published,
    "serving": serving,
}
"""Functions that return comparisons by the title of their group. Sections and their fits are
independent of each other.
"""
SECONDS = {"today": 140.0, "unfamiliar": 90.0, "fsdp": 30.0, "ahead": 20.0, "nanotron": 12.0}
"""Processor seconds of the sections that take more than ten seconds. The longest sections start
first.
"""
LONG = frozenset({"today", "unfamiliar"})
"""Sections that CI omits, because it has two minutes on two cores."""
