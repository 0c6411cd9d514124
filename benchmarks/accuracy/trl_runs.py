"""Hugging Face TRL's runs at a million tokens as cases: FSDP 2 with context parallelism, by
attention kernel.
"""

from __future__ import annotations

from pathlib import Path

from benchmarks.accuracy.data import Row, read
from benchmarks.accuracy.heldout import Case
from hp_tool.domain.hardware import ClusterQuery
from hp_tool.domain.parallel import ParallelQuery
from hp_tool.domain.query import Query
from hp_tool.domain.workload import TrainingWorkload

KERNELS = {"cudnn": "cudnn", "flash-attention-2": "fa2"}


def trl_cases(folder: Path) -> list[Case]:
    """A case for each row: one sequence over all GPUs, every layer recomputed from its input, which
    waits on the host.
    """
    return [_case(row) for row in read(folder, "training_trl_long.csv")]


def _case(row: Row) -> Case:
    kernel, gpus, sequence = (
        row["attention_kernel"].split()[0],
        int(row["gpus"]),
        int(row["seq_tokens"]),
    )
    query = Query(
        kind="training",
        model=row["model"],
        cluster=ClusterQuery(gpu="h100-sxm-80gb", num_gpus=gpus),
        training=TrainingWorkload(
            sequence_length=sequence,
            global_batch_size=1,
            framework="torch-fsdp",
            task="sft",
            cross_entropy="chunked",
            offload="activations",
            attention_kernel=KERNELS[kernel],  # type: ignore[arg-type]
        ),
        parallel=ParallelQuery(
            context_parallel_size=gpus, micro_batch_size=int(row["mbs"]), recompute="full"
        ),
    )
    what = f"H100 x{gpus}, s {sequence}, CP {gpus}, {kernel}"
    return Case(
        name=row["model"],
        what=what,
        query=query,
        step_s=float(row["step_s"]),
        source="TRL",
        date="2026-08",
    )
