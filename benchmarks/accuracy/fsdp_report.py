"""Sections of the report on runs under FSDP."""

from __future__ import annotations

from pathlib import Path

from benchmarks.accuracy.fit_fsdp import across_gpus, leave_one_model_out, mpt_runs
from benchmarks.accuracy.sections import Section
from hp_tool.catalog import gpu
from hp_tool.catalog.efficiency import efficiency

KERNELS = "ops/ and the MPT runs of the other"


def sections(folder: Path) -> list[Section]:
    """MPT on A100: each run by constants that never saw its model, and by constants that never saw its GPU."""
    runs = mpt_runs(folder)
    if not runs:
        return []
    constants = efficiency(gpu=gpu("a100-sxm-80gb"), framework="torch-fsdp").framework
    return [
        Section(
            title="MPT under FSDP on A100, leaving one model out (s)", role="headline", comparisons=leave_one_model_out(runs),
            fitted_on=f"{KERNELS} eight models", stated_log_sd=constants.time_log_sd,
        ),
        Section(
            title="MPT under FSDP on A100, leaving one GPU out (s)", role="headline", comparisons=across_gpus(runs),
            fitted_on=f"{KERNELS} GPU (40 and 80 GB)", stated_log_sd=constants.time_log_sd,
        ),
    ]  # fmt: skip
