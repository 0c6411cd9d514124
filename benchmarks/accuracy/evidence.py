"""All groups of evidence that the folder of measured figures allows, each by constants that did not see what it leaves out."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

from benchmarks.accuracy import activations, grid, headlines, inference
from benchmarks.accuracy.comparison import Comparison
from benchmarks.accuracy.data import read
from benchmarks.accuracy.fit_frameworks import amd_left_out, fit, fit_today, fitted_2022, profile_2022, today_runs
from benchmarks.accuracy.fit_fsdp import across_gpus, leave_one_model_out, mpt_runs
from benchmarks.accuracy.fsdp_memory import reserved
from benchmarks.accuracy.fsdp_runs import titan_cases
from benchmarks.accuracy.grid_rows import FILE as GRID
from benchmarks.accuracy.grid_rows import groups as grid_groups
from benchmarks.accuracy.groups import Group
from benchmarks.accuracy.heldout import Case, b200_cases, megatron_2020_cases
from benchmarks.accuracy.korthikanti import GPU, MODELS, table4, table5_cases
from benchmarks.accuracy.mlperf_runs import mlperf_cases
from benchmarks.accuracy.moe_runs import newest
from benchmarks.accuracy.other_runs import bloom_cases, schedule_cases
from benchmarks.accuracy.prepared import Prepared, compare_all
from benchmarks.accuracy.recipe_runs import release_cases
from benchmarks.accuracy.serving_runs import runs
from benchmarks.accuracy.time_travel import predicted_ahead
from hp_tool.catalog import gpu
from hp_tool.catalog.efficiency import efficiency
from hp_tool.training.problem import named_model

FORMULAS = "nothing: formulas alone"
OPS = "ops/ and Tables 4 and 5 of arXiv 2205.05198"
TODAY = "H100 recipes and MLPerf pre-training, recipes and cut models on B200, Qwen3-30B-A3B"


def groups(folder: Path) -> list[Group]:
    """Those with rows."""
    found = [*_paper(folder), *_megatron(folder), *_tuning(folder), *_fsdp(folder), *_nanotron(folder), *_memory(folder)]
    found += [*_other_software(folder), *_ahead(folder), *_published(), *_serving(folder)]
    return [group for group in found if group.rows]


def _paper(folder: Path) -> list[Group]:
    """arXiv 2205.05198 and the Megatron-LM of 2020, both on the software that constants of 2022 are for."""
    rows = read(folder, "korthikanti2022_table5.csv")
    rows4 = read(folder, "korthikanti2022_table4.csv")
    left_out = []
    for size in MODELS if rows and rows4 else ():
        x = fitted_2022(folder, leave_out=size)
        constants = profile_2022(x).framework
        cases = [case for case in table5_cases(rows) if case.name == size]
        left_out += compare_all(cases, lambda run, c=constants, x=x: run.compare(c, {("a100", "bf16"): x[-1]}))  # type: ignore[misc]
    shipped = efficiency(gpu=gpu(GPU), framework="megatron-core")
    layer = [_on(row, "a100-sxm-80gb") for row in table4(rows4, shipped)]
    memory = [_on(row, "a100-sxm-80gb") for row in activations.figures(folder)]
    return [
        Group(title="Table 5 of arXiv 2205.05198", left_out="model", rows=left_out, saw=f"{OPS}, other models' rows"),
        Group(title="Table 4 of arXiv 2205.05198, one layer", left_out="seen", rows=layer, saw=OPS, unit="ms"),
        Group(title="Figures 1 and 7 of arXiv 2205.05198", left_out="all", rows=memory, saw=FORMULAS, unit="GiB or %"),
        Group(
            title="Megatron-LM of 2020, 1B to 8B", left_out="all", saw=OPS,
            rows=compare_all(megatron_2020_cases(folder), Prepared.shipped),
        ),
    ]  # fmt: skip


def _megatron(folder: Path) -> list[Group]:
    """Pre-training under today's Megatron Core: releases of recipes, audited rounds, and models cut to fit."""
    if not today_runs(folder) or not read(folder, "korthikanti2022_table4.csv"):
        return []
    cases = pretraining(folder)
    dense, sparse = ([case for case in cases if has_experts(case) == wanted] for wanted in (False, True))
    cut, recent = b200_cases(folder), newest(sparse)
    measured_dies = [case for case in (*dense, *cut) if not has_experts(case) and card(case) != "gb200-nvl72"]
    gb200 = [case for case in dense if card(case) == "gb200-nvl72"]
    h100 = [case for case in dense if card(case) == "h100-sxm-80gb"]
    unseen = _leaving_out(folder, sparse, has_experts)
    today = {case.what for case in recent}
    return [
        Group(
            title="Dense pre-training on H100", left_out="model", saw=f"{TODAY}, without the model",
            rows=_leaving_out(folder, h100, lambda case: case.name),
        ),
        Group(
            title="Dense pre-training on a die left out", left_out="GPU", saw=f"{TODAY}, without the die",
            rows=_leaving_out(folder, measured_dies, die),
        ),
        Group(
            title="Dense recipes on GB200", left_out="GPU", saw=TODAY, rows=compare_all(gb200, Prepared.shipped),
        ),
        Group(
            title="Models cut to fit 8 B200", left_out="setting", saw=f"{TODAY}, without the layout",
            rows=_leaving_out(folder, cut, lambda case: case.layout),
        ),
        Group(
            title="Mixtures of experts, releases from 26.02.01 on", left_out="model", saw=f"{TODAY}, without experts",
            rows=[row for row in unseen if row.what in today],
        ),
        Group(
            title="Mixtures of experts, earlier releases", left_out="model", saw=f"{TODAY}, without experts",
            rows=[row for row in unseen if row.what not in today],
        ),
    ]  # fmt: skip


def _tuning(folder: Path) -> list[Group]:
    """Fine-tuning, which no constant but those of AMD's die saw."""
    tuned = [case for case in release_cases(folder) if case.query.training.task != "pretrain"]  # type: ignore[union-attr]
    audited = [case for case in mlperf_cases(folder) if "lora" in case.name]
    amd, others = ([case for case in audited if card(case).startswith("mi3") == wanted] for wanted in (True, False))
    return [
        Group(title="LoRA of MLPerf", left_out="all", saw=TODAY, rows=compare_all(others, Prepared.shipped)),
        Group(
            title="LoRA of MLPerf on AMD", left_out="GPU", saw="the other card's rows", rows=amd_left_out(folder) if amd else []
        ),
        Group(title="Fine-tuning recipes", left_out="all", saw=TODAY, rows=compare_all(tuned, Prepared.shipped)),
    ]


def _fsdp(folder: Path) -> list[Group]:
    """MPT on A100 and H100, and torchtitan's Llama, which no constant saw."""
    mpt = mpt_runs(folder)
    return [
        Group(
            title="MPT under FSDP", left_out="model", saw="ops/, MPT of other sizes",
            rows=_from("llm-foundry", leave_one_model_out(mpt)) if mpt else [],
        ),
        Group(
            title="MPT under FSDP on a GPU left out", left_out="GPU", saw="ops/, MPT on other GPUs",
            rows=_from("llm-foundry", across_gpus(mpt)) if mpt else [],
        ),
        Group(
            title="Llama under eager torchtitan", left_out="all", saw="ops/, MPT under llm-foundry",
            rows=compare_all(dated(titan_cases(folder)[0], source="torchtitan"), Prepared.shipped),
        ),
    ]  # fmt: skip


def _nanotron(folder: Path) -> list[Group]:
    rows = read(folder, GRID)
    if not rows:
        return []
    cells = grid.cells(folder)
    models, nodes = cells["model_left_out"], cells["nodes_left_out"]
    saw = "ops/, nanotron's runs"
    return [
        Group(title="nanotron's grid", left_out="model", saw=f"{saw} of the other model", rows=grid.steps(models)),
        Group(title="nanotron's grid, nodes left out", left_out="setting", saw=f"{saw} on other nodes", rows=grid.steps(nodes)),
        Group(title="nanotron's grid, memory", left_out="model", saw=saw, rows=grid.memory(models), unit="GiB"),
    ]


def _memory(folder: Path) -> list[Group]:
    """Allocated bytes by formulas alone, and what the allocator holds. The number of micro-batches changes no memory."""
    cut = [case for case in b200_cases(folder) if case.allocated_bytes]
    cut_rows = [
        dataclasses.replace(row, setting=case.layout)
        for case, row in zip(cut, compare_all(cut, Prepared.allocated), strict=True)
    ]
    audited = [case for case in mlperf_cases(folder) if case.allocated_bytes]
    held = [_on(row, "h100-sxm-96gb") for row in reserved(folder)]
    return [
        Group(title="Models cut to fit 8 B200, allocated", left_out="all", saw=FORMULAS, rows=cut_rows, unit="GiB"),
        Group(
            title="MLPerf, peak of allocated memory", left_out="all", saw=FORMULAS, unit="GiB",
            rows=compare_all(audited, Prepared.allocated),
        ),
        Group(
            title="Llama under torchtitan, reserved", left_out="all", unit="GiB", rows=held,
            saw="formulas, and a typical 1 GiB and 3 % for the driver and the allocator",
        ),
    ]  # fmt: skip


def _other_software(folder: Path) -> list[Group]:
    """Runs by the constants of another framework than theirs. No interval is stated for one that nobody measured."""
    fsdp = [run.case for run in mpt_runs(folder)]
    dense = [case for case in pretraining(folder) if not has_experts(case) and card(case) == "h100-sxm-80gb"]
    rows = read(folder, GRID)
    megatron = efficiency(gpu=gpu("h100-sxm-80gb"), framework="megatron-core").framework
    cells = [grid.predicted(group, megatron) for group in grid_groups(rows)]
    return [
        Group(title="MPT under FSDP by Megatron Core's constants", left_out="framework", saw=TODAY,
              rows=_by_framework(dated(fsdp, source="llm-foundry"), "megatron-core")),
        Group(title="Dense pre-training on H100 by FSDP's constants", left_out="framework", saw="ops/, MPT under llm-foundry",
              rows=_by_framework(dense, "torch-fsdp")),
        Group(title="nanotron's grid by Megatron Core's constants", left_out="framework", saw=TODAY,
              rows=_without_intervals(grid.steps(cells))),
        Group(title="BLOOM's topology search, asked as Megatron Core", left_out="framework", saw=OPS,
              rows=compare_all(bloom_cases(folder), Prepared.shipped)),
        Group(title="Primus' schedules against 1F1B", left_out="framework", saw=TODAY, unit="ratio", rows=_schedules(folder)),
    ]  # fmt: skip


def _ahead(folder: Path) -> list[Group]:
    """Every round and release by constants fitted on what was published before it."""
    if not read(folder, "korthikanti2022_table4.csv"):
        return []
    cases = pretraining(folder)
    audited = [case for case in cases if case.source == "MLPerf Training"]
    releases = [case for case in cases if case.source != "MLPerf Training"]
    known = [*cases, *b200_cases(folder)]
    lora = [case for case in mlperf_cases(folder) if "lora" in case.name and not card(case).startswith("mi3")]
    rows = predicted_ahead([*cases, *lora], known=known, start=fit(folder).framework)

    def of(chosen: Sequence[Case]) -> list[Comparison]:
        wanted = {(case.name, case.what) for case in chosen}
        return [row for row in rows if (row.model, row.what) in wanted]

    saw = "what was published before the month"
    return [
        Group(title="The next round: MLPerf's pre-training", left_out="future", saw=saw, rows=of(audited)),
        Group(title="The next round: MLPerf's LoRA", left_out="future", saw=saw, rows=of(lora)),
        Group(title="The next release: dense recipes", left_out="future", saw=saw,
              rows=of([case for case in releases if not has_experts(case)])),
        Group(title="The next release: mixtures of experts", left_out="future", saw=saw,
              rows=of([case for case in releases if has_experts(case)])),
    ]  # fmt: skip


def _published() -> list[Group]:
    """Figures that stand in this repository with their layouts: nobody can say that they were not seen."""
    rows = headlines.evaluate()

    def of(source: str, where: str) -> list[Comparison]:
        return [
            Comparison(
                source=row.source, model="", what=row.what, published=row.predicted / (1.0 + row.error),
                predicted=row.predicted, gpu=where, part=where,
            )
            for row in rows if source in row.source and row.error is not None
        ]  # fmt: skip

    ranges = [_of_range(row) for row in rows if "overhead" in row.what]
    return [
        Group(title="arXiv 2104.04473, table 1", left_out="seen", saw=OPS, unit="TFLOP/s",
              rows=of("2104.04473", "a100-sxm-80gb")),
        Group(title="arXiv 2205.05198, time of a layer that is recomputed", left_out="seen", saw=OPS,
              unit="over a layer without", rows=ranges),
        Group(title="arXiv 1909.08053, GPT-2 on V100", left_out="seen", saw=OPS, rows=of("1909.08053", "v100-sxm-32gb"),
              unit="PFLOP/s, %, TFLOP/s"),
        Group(title="Strong scaling of 177B to 4,608 H100, by our layout", left_out="seen", saw=TODAY,
              rows=of("README, H100", "h100-sxm-80gb"), unit="% MFU"),
    ]  # fmt: skip


def _of_range(row: headlines.Headline) -> Comparison:
    """A layer's time over that without recomputation, beside the nearest bound of the published range."""
    low, high = map(float, row.published.split("-"))
    nearest = min(max(row.predicted, low), high)
    published, predicted = (1.0 + overhead / 100.0 for overhead in (nearest, row.predicted))
    return _on(Comparison(source=row.source, model="", what=row.what, published=published, predicted=predicted), GPU)


def _serving(folder: Path) -> list[Group]:
    pairs = inference.unseen(runs(folder))
    saw = "ops/, the other half of the groups of each engine's version"
    return [
        Group(title=f"Serving: {words}", left_out="setting", saw=saw, unit=unit, rows=inference.comparisons(pairs, what))
        for what, words, unit in (("tpot", "time per output token", "s"), ("throughput", "tokens/s of a GPU", "1/s"),
                                  ("ttft", "time to first token, below the cache's limit", "s"))
    ]  # fmt: skip


def pretraining(folder: Path) -> list[Case]:
    """Every release and round of pre-training that is published with its layout."""
    cases = [*release_cases(folder), *mlperf_cases(folder)]
    return [case for case in cases if case.query.training is not None and case.query.training.task == "pretrain"]


def has_experts(case: Case) -> bool:
    return named_model(case.query.model).num_experts is not None


def card(case: Case) -> str:
    return str(case.query.cluster.gpu)


def die(case: Case) -> str:
    return str(gpu(card(case)).silicon)


def dated(cases: Iterable[Case], *, source: str) -> list[Case]:
    return [dataclasses.replace(case, source=source) for case in cases]


def _from(source: str, rows: Iterable[Comparison]) -> list[Comparison]:
    return [dataclasses.replace(row, source=source) for row in rows]


def _on(row: Comparison, name: str) -> Comparison:
    return dataclasses.replace(row, gpu=name, part=name)


def _leaving_out(folder: Path, cases: Iterable[Case], key: Callable[[Case], object]) -> list[Comparison]:
    """These cases, each predicted by today's constants that saw no row of its key."""
    start, grouped = fit(folder).framework, dict[object, list[Case]]()
    for case in cases:
        grouped.setdefault(key(case), []).append(case)
    found = []
    for group, members in grouped.items():
        constants = fit_today([run for run in today_runs(folder) if key(run.case) != group], start)
        found += compare_all(members, constants.compare)
    return found


def _by_framework(cases: Iterable[Case], name: str) -> list[Comparison]:
    return _without_intervals(compare_all(cases, lambda run: run.compare(efficiency(gpu=run.gpu, framework=name).framework)))


def _without_intervals(rows: Iterable[Comparison]) -> list[Comparison]:
    return [dataclasses.replace(row, low=None, high=None, refused=None) for row in rows]


def _schedules(folder: Path) -> list[Comparison]:
    """Seconds of a schedule over those of 1F1B."""
    found = []
    for base, other in schedule_cases(folder):
        plain, row = compare_all([base, other], Prepared.shipped)
        predicted = row.predicted / plain.predicted if math.isfinite(row.predicted) else math.nan
        published = row.published / plain.published
        found.append(dataclasses.replace(row, published=published, predicted=predicted, low=None, high=None))
    return found
