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

from benchmarks.accuracy import activations
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
from benchmarks.accuracy.groups import FORMULAS, OPS, TODAY, Group, LeftOut, on, votes
from benchmarks.accuracy.korthikanti import GPU, table4
from benchmarks.accuracy.new_dies import new_dies
from benchmarks.accuracy.pairs import cells, pairs
from benchmarks.accuracy.plain import asked, plain_cases, todays_cases, without_model
from benchmarks.accuracy.prepared import Prepared, compare_all
from benchmarks.accuracy.runs import (
    b200_cases,
    dgxc_cases,
    gb300_cases,
    mlperf_cases,
    newest,
    pretraining,
    release_cases,
)
from benchmarks.accuracy.strong_scaling import ratios
from benchmarks.accuracy.time_travel import predicted_ahead
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
    in_quick = _pairs(folder, {group.title: group.rows for group in found if not group.is_long})
    quick = {group.title for group in in_quick if group.rows}
    for group in _pairs(folder, {group.title: group.rows for group in found}):
        found.append(dataclasses.replace(group, is_long=group.title not in quick))
    return [group for group in found if group.rows]


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
        Group(
            title="Table 5 of arXiv 2205.05198",
            left_out="model",
            rows=left_out,
            saw=f"{OPS}, other models' rows",
        ),
        Group(
            title="Table 4 of arXiv 2205.05198, one layer",
            left_out="seen",
            rows=layer,
            saw=OPS,
            unit="ms",
        ),
        Group(
            title="Figures 1 and 7 of arXiv 2205.05198",
            left_out="all",
            rows=memory,
            saw=FORMULAS,
            unit="GiB or %",
        ),
        Group(
            title="Megatron-LM of 2020, 1B to 8B",
            left_out="model",
            saw=f"{OPS}; on V100 also its other three rows",
            rows=megatron_2020_left_out(folder),
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
        Group(
            title="Dense pre-training on H100 in fp8",
            left_out="model",
            saw=f"{TODAY}, without the model",
            rows=today_left_out(folder, h100, "name"),
        ),
        *(
            Group(
                title=f"Dense pre-training on H100 in {words} (DGX Cloud)",
                left_out="model",
                saw=f"{TODAY}, without the model",
                rows=today_left_out(
                    folder, [case for case in cloud if _precision(case) == precision], "name"
                ),
            )
            for precision, words in (("bf16", "16 bits"), ("fp8", "fp8"))
        ),
        Group(
            title="Dense pre-training on a die left out",
            left_out="GPU",
            saw=f"{TODAY}, without the die",
            rows=today_left_out(folder, measured_dies, "die"),
        ),
        Group(
            title="Dense recipes on GB200",
            left_out="GPU",
            saw=TODAY,
            rows=compare_all(gb200, Prepared.shipped),
        ),
        Group(
            title="Models cut to fit 8 B200",
            left_out="setting",
            saw=f"{TODAY}, without the layout",
            rows=today_left_out(folder, cut, "layout"),
        ),
        Group(
            title="Mixtures of experts, releases from 26.02.01 on",
            left_out="model",
            saw=f"{TODAY}, without the model",
            rows=[row for row in unseen if row.what in today],
        ),
        Group(
            title="Mixtures of experts on a GPU left out",
            left_out="GPU",
            saw=f"{TODAY}, without the GPU",
            rows=today_left_out(folder, recent, "card"),
        ),
        Group(
            title="Mixtures of experts, a release left out",
            left_out="setting",
            saw=f"{TODAY}, without the release",
            rows=today_left_out(folder, recent, "release"),
        ),
        Group(
            title="Mixtures of experts, earlier releases",
            left_out="model",
            saw=f"{TODAY}, without the model",
            rows=[row for row in unseen if row.what not in today],
        ),
    ]


def _hybrids(folder: Path) -> list[Group]:
    """Pre-training of models whose layers differ."""
    saw = f"{TODAY}; the scan's rate without the GPU"
    return [
        Group(
            title="Nemotron 3 Nano on a GPU left out",
            left_out="GPU",
            saw=saw,
            rows=hybrids_left_out(folder),
        )
    ]


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
        Group(
            title="LoRA of MLPerf",
            left_out="all",
            saw=TODAY,
            rows=compare_all(others, Prepared.shipped),
        ),
        *(
            Group(
                title=f"Strong scaling in MLPerf's {what}",
                left_out=left_out,
                saw=TODAY,
                unit="over the fewest GPUs",
                rows=[row for row in scaling if ("lora" in row.model) == (what == "LoRA")],
            )
            for what, left_out in SCALED.items()
        ),
        Group(
            title="LoRA of MLPerf on AMD",
            left_out="GPU",
            saw="the other card's rows",
            rows=amd_left_out(folder) if amd else [],
        ),
        Group(
            title="Fine-tuning recipes",
            left_out="all",
            saw=TODAY,
            rows=compare_all(tuned, Prepared.shipped),
        ),
    ]


def _plain(folder: Path) -> list[Group]:
    """Return today's runs by plain queries: model, GPUs, precision, batch and layout; and with what
    today's recipe sets.
    """
    if not today_runs(folder):
        return []
    return [
        Group(
            title=f"The plain question{how}: {what}",
            left_out="all" if "LoRA" in what else "model",
            saw=TODAY if "LoRA" in what else f"{TODAY}, without the model",
            rows=without_model(folder, worded(chosen)),
        )
        for how, worded in (("", plain_cases), (" by today's recipe", todays_cases))
        for what, chosen in asked(folder).items()
    ]


def _precision(case: Case) -> str:
    assert case.query.training is not None
    return case.query.training.precision


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
        Group(
            title=f"Two runs of a cell: {what}",
            left_out="model",
            unit="ratio",
            rows=ratios,
            saw="as of the runs",
        )
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
        Group(
            title="The next round: MLPerf's pre-training",
            left_out="future",
            saw=saw,
            rows=of(audited),
        ),
        Group(title="The next round: MLPerf's LoRA", left_out="future", saw=saw, rows=of(lora)),
        Group(
            title="The next release: dense recipes",
            left_out="future",
            saw=saw,
            rows=of([case for case in releases if not case.has_experts]),
        ),
        Group(
            title="The next release: mixtures of experts",
            left_out="future",
            saw=saw,
            rows=of([case for case in releases if case.has_experts]),
        ),
    ]


SECTIONS: dict[str, Callable[[Path], list[Group]]] = {
    "paper": _paper,
    "today": lambda folder: [*_megatron(folder), *_plain(folder)],
    "hybrids": _hybrids,
    "tuning": _tuning,
    "new dies": new_dies,
    "fsdp": other.fsdp,
    "internevo": other.internevo,
    "nanotron": other.nanotron,
    "memory": other.memory,
    "other software": other.other_software,
    "ahead": _ahead,
    "published": lambda folder: other.published(),
    "serving": other.serving,
}
"""Functions that compute groups, each independent of the others and of their fits."""
SECONDS = {"today": 140.0, "fsdp": 30.0, "ahead": 20.0, "nanotron": 12.0}
"""Processor seconds of the sections that take more than ten; they are started first."""
LONG = frozenset({"today"})
"""Sections that CI leaves out, because it has two minutes of two cores."""
