"""Groups of evidence beside Megatron Core's: FSDP, nanotron, memory, frameworks left out, published
headlines, serving.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterable
from pathlib import Path

from benchmarks.accuracy import grid, headlines, inference, kv_cache
from benchmarks.accuracy.comparison import Comparison
from benchmarks.accuracy.fit_fsdp import across_gpus, leave_one_model_out, mpt_runs
from benchmarks.accuracy.fit_internevo import LEFT_OUT, leave_one_out, memory_left_out
from benchmarks.accuracy.grid_rows import grid_rows
from benchmarks.accuracy.grid_rows import groups as grid_groups
from benchmarks.accuracy.groups import FORMULAS, OPS, TODAY, Group, group, on
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
from hp_tool.cost.uncertainty import NORMAL_QUANTILE


def fsdp(folder: Path) -> list[Group]:
    """MPT on A100 and H100, and torchtitan's Llama, which no constant saw."""
    mpt = mpt_runs(folder)
    sizes = leave_one_model_out(mpt) if mpt else []
    h100 = [row for row in sizes if row.gpu.startswith("h100")]
    return [
        group("MPT under FSDP", "model", "ops/, MPT of other sizes", sizes),
        group("MPT under FSDP on H100", "model", "ops/, MPT of other sizes", h100),
        group(
            "MPT under FSDP on a GPU left out",
            "GPU",
            "ops/, MPT on other GPUs",
            across_gpus(mpt) if mpt else [],
        ),
        group(
            "Llama under eager torchtitan",
            "all",
            "ops/, MPT under llm-foundry",
            compare_all(titan_cases(folder)[0], Prepared.shipped),
        ),
        group(
            "TRL at a million tokens",
            "all",
            "ops/, MPT under llm-foundry, published attention kernels",
            compare_all(trl_cases(folder), Prepared.shipped),
        ),
    ]


def internevo(folder: Path) -> list[Group]:
    """One model's runs, each by constants that saw no run on as many GPUs, or of its layout."""
    runs = [Prepared.of(case) for case in internevo_cases(folder)]
    if not runs:
        return []
    steps = [
        group(
            f"InternEvo, a {name} left out",
            "setting",
            "ops/, the other runs of the model",
            leave_one_out(runs, key),
        )
        for name, key in LEFT_OUT.items()
    ]
    memory_rows = [on(row, row.gpu) for row in memory_left_out(folder)]
    saw = "formulas, and the share that the other rows cache"
    return [
        *steps,
        group("InternEvo, memory in use", "setting", saw, memory_rows, "GiB"),
    ]


def nanotron(folder: Path) -> list[Group]:
    rows = grid_rows(folder)
    if not rows:
        return []
    cells = grid.cells(folder)
    models, nodes = cells["model_left_out"], cells["nodes_left_out"]
    saw = "ops/, nanotron's runs"
    return [
        group("nanotron's grid", "model", f"{saw} of the other model", grid.steps(models)),
        group(
            "nanotron's grid, nodes left out", "setting", f"{saw} on other nodes", grid.steps(nodes)
        ),
        group("nanotron's grid, memory", "model", saw, grid.memory(models), "GiB"),
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
        group(
            "Models cut to fit 8 B200, allocated",
            "all",
            FORMULAS,
            of_cut(Prepared.allocated),
            "GiB",
        ),
        group(
            "MLPerf, peak of allocated memory",
            "all",
            FORMULAS,
            compare_all(audited, Prepared.allocated),
            "GiB",
        ),
        group(
            "Models cut to fit 8 B200, reserved", "all", typical, of_cut(Prepared.reserved), "GiB"
        ),
        group("Llama under torchtitan, reserved", "all", typical, titan, "GiB"),
    ]


def other_software(folder: Path) -> list[Group]:
    """Runs by the constants of another framework than theirs, in the interval of an answer about a
    framework that nobody measured.
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
        group(
            "MPT under FSDP by Megatron Core's constants",
            "framework",
            TODAY,
            _by_framework(fsdp, "megatron-core"),
        ),
        group(
            "Dense pre-training on H100 in fp8 by FSDP's constants",
            "framework",
            "ops/, MPT under llm-foundry",
            _by_framework(dense, "torch-fsdp"),
        ),
        group(
            "nanotron's grid by Megatron Core's constants",
            "framework",
            TODAY,
            [dataclasses.replace(row, low=None, high=None) for row in grid.steps(cells)],
        ),
        group(
            "BLOOM's topology search, asked as Megatron Core",
            "framework",
            OPS,
            _by_framework(bloom_cases(folder), "megatron-core"),
        ),
        group("Primus' schedules against 1F1B", "framework", TODAY, _schedules(folder), "ratio"),
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
        group(
            "arXiv 2104.04473, table 1", "seen", OPS, of("2104.04473", "a100-sxm-80gb"), "TFLOP/s"
        ),
        group(
            "arXiv 2205.05198, time of a layer that is recomputed",
            "seen",
            OPS,
            ranges,
            "over a layer without",
        ),
        group(
            "arXiv 1909.08053, GPT-2 on V100",
            "seen",
            OPS,
            of("1909.08053", "v100-sxm-32gb"),
            "PFLOP/s, %, TFLOP/s",
        ),
        group(
            "Megatron-LM's README on H100, by our layout",
            "seen",
            TODAY,
            of("README, H100", "h100-sxm-80gb"),
            "% MFU",
        ),
        group(
            "arXiv 2407.21783, Llama 3.1 405B by its recipe",
            "seen",
            "ops/, MPT under llm-foundry",
            of("2407.21783", "h100-sxm-80gb"),
            "TFLOP/s",
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
    return kv_cache.groups(folder) + [
        group(f"Serving: {words}", "setting", saw, inference.comparisons(pairs, what), unit)
        for what, words, unit in (
            ("tpot", "time per output token", "s"),
            ("throughput", "tokens/s of a GPU", "1/s"),
            ("ttft", "time to first token, below the cache's limit", "s"),
        )
    ]


def _by_framework(cases: Iterable[Case], name: str) -> list[Comparison]:
    """Return the cases by the constants of another framework, as of one that nobody measured."""

    def compare(run: Prepared) -> Comparison:
        constants = efficiency(gpu=run.gpu, framework=name)
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
