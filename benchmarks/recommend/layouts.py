"""Layouts that experts chose: NVIDIA's recipes, MLPerf submissions, Llama 3's pre-training."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from benchmarks.accuracy.data import rows
from benchmarks.accuracy.headlines import query_of, specifications
from benchmarks.accuracy.runs import mlperf_cases
from evidence.cases import Case, as_training_row, is_known, training_case
from evidence.table import Row
from hp_tool.domain.hardware import ClusterQuery
from hp_tool.domain.parallel import ParallelQuery
from hp_tool.domain.query import Query
from hp_tool.domain.workload import TrainingWorkload

TABLE = "recipes_nvidia"
RELEASE = "26.06.00"
"""Assumed release, which the table does not contain."""
PRECISIONS = ("bf16", "nvfp4", "fp8_cs", "fp8_sc", "fp8_mx")


def expert_cases(folder: Path) -> tuple[list[Case], int]:
    """Return each published layout once, and the number of rows that cannot be used."""
    listed = rows(folder, TABLE)
    known = [row for row in listed if _is_known(row)]
    recipes = [
        training_case({**as_training_row(row), "framework_version": RELEASE, "table": TABLE})
        for row in known
    ]
    cases: dict[object, Case] = {}
    for case in (*recipes, *mlperf_cases(folder), *llama_cases()):
        training, parallel = case.query.training, case.query.parallel
        assert training is not None
        key = (
            case.name,
            case.query.cluster,
            training.precision,
            training.global_batch_size,
            parallel,
        )
        cases.setdefault(str(key), case)
    return list(cases.values()), len(listed) - len(known)


def llama_cases() -> list[Case]:
    """Return the three stages of Llama 3.1 405B's pre-training.

    Section 3.3.2 of the paper states that the schedule is interleaved, but not the number of
    chunks, and that FSDP shards optimizer states and gradients. Both ZeRO stages with this property
    are left open. Gradients are reduced by runs of micro-batches, because Megatron FSDP's reduction
    in each micro-batch would take a third of the step.
    """
    stages = [query_of(each) for each in specifications() if "2407.21783" in each["source"]]
    return [_llama_case(stage["cluster"]["num_gpus"], **stage) for stage in stages]


def _llama_case(
    gpus: int, *, training: dict[str, Any], parallel: dict[str, Any], **_: object
) -> Case:
    context = parallel["context_parallel_size"]
    return Case(
        name="llama-3.1-405b",
        what=f"Llama 3's paper, {gpus:,} GPUs{', long' if context > 1 else ''}",
        query=Query(
            kind="training",
            model="llama-3.1-405b",
            cluster=ClusterQuery(gpu="h100-sxm-80gb", num_gpus=gpus),
            training=TrainingWorkload(
                sequence_length=training["sequence_length"],
                global_batch_size=training["global_batch_size"],
                gradient_reduction="run",
            ),
            parallel=ParallelQuery(
                context_parallel_size=context,
                zero_stage=(1, 2),
                context_parallel_communication="all_gather",
                recompute="none",
                tensor_parallel_size=parallel["tensor_parallel_size"],
                pipeline_parallel_size=parallel["pipeline_parallel_size"],
                micro_batch_size=parallel["micro_batch_size"],
            ),
        ),
        source="Llama 3",
    )


def _is_known(row: Row) -> bool:
    return row["sequence_length"] is not None and is_known(row) and row["precision"] in PRECISIONS
