"""All groups of evidence that the folder of measured figures allows, each by constants that did not
see what it leaves out.
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable, Container, Hashable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path

from benchmarks.accuracy import activations, trainers
from benchmarks.accuracy import other_evidence as other
from benchmarks.accuracy.comparison import Comparison
from benchmarks.accuracy.data import rows as rows_of
from benchmarks.accuracy.fit_frameworks import (
    amd_left_out,
    fit_2022,
    megatron_2020_left_out,
    table5_left_out,
    today_left_out,
    today_runs,
)
from benchmarks.accuracy.fit_training_mixers import hybrids_left_out
from benchmarks.accuracy.groups import FORMULAS, OPS, TODAY, Group, LeftOut, group, on, votes
from benchmarks.accuracy.korthikanti import GPU, table4
from benchmarks.accuracy.pairs import cells, pairs
from benchmarks.accuracy.plain import asked, plain_answers, todays_cases, without_model
from benchmarks.accuracy.prepared import Prepared, compare_all
from benchmarks.accuracy.runs import (
    b200_cases,
    cdna4_cases,
    dgxc_cases,
    gb300_cases,
    mlperf_cases,
    newest,
    pretraining,
    release_cases,
)
from benchmarks.accuracy.strong_scaling import ratios
from benchmarks.accuracy.time_travel import predicted_ahead
from benchmarks.accuracy.unfamiliar import unfamiliar
from benchmarks.accuracy.weak_scaling import ratios_left_out
from evidence.cases import Case
from hp_tool.catalog import gpu
from hp_tool.catalog.efficiency import efficiency


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
        pending = {name: pool.submit(_section, name, folder) for name in order}
        found = [group for name in names for group in pending[name].result()]
    short = {each.title: each.rows for each in found if not each.is_long}
    in_quick = {each.title for each in _pairs(folder, short) if each.rows}
    for each in _pairs(folder, {each.title: each.rows for each in found}):
        found.append(dataclasses.replace(each, is_long=each.title not in in_quick))
    return [each for each in found if each.rows]


def _section(name: str, folder: Path) -> list[Group]:
    return [dataclasses.replace(group, is_long=name in LONG) for group in SECTIONS[name](folder)]


def _paper(folder: Path) -> list[Group]:
    """arXiv 2205.05198 and the Megatron-LM of 2020, both on the software that constants of 2022 are
    for.
    """
    rows4 = rows_of(folder, "korthikanti2022_table4")
    left_out = table5_left_out(folder) if rows4 else []
    shipped = efficiency(gpu=gpu(GPU), framework="megatron-core")
    layer = [on(row, "a100-sxm-80gb") for row in table4(rows4, shipped)]
    memory = [on(row, "a100-sxm-80gb") for row in activations.figures(folder)]
    return [
        group("Table 5 of arXiv 2205.05198", "model", f"{OPS}, other models' rows", left_out),
        group("Table 4 of arXiv 2205.05198, one layer", "seen", OPS, layer, "ms"),
        group("Figures 1 and 7 of arXiv 2205.05198", "all", FORMULAS, memory, "GiB or %"),
        group(
            "Megatron-LM of 2020, 1B to 8B",
            "model",
            f"{OPS}; on V100 also its other three rows",
            megatron_2020_left_out(folder),
        ),
    ]


def _megatron(folder: Path) -> list[Group]:
    """Pre-training under today's Megatron Core: releases of recipes, audited rounds, and models cut
    to fit.
    """
    if not today_runs(folder) or not rows_of(folder, "korthikanti2022_table4"):
        return []
    cases = pretraining(folder)
    cloud = dgxc_cases(folder)
    dense, sparse = (
        [case for case in cases if case.has_experts == wanted] for wanted in (False, True)
    )
    cut, recent = b200_cases(folder), newest(sparse)
    measured_dies = [
        case for case in (*dense, *cut) if not case.has_experts and case.card != "gb200-nvl72"
    ]
    gb200 = [case for case in dense if case.card == "gb200-nvl72"]
    h100 = [case for case in dense if case.card == "h100-sxm-80gb"]
    unseen = today_left_out(folder, sparse, "name")
    today = {case.what for case in recent}
    return [
        group(
            "Dense pre-training on H100 in fp8",
            "model",
            f"{TODAY}, without the model",
            today_left_out(folder, h100, "name"),
        ),
        *(
            group(
                f"Dense pre-training on H100 in {words} (DGX Cloud)",
                "model",
                f"{TODAY}, without the model",
                today_left_out(
                    folder, [case for case in cloud if case.training.precision == precision], "name"
                ),
            )
            for precision, words in (("bf16", "16 bits"), ("fp8", "fp8"))
        ),
        group(
            "Dense pre-training on a die left out",
            "GPU",
            f"{TODAY}, without the die",
            today_left_out(folder, measured_dies, "die"),
        ),
        group("Dense recipes on GB200", "GPU", TODAY, compare_all(gb200, Prepared.shipped)),
        group(
            "Models cut to fit 8 B200",
            "setting",
            f"{TODAY}, without the layout",
            today_left_out(folder, cut, "layout"),
        ),
        group(
            "Mixtures of experts, releases from 26.02.01 on",
            "model",
            f"{TODAY}, without the model",
            [row for row in unseen if row.what in today],
        ),
        group(
            "Mixtures of experts on a GPU left out",
            "GPU",
            f"{TODAY}, without the GPU",
            today_left_out(folder, recent, "card"),
        ),
        group(
            "Mixtures of experts, a release left out",
            "setting",
            f"{TODAY}, without the release",
            today_left_out(folder, recent, "release"),
        ),
        group(
            "Mixtures of experts, earlier releases",
            "model",
            f"{TODAY}, without the model",
            [row for row in unseen if row.what not in today],
        ),
    ]


def _hybrids(folder: Path) -> list[Group]:
    """Pre-training of models whose layers differ."""
    saw = f"{TODAY}; the scan's rate without the GPU"
    return [group("Nemotron 3 Nano on a GPU left out", "GPU", saw, hybrids_left_out(folder))]


def _tuning(folder: Path) -> list[Group]:
    """Fine-tuning, which no constant but those of AMD's die saw."""
    tuned = [case for case in release_cases(folder) if case.task != "pretrain"]
    tuned += [case for case in gb300_cases(folder) if case.task == "lora"]
    audited = [case for case in mlperf_cases(folder) if "lora" in case.name]
    amd, others = (
        [case for case in audited if case.card.startswith("mi3") == wanted]
        for wanted in (True, False)
    )
    scaling = ratios(folder)
    return [
        group("LoRA of MLPerf", "all", TODAY, compare_all(others, Prepared.shipped)),
        *(
            group(
                f"Strong scaling in MLPerf's {what}",
                left_out,
                TODAY,
                [row for row in scaling if ("lora" in row.model) == (what == "LoRA")],
                "over the fewest GPUs",
            )
            for what, left_out in SCALED.items()
        ),
        group(
            "Weak scaling on H100",
            "setting",
            "the other series' growth",
            ratios_left_out(folder),
            "over the fewest GPUs",
        ),
        group(
            "LoRA of MLPerf on AMD",
            "GPU",
            "the other card's rows",
            amd_left_out(folder) if amd else [],
        ),
        group("Fine-tuning recipes", "all", TODAY, compare_all(tuned, Prepared.shipped)),
    ]


def _new_dies(folder: Path) -> list[Group]:
    """Predictions by the constants of the die before, and B300's by kernels timed on it. LoRA is
    with the other fine-tuning.
    """
    cases = [case for case in gb300_cases(folder) if case.task != "lora"]
    amd = compare_all(cdna4_cases(folder), Prepared.shipped)
    return [
        group(
            "Recipes on GB300",
            "GPU",
            f"{TODAY}; kernels of B300",
            compare_all(cases, Prepared.shipped),
        ),
        group(
            "Llama 3.1 8B of MLPerf on MI355X", "GPU", f"{TODAY}; LoRA on MI300X and MI325X", amd
        ),
    ]


def _by_todays_recipe(folder: Path, cases: Sequence[Case]) -> list[Comparison]:
    return without_model(folder, todays_cases(cases))


def _plain(folder: Path) -> list[Group]:
    """Return today's runs by plain queries: model, GPUs, precision, batch and layout; and with what
    today's recipe sets.
    """
    if not today_runs(folder):
        return []
    return [
        group(
            f"The plain question{how}: {what}",
            "all" if "LoRA" in what else "model",
            TODAY if "LoRA" in what else f"{TODAY}, without the model",
            rows(folder, chosen),
        )
        for how, rows in (("", plain_answers), (" by today's recipe", _by_todays_recipe))
        for what, chosen in asked(folder).items()
    ]


def _pairs(folder: Path, rows: Mapping[str, list[Comparison]]) -> list[Group]:
    """Ratios of step times within a cell, of runs that were left out by their model or layout."""
    known = cells(folder)
    megatron = [
        *rows.get("Dense pre-training on H100 in fp8", []),
        *rows.get("Models cut to fit 8 B200", []),
    ]
    dense = [row for row in megatron if (row.model, row.what) in known]
    # Of one kind, too few of one release: repeats of a layout count once, and devices alone make a
    # cell.
    experts, adapters = (
        votes(rows.get(title, []))
        for title in ("Mixtures of experts, releases from 26.02.01 on", "LoRA of MLPerf")
    )

    def cell(row: Comparison) -> Hashable:
        return known[(row.model, row.what)]

    def devices(row: Comparison) -> Hashable:
        source, name, _, *devices = known[(row.model, row.what)]
        return source, name, *devices

    return [
        group(f"Two runs of a cell: {what}", "model", "as of the runs", ratios, "ratio")
        for what, ratios in (
            ("Megatron Core", pairs(dense, cell, framework="megatron-core")),
            (
                "mixtures of experts",
                pairs(experts, devices, framework="megatron-core", kind="experts"),
            ),
            (
                "LoRA of MLPerf",
                pairs(adapters, devices, framework="megatron-core", kind="adapters"),
            ),
            ("MPT under FSDP", pairs(rows.get("MPT under FSDP", []), cell, framework="torch-fsdp")),
            (
                "InternEvo",
                pairs(rows.get("InternEvo, a layout left out", []), cell, framework="internevo"),
            ),
        )
    ]


SCALED: dict[str, LeftOut] = {"pre-training": "seen", "LoRA": "all"}
"""Rounds whose jobs are compared with the smallest of their series, and what constants saw of
them.
"""


def _ahead(folder: Path) -> list[Group]:
    """Every round and release by constants fitted on what was published before it."""
    if not rows_of(folder, "korthikanti2022_table4"):
        return []
    cases = pretraining(folder)
    audited = [case for case in cases if case.source == "MLPerf Training"]
    releases = [case for case in cases if case.source != "MLPerf Training"]
    known = [*cases, *b200_cases(folder)]
    lora = [
        case
        for case in mlperf_cases(folder)
        if "lora" in case.name and not case.card.startswith("mi3")
    ]
    rows = predicted_ahead([*cases, *lora], known=known, start=fit_2022(folder))

    def of(chosen: Sequence[Case]) -> list[Comparison]:
        wanted = {(case.name, case.what) for case in chosen}
        return [row for row in rows if (row.model, row.what) in wanted]

    saw = "what was published before the month"
    return [
        group("The next round: MLPerf's pre-training", "future", saw, of(audited)),
        group("The next round: MLPerf's LoRA", "future", saw, of(lora)),
        group(
            "The next release: dense recipes",
            "future",
            saw,
            of([case for case in releases if not case.has_experts]),
        ),
        group(
            "The next release: mixtures of experts",
            "future",
            saw,
            of([case for case in releases if case.has_experts]),
        ),
    ]


SECTIONS: dict[str, Callable[[Path], list[Group]]] = {
    "paper": _paper,
    "today": lambda folder: [*_megatron(folder), *_plain(folder)],
    "unfamiliar": unfamiliar,
    "hybrids": _hybrids,
    "tuning": _tuning,
    "new dies": _new_dies,
    "fsdp": other.fsdp,
    "internevo": other.internevo,
    "nanotron": other.nanotron,
    "memory": other.memory,
    "trainers": trainers.groups,
    "other software": other.other_software,
    "ahead": _ahead,
    "published": lambda folder: other.published(),
    "serving": other.serving,
}
"""Functions that compute groups, each independent of the others and of their fits."""
SECONDS = {"today": 140.0, "unfamiliar": 90.0, "fsdp": 30.0, "ahead": 20.0, "nanotron": 12.0}
"""Processor seconds of the sections that take more than ten; they are started first."""
LONG = frozenset({"today", "unfamiliar"})
"""Sections that CI leaves out, because it has two minutes of two cores."""
