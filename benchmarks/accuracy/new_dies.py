"""Trainings on dies that came after those the constants were fitted on: B300, and MI355X of CDNA
4.
"""

from __future__ import annotations

from pathlib import Path

from benchmarks.accuracy.groups import TODAY, Group
from benchmarks.accuracy.prepared import Prepared, compare_all
from benchmarks.accuracy.runs import cdna4_cases, gb300_cases


def new_dies(folder: Path) -> list[Group]:
    """Predictions by the constants of the die before, and B300's by kernels timed on it. LoRA is
    with the other fine-tuning.
    """
    cases = [case for case in gb300_cases(folder) if case.task != "lora"]
    return [
        Group(
            title="Recipes on GB300",
            left_out="GPU",
            saw=f"{TODAY}; kernels of B300",
            rows=compare_all(cases, Prepared.shipped),
        ),
        Group(
            title="Llama 3.1 8B of MLPerf on MI355X",
            left_out="GPU",
            saw=f"{TODAY}; LoRA on MI300X and MI325X",
            rows=compare_all(cdna4_cases(folder), Prepared.shipped),
        ),
    ]
