"""Groups of evidence beside Megatron Core's: FSDP, nanotron, memory, frameworks left out, published
headlines, serving.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterable
from pathlib import Path

from benchmarks.accuracy import grid, headlines, inference
from benchmarks.accuracy.comparison import Comparison
from benchmarks.accuracy.fit_fsdp import across_gpus, leave_one_model_out, mpt_runs
from benchmarks.accuracy.fit_internevo import LEFT_OUT, leave_one_out, memory_left_out
from benchmarks.accuracy.grid_rows import grid_rows
from benchmarks.accuracy.grid_rows import groups as grid_groups
from benchmarks.accuracy.groups import FORMULAS, OPS, TODAY, Group, on
from benchmarks.accuracy.korthikanti import GPU
from benchmarks.accuracy.prepared import Prepared, compare_all
from benchmarks.accuracy.runs import (
    b200_cases,
    bloom_cases,
    internevo_cases,
    mlperf_cases,
    pretraining,
    reserved_cases,
    schedule_cases,
    titan_cases,
    trl_cases,
)
from benchmarks.accuracy.serving_rows import dense_runs
from evidence.cases import Case
from hp_tool.catalog import gpu
from hp_tool.catalog.efficiency import efficiency


def fsdp(folder: Path) -> list[Group]:
    """MPT on A100 and H100, and torchtitan's Llama, which no constant saw."""
    mpt = mpt_runs(folder)
    sizes = _from("llm-foundry", leave_one_model_out(mpt)) if mpt else []
    h100 = [row for row in sizes if row.gpu.startswith("h100")]
    return [
        Group(title="MPT under FSDP", left_out="model", saw="ops/, MPT of other sizes", rows=sizes),
        Group(
            title="MPT under FSDP on H100",
            left_out="model",
            saw="ops/, MPT of other sizes",
            rows=h100,
        ),
        Group(
            title="MPT under FSDP on a GPU left out",
            left_out="GPU",
            saw="ops/, MPT on other GPUs",
            rows=_from("llm-foundry", across_gpus(mpt)) if mpt else [],
        ),
        Group(
            title="Llama under eager torchtitan",
            left_out="all",
            saw="ops/, MPT under llm-foundry",
            rows=compare_all(dated(titan_cases(folder)[0], source="torchtitan"), Prepared.shipped),
        ),
        Group(
            title="TRL at a million tokens",
            left_out="all",
            saw="ops/, MPT under llm-foundry, published attention kernels",
            rows=compare_all(trl_cases(folder), Prepared.shipped),
        ),
    ]


def internevo(folder: Path) -> list[Group]:
    """One model's runs, each by constants that saw no run on as many GPUs, or of its layout."""
    runs = [Prepared.of(case) for case in internevo_cases(folder)]
    if not runs:
        return []
    steps = [
        Group(
            title=f"InternEvo, a {name} left out",
            left_out="setting",
            saw="ops/, the other runs of the model",
            rows=leave_one_out(runs, key),
        )
        for name, key in LEFT_OUT.items()
    ]
    memory_rows = [on(row, row.gpu) for row in memory_left_out(folder)]
    saw = "formulas, and the share that the other rows cache"
    return [
        *steps,
        Group(
            title="InternEvo, memory in use",
            left_out="setting",
            saw=saw,
            rows=memory_rows,
            unit="GiB",
        ),
    ]


def nanotron(folder: Path) -> list[Group]:
    rows = grid_rows(folder)
    if not rows:
        return []
    cells = grid.cells(folder)
    models, nodes = cells["model_left_out"], cells["nodes_left_out"]
    saw = "ops/, nanotron's runs"
    return [
        Group(
            title="nanotron's grid",
            left_out="model",
            saw=f"{saw} of the other model",
            rows=grid.steps(models),
        ),
        Group(
            title="nanotron's grid, nodes left out",
            left_out="setting",
            saw=f"{saw} on other nodes",
            rows=grid.steps(nodes),
        ),
        Group(
            title="nanotron's grid, memory",
            left_out="model",
            saw=saw,
            rows=grid.memory(models),
            unit="GiB",
        ),
    ]


def memory(folder: Path) -> list[Group]:
    """Allocated bytes by formulas alone, and what the allocator holds. The number of micro-batches
    changes no memory.
    """
    cut = [case for case in b200_cases(folder) if case.allocated_bytes]

    def of_cut(by: Callable[[Prepared], Comparison]) -> list[Comparison]:
        rows = compare_all(cut, by)
        return [
            dataclasses.replace(row, setting=case.layout)
            for case, row in zip(cut, rows, strict=True)
        ]

    audited = [case for case in mlperf_cases(folder) if case.allocated_bytes]
    titan = [
        on(dataclasses.replace(row, setting=""), "h100-sxm-96gb")
        for row in compare_all(reserved_cases(folder), Prepared.reserved)
    ]
    typical = f"{FORMULAS}, and a typical 3 % of the allocator's"
    return [
        Group(
            title="Models cut to fit 8 B200, allocated",
            left_out="all",
            saw=FORMULAS,
            unit="GiB",
            rows=of_cut(Prepared.allocated),
        ),
        Group(
            title="MLPerf, peak of allocated memory",
            left_out="all",
            saw=FORMULAS,
            unit="GiB",
            rows=compare_all(audited, Prepared.allocated),
        ),
        Group(
            title="Models cut to fit 8 B200, reserved",
            left_out="all",
            saw=typical,
            unit="GiB",
            rows=of_cut(Prepared.reserved),
        ),
        Group(
            title="Llama under torchtitan, reserved",
            left_out="all",
            saw=typical,
            unit="GiB",
            rows=titan,
        ),
    ]


def other_software(folder: Path) -> list[Group]:
    """Runs by the constants of another framework than theirs. No interval is stated for one that
    nobody measured.
    """
    fsdp = [run.case for run in mpt_runs(folder)]
    dense = [
        case
        for case in pretraining(folder)
        if not case.has_experts and case.card == "h100-sxm-80gb"
    ]
    rows = grid_rows(folder)
    megatron = efficiency(gpu=gpu("h100-sxm-80gb"), framework="megatron-core").framework
    cells = [grid.predicted(group, megatron) for group in grid_groups(rows)]
    return [
        Group(
            title="MPT under FSDP by Megatron Core's constants",
            left_out="framework",
            saw=TODAY,
            rows=_by_framework(dated(fsdp, source="llm-foundry"), "megatron-core"),
        ),
        Group(
            title="Dense pre-training on H100 in fp8 by FSDP's constants",
            left_out="framework",
            saw="ops/, MPT under llm-foundry",
            rows=_by_framework(dense, "torch-fsdp"),
        ),
        Group(
            title="nanotron's grid by Megatron Core's constants",
            left_out="framework",
            saw=TODAY,
            rows=_without_intervals(grid.steps(cells)),
        ),
        Group(
            title="BLOOM's topology search, asked as Megatron Core",
            left_out="framework",
            saw=OPS,
            rows=compare_all(bloom_cases(folder), Prepared.shipped),
        ),
        Group(
            title="Primus' schedules against 1F1B",
            left_out="framework",
            saw=TODAY,
            unit="ratio",
            rows=_schedules(folder),
        ),
    ]


def published() -> list[Group]:
    """Figures that stand in this repository with their layouts: nobody can say that they were not
    seen.
    """
    rows = headlines.evaluate()

    def of(source: str, where: str) -> list[Comparison]:
        return [
            Comparison(
                source=row.source,
                model="",
                what=row.what,
                published=row.predicted / (1.0 + row.error),
                predicted=row.predicted,
                gpu=where,
                part=where,
            )
            for row in rows
            if source in row.source and row.error is not None
        ]

    ranges = [_of_range(row) for row in rows if "overhead" in row.what]
    return [
        Group(
            title="arXiv 2104.04473, table 1",
            left_out="seen",
            saw=OPS,
            unit="TFLOP/s",
            rows=of("2104.04473", "a100-sxm-80gb"),
        ),
        Group(
            title="arXiv 2205.05198, time of a layer that is recomputed",
            left_out="seen",
            saw=OPS,
            unit="over a layer without",
            rows=ranges,
        ),
        Group(
            title="arXiv 1909.08053, GPT-2 on V100",
            left_out="seen",
            saw=OPS,
            rows=of("1909.08053", "v100-sxm-32gb"),
            unit="PFLOP/s, %, TFLOP/s",
        ),
        Group(
            title="Megatron-LM's README on H100, by our layout",
            left_out="seen",
            saw=TODAY,
            rows=of("README, H100", "h100-sxm-80gb"),
            unit="% MFU",
        ),
        Group(
            title="arXiv 2407.21783, Llama 3.1 405B by its recipe",
            left_out="seen",
            saw="ops/, MPT under llm-foundry",
            rows=of("2407.21783", "h100-sxm-80gb"),
            unit="TFLOP/s",
        ),
    ]


def _of_range(row: headlines.Headline) -> Comparison:
    """Return a layer's time over that without recomputation, beside the nearest bound of the
    published range.
    """
    assert row.error is not None
    predicted = 1.0 + row.predicted / 100.0
    published = predicted / (1.0 + row.error)
    return on(
        Comparison(
            source=row.source, model="", what=row.what, published=published, predicted=predicted
        ),
        GPU,
    )


def serving(folder: Path) -> list[Group]:
    pairs = inference.unseen(dense_runs(folder))
    saw = "ops/, the other half of the groups of each engine's version"
    return [
        Group(
            title=f"Serving: {words}",
            left_out="setting",
            saw=saw,
            unit=unit,
            rows=inference.comparisons(pairs, what),
        )
        for what, words, unit in (
            ("tpot", "time per output token", "s"),
            ("throughput", "tokens/s of a GPU", "1/s"),
            ("ttft", "time to first token, below the cache's limit", "s"),
        )
    ]


def dated(cases: Iterable[Case], *, source: str) -> list[Case]:
    return [dataclasses.replace(case, source=source) for case in cases]


def _from(source: str, rows: Iterable[Comparison]) -> list[Comparison]:
    return [dataclasses.replace(row, source=source) for row in rows]


def _by_framework(cases: Iterable[Case], name: str) -> list[Comparison]:
    return _without_intervals(
        compare_all(
            cases, lambda run: run.compare(efficiency(gpu=run.gpu, framework=name).framework)
        )
    )


def _without_intervals(rows: Iterable[Comparison]) -> list[Comparison]:
    return [dataclasses.replace(row, low=None, high=None, refused=None) for row in rows]


def _schedules(folder: Path) -> list[Comparison]:
    """Seconds of a schedule over those of 1F1B."""
    rows = []
    for base, other in schedule_cases(folder):
        plain, row = compare_all([base, other], Prepared.shipped)
        predicted = row.predicted / plain.predicted if math.isfinite(row.predicted) else math.nan
        published = row.published / plain.published
        rows.append(
            dataclasses.replace(row, published=published, predicted=predicted, low=None, high=None)
        )
    return rows
