"""Write the profiles of PyTorch trainers: `python -m evidence.fit --only trainers`.

The constants are those of torch-fsdp on A100, which were fitted without any run of a trainer,
except where the trainer's code determines them. Elementwise operations move the bytes that eager
kernels move (`cost.block`), so their factor is 1. The optimizer step passes over memory as torch's
foreach or fused Adam does. The host takes `host_launch_s` for each launch. No time constant is
fitted. The runs determine the scatter and the memory that the allocator reserves. A trainer with
enough runs has a separate scatter; for every other trainer it is that of all trainers, each with
the same weight. A row is used if its source states what the figure depends on: exact lengths for a
time, the longest length for memory.
"""

from __future__ import annotations

import dataclasses
import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Literal

import numpy as np

from benchmarks.accuracy.comparison import Comparison
from benchmarks.accuracy.data import rows as rows_of
from benchmarks.accuracy.fitting import conformal_sd, fit_settings, framework_file, weighted_sd
from benchmarks.accuracy.groups import Rows
from benchmarks.accuracy.prepared import Prepared
from evidence.cases import Case, missing_fields, training_case, with_training
from evidence.fitted_file import FittedFile
from evidence.table import Row, other_values
from hp_tool.catalog import gpu
from hp_tool.catalog.efficiency import efficiency_profile, gpu_efficiency, prediction_doubts
from hp_tool.domain.efficiency import FrameworkEfficiency
from hp_tool.domain.units import GIB
from hp_tool.errors import HpToolError

COMMAND = "python -m evidence.fit --only trainers"
GIVEN = fit_settings("trainers")
OPTIMIZERS: Mapping[str, float] = GIVEN["optimizers"]
"""Number of passes over memory of the optimizer step, by trainer."""


def rows_of_trainer(rows: Sequence[Comparison], name: str) -> list[Comparison]:
    """Return the rows of one trainer."""
    return [row for row in rows if row.part.startswith(f"{name} ")]


def scatter(rows: Sequence[Comparison], name: str, *, known: float = 0.0) -> float:
    """Return the standard deviation of ln(published / predicted) of a trainer, without the part of
    the variance that is already known. If the trainer has few rows, return that of all trainers,
    each with the same weight.
    """
    logs: dict[str, list[float]] = defaultdict(list)
    for row in rows:
        logs[row.part.partition(" ")[0]].append(row.log_ratio)
    enough = len(logs.get(name, [])) >= GIVEN["enough_rows"]
    sd = (
        conformal_sd(np.array(logs[name]))
        if enough
        else weighted_sd([np.array(each) for each in logs.values()])
    )
    return float(f"{math.sqrt(max(sd**2 - known, 0.0)):.2g}")


def is_untimed(row: Row) -> bool:
    """Return whether the row is of granite's MoE model, whose 40 experts run in a loop or by
    ScatterMoE. Its lengths are derived, so it is used only for the scatter of such kernels and not
    for the error of step times.
    """
    return str(row["model"]).startswith("granite") and math.isfinite(row["step_s"] or math.nan)


def untimed_scatter(folder: Path) -> float:
    """Return the root mean square of ln(published / predicted) of expert kernels without isolated
    timings; each kernel has the same weight.
    """
    logs: dict[str, list[float]] = defaultdict(list)
    for row, run in prepare_rows(folder, is_untimed):
        kernel: Literal["grouped", "loop"] = (
            "grouped" if other_values(row).get("scattermoe") == "1" else "loop"
        )
        asked = Prepared.from_case(with_training(run.case, expert_kernel=kernel))
        logs[kernel].append(asked.shipped().log_ratio)
    squares = [float(np.mean(np.square(each))) for each in logs.values()]
    return float(f"{math.sqrt(np.mean(squares)):.2g}") if squares else 0.0


def fragmentation(folder: Path, name: str) -> float | None:
    """Return the median of reserved / allocated memory - 1 of the runs that publish both; None if
    there are few runs.

    Memory in use according to the device includes the CUDA context, which is outside the allocator.
    """
    context = gpu_efficiency(gpu("a100-sxm-80gb")).context_bytes
    held = [
        (row["used_bytes"] - context) / row["allocated_bytes"] - 1.0
        for table in TABLES
        for row in rows_of(folder, table)
        if row["framework"] == name and row["allocated_bytes"] and row["used_bytes"]
    ]
    return float(f"{np.median(held):.2g}") if len(held) >= GIVEN["enough_rows"] else None


def inherited_constants(name: str) -> FrameworkEfficiency:
    """Return a trainer's constants without a separate scatter: torch-fsdp's on A100, changed where
    the trainer's code determines them.
    """
    base = efficiency_profile(gpu=gpu("a100-sxm-80gb"), framework="torch-fsdp").framework
    return dataclasses.replace(
        base,
        framework=name,
        elementwise_traffic_factor=1.0,
        narrow_traffic_factor=None,
        tuning_log_sd=0.0,
        tuning_memory_log_sd=0.0,
        attention_kernels={},
        host_launch_s=GIVEN["host_launch_s"],
        optimizer_traffic_factor=OPTIMIZERS[name],
        earlier_expert_time_log_sd=None,
    )


def fitted(folder: Path) -> Iterator[FittedFile]:
    steps, mixtures = (step_times(folder, experts=each) for each in (False, True))
    memory = peaks(folder, experts=False)
    untimed = untimed_scatter(folder)
    of_adapters = prediction_doubts().lora_log_sd ** 2
    for name in OPTIMIZERS:
        time, base = scatter(steps, name), inherited_constants(name)
        held = fragmentation(folder, name)
        profile = dataclasses.replace(
            base,
            fragmentation_fraction=base.fragmentation_fraction if held is None else held,
            time_log_sd=time,
            expert_time_log_sd=scatter(mixtures, "all", known=time**2 + of_adapters),
            pair_log_sd=time,
            expert_pair_log_sd=time,
            memory_log_sd=scatter(memory, name),
            untimed_expert_log_sd=untimed,
            fitted_on=f"torch-fsdp on A100 and counts of eager kernels; scatter of "
            f"{len(rows_of_trainer(steps, name))} step times and "
            f"{len(rows_of_trainer(memory, name))} peaks of its own by "
            f"{COMMAND}, of all trainers where these are fewer than {GIVEN['enough_rows']}",
        )
        yield framework_file("default", profile, keeps=())


BARE_FSDP = "torch-fsdp"
TABLES = ("trainer_fms_a100", "trainer_small_tables", "trainer_ms_swift")


def is_loop(row: Row) -> bool:
    """Return whether the trainer runs the experts of the row's model one after the other."""
    return str(row["model"]).startswith(tuple(GIVEN["mixtures"]))


def states_exact_lengths(row: Row) -> bool:
    """Return whether the source states the exact lengths behind the row's step time."""
    facts = other_values(row)
    if row["table"] == "trainer_fms_a100":
        return facts.get("packing") == "1" and facts.get("no_peft_model") != "1"
    if row["table"] == "trainer_ms_swift":
        return False
    # Two servers without a named network; one row without packing.
    unclear = facts.get("sample_packing") == "0" or (
        row["framework"] == "deepspeed" and row["num_gpus"] == 4
    )
    return row["run"] in GIVEN["exact_lengths"] and not unclear


def counts_memory(row: Row) -> bool:
    """Return whether a query can describe all settings that the row's memory depends on."""
    facts = other_values(row)
    if row["table"] == "trainer_fms_a100":
        return facts.get("packing") == "1" and facts.get("no_peft_model") != "1"
    fused_into_backward = "fused into backward" in facts.get("optimizer", "")
    # The optimizer is paged; recomputation on the larger GPU is not stated.
    paged = row["run"] == "torchtune README, models" and (
        row["task"] == "sft" or row["gpu"] == "rtx-a6000-48gb"
    )
    eager_lengths = facts.get("sample_packing") == "0"
    return not (
        row["table"] == "trainer_ms_swift"
        or fused_into_backward
        or "8-bit" in facts.get("optimizer", "")
        or facts.get("cpu_offload") == "1"
        or paged
        or eager_lengths
        or row["task"] not in ("sft", "lora", "pretrain")
        or row["run"] in ("litgpt LoRA tutorial", "torchao optimizers")
    )


def prepare_rows(
    folder: Path, wanted: Callable[[Row], bool], framework: str | None = None
) -> Iterable[tuple[Row, Prepared]]:
    """Yield the rows of all tables that ran, satisfy `wanted`, and can be written as a query. If
    `framework` is set, it replaces the trainer.
    """
    for table in TABLES:
        for row in rows_of(folder, table):
            if row["status"] == "failed" or not wanted(row) or missing_fields(row):
                continue
            try:
                yield row, Prepared.from_case(with_framework(training_case(row), framework))
            except HpToolError:
                continue


def with_framework(case: Case, framework: str | None) -> Case:
    """Return the case as a run of `framework`, without a release."""
    if framework is None:
        return case
    assert case.query.training is not None
    training = dataclasses.replace(case.query.training, framework=framework, framework_version=None)
    return dataclasses.replace(case, query=dataclasses.replace(case.query, training=training))


def by_bare_fsdp(folder: Path) -> tuple[list[Comparison], list[Comparison]]:
    """Return step times and peak memory of fine-tuning under FSDP, predicted by the constants of
    torch-fsdp, which were fitted to pre-training only. They count for no familiarity class, because
    the trainers' rows do.
    """

    def tuned(row: Row) -> bool:
        return row["framework"] != "deepspeed" and row["task"] != "pretrain" and not is_loop(row)

    def compared(
        wanted: Callable[[Row], bool], compare: Callable[[Prepared], Comparison | None]
    ) -> list[Comparison]:
        runs = prepare_rows(folder, lambda row: tuned(row) and wanted(row), BARE_FSDP)
        found = ((row, compare(run)) for row, run in runs)
        return [
            dataclasses.replace(_without_settings(each, row), differs=None)
            for row, each in found
            if each is not None
        ]

    return compared(states_exact_lengths, _timed), compared(counts_memory, peak)


def _timed(run: Prepared) -> Comparison | None:
    return run.shipped() if math.isfinite(run.case.step_s) else None


def _without_settings(comparison: Comparison, row: Row) -> Comparison:
    """Return the row as a separate vote, because rows differ in settings that a query cannot
    describe.
    """
    where = f"{row['run'] or ''} {row['frozen_precision'] or row['parameter_precision'] or ''}"
    return dataclasses.replace(
        comparison,
        part=f"{row['framework']} {row['task']}",
        what=f"{comparison.what}, {row['cross_entropy'] or 'loss open'}, {where}".strip(),
        setting="",
    )


def step_times(folder: Path, *, experts: bool) -> list[Comparison]:
    """Return the step times of MoE models, or of all other models."""
    found = (
        (row, _timed(run))
        for row, run in prepare_rows(folder, states_exact_lengths)
        if is_loop(row) == experts
    )
    return [_without_settings(each, row) for row, each in found if each is not None]


def peak(run: Prepared) -> Comparison | None:
    """Return the published peak memory: allocated, reserved, or in use according to the device."""
    case: Case = run.case
    if case.allocated_bytes:
        return run.allocated()
    if case.reserved_bytes:
        return run.reserved()
    if not case.used_bytes:
        return None
    memory, intervals = run.estimate.memory, run.estimate.intervals
    assert memory is not None and intervals is not None
    low, high = intervals.memory_total_bytes
    row = dataclasses.replace(case, allocated_bytes=case.used_bytes)
    return dataclasses.replace(
        dataclasses.replace(run, case=row).allocated(),
        predicted=memory.total_bytes / GIB,
        low=low / GIB,
        high=high / GIB,
    )


def peaks(folder: Path, *, experts: bool) -> list[Comparison]:
    """Return the peak memory in GiB of MoE models, or of all other models."""
    found = []
    for row, run in prepare_rows(folder, counts_memory):
        compared = peak(run) if is_loop(row) == experts else None
        if compared is not None:
            found.append(_without_settings(compared, row))
    return found


def by_title(folder: Path) -> Rows:
    """Return the rows by the title of their group in the ledger."""
    steps, memory = by_bare_fsdp(folder)
    return {
        f"Trainers, {what}{', MoE models' if experts else ''}": rows(folder, experts=experts)
        for what, rows in (("step time", step_times), ("peak memory", peaks))
        for experts in (False, True)
    } | {
        "Fine-tuning predicted as torch-fsdp, step time": steps,
        "Fine-tuning predicted as torch-fsdp, peak memory": memory,
    }
