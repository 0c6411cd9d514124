"""Sections of the report on runs under FSDP."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

from benchmarks.accuracy.data import Row, read
from benchmarks.accuracy.fit_fsdp import Prepared, across_gpus, leave_one_model_out, mpt_runs
from benchmarks.accuracy.fsdp_memory import reserved
from benchmarks.accuracy.fsdp_runs import titan_cases
from benchmarks.accuracy.sections import Section
from hp_tool.catalog import gpu
from hp_tool.catalog.efficiency import efficiency

KERNELS = "ops/ and the MPT runs of the other"


def sections(folder: Path) -> list[Section]:
    """MPT on A100 and H100: each run by constants that never saw its model, and by constants that never saw its GPU; other
    models under other FSDP software by the shipped constants.
    """
    runs = mpt_runs(folder)
    if not runs:
        return []
    constants = efficiency(gpu=gpu("a100-sxm-80gb"), framework="torch-fsdp").framework
    on_h100 = [run for run in runs if run.gpu.silicon == "h100"]
    return [
        Section(
            title="MPT under FSDP on A100 and H100, leaving one model out (s)", role="headline",
            comparisons=leave_one_model_out(runs), fitted_on=f"{KERNELS} eight models", stated_log_sd=constants.time_log_sd,
        ),
        Section(
            title="MPT under FSDP on H100, leaving one size out (s)", role="headline", stated_log_sd=constants.time_log_sd,
            comparisons=leave_one_model_out(runs, of=on_h100), fitted_on=f"{KERNELS} sizes, on A100 too",
        ),
        Section(
            title="MPT under FSDP on A100 and H100, leaving one GPU out (s)", role="headline", comparisons=across_gpus(runs),
            fitted_on=f"{KERNELS} GPUs (A100 of 40 and 80 GB, H100)", stated_log_sd=constants.time_log_sd,
        ),
        Section(
            title="Llama under FSDP on A100, eager torchtitan (s)", role="headline", fitted_on=constants.fitted_on,
            comparisons=[prepared.compare(constants) for prepared in map(Prepared.of, titan_cases(folder)[0])],
            stated_log_sd=constants.time_log_sd,
        ),
        Section(
            title="Llama under FSDP on H100 of 96 GB, reserved (GiB)", role="held out", comparisons=reserved(folder),
            fitted_on="nothing: formulas, and a typical 1 GiB and 3 % for the driver and the allocator",
            stated_log_sd=constants.reserved_log_sd, stated_log_sd_below=constants.memory_log_sd,
        ),
    ]  # fmt: skip


def left_out(folder: Path) -> dict[str, int]:
    """How many published rows no query can state, by what is missing."""
    step_times = Counter(f"step time: {row.why}" for row in titan_cases(folder)[1])
    memory = Counter(f"peak memory: {_missing(row)}" for row in read(folder, "memory_measured.csv") if _missing(row))
    return dict(step_times + memory)


def _missing(row: Row) -> str | None:
    """What a row of peak memory does not say. Those of torchtitan stand in its own file too, and are predicted from there."""
    if row["zero"].startswith("FSDP"):
        return None if row["recompute"] == "full" else f"recomputation of {row['recompute']}"
    return "heads, vocabulary and MLP width of the model"
