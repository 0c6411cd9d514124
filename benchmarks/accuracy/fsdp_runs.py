"""Published FSDP runs as cases: MosaicML's MPT on A100."""

from __future__ import annotations

from pathlib import Path

from benchmarks.accuracy.data import Row, read
from benchmarks.accuracy.heldout import Case
from hp_tool.domain.hardware import ClusterQuery
from hp_tool.domain.parallel import ParallelQuery
from hp_tool.domain.query import Query
from hp_tool.domain.workload import TrainingWorkload

GPUS_MPT = {"a100_40gb": "a100-sxm-40gb", "a100_80gb": "a100-sxm-80gb"}


def mpt_cases(folder: Path) -> list[Case]:
    """MPT of 125M to 70B under llm-foundry: FULL_SHARD over all GPUs, gradients reduced in 16 bits (mixed_precision PURE),
    the loss in flash-attn's fused kernel, whole layers recomputed or nothing.
    """
    return [_mpt(row) for row in read(folder, "training_llm_foundry_fsdp.csv")]


def _mpt(row: Row) -> Case:
    gpu, gpus, batch, sequence = GPUS_MPT[row["gpu"]], int(row["gpus"]), int(row["gbs"]), int(row["seq"])
    recompute = "full" if row["activation_ckpt"] == "True" else "none"
    query = Query(
        kind="training", model=row["model"],
        cluster=ClusterQuery(gpu=gpu, num_gpus=gpus),
        training=TrainingWorkload(
            sequence_length=sequence, global_batch_size=batch, framework="torch-fsdp", gradient_precision="bf16",
            cross_entropy="fused",
        ),
        parallel=ParallelQuery(
            micro_batch_size=int(row["mbs"]), recompute=recompute, zero_stage=3  # type: ignore[arg-type]
        ),
    )  # fmt: skip
    return Case(
        name=row["model"],
        what=f"{gpu[5:].upper()} x{gpus}, s {sequence}, mbs {row['mbs']}, {recompute}, GBS {batch}",
        query=query,
        step_s=batch * sequence / float(row["tokens_per_s"]),
    )
