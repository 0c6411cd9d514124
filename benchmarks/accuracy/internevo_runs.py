"""Published runs of InternEvo as cases: step times of InternLM-7B on A100, and memory of 7B and 20B
on A800.
"""

from __future__ import annotations

from pathlib import Path

from benchmarks.accuracy.data import Row, read
from benchmarks.accuracy.heldout import Case, layout
from hp_tool.domain.hardware import ClusterQuery
from hp_tool.domain.model import ModelSpec
from hp_tool.domain.query import Query
from hp_tool.domain.units import GIB
from hp_tool.domain.workload import TrainingWorkload

FILE = "training_internevo.csv"
GPUS = {"A100-SXM-80GB": "a100-sxm-80gb", "A800": "a800-sxm-80gb"}


def internevo_cases(folder: Path) -> list[Case]:
    """Step times; of packed rows that repeat an unpacked figure the latter alone. Samples share a
    row or not: attention sees 2,048 tokens, as the recomputed rows of eight samples show, whose
    step would be a third longer.
    """
    rows = [
        row
        for row in read(folder, FILE)
        if row["step_s"] and row["figure_also_printed_unpacked"] != "1"
    ]
    return [
        Case(
            name=row["model"],
            what=_what(row),
            query=_query(row),
            step_s=float(row["step_s"]),
            source="InternEvo",
        )
        for row in rows
    ]


def memory_cases(folder: Path) -> list[Case]:
    """Memory in use of runs on a few GPUs, without their step times. It counts what the allocator
    caches: with three stages that is all of the device.
    """
    rows = [row for row in read(folder, FILE) if row["memory_gb"]]
    return [
        Case(
            name=row["model"],
            what=_what(row),
            query=_query(row),
            used_bytes=float(row["memory_gb"]) * GIB,
            source="InternEvo",
        )
        for row in rows
    ]


def _what(row: Row) -> str:
    shard = f", ZeRO {row['zero']}" + (
        f" over {row['optimizer_shard_gpus']}" if row["optimizer_shard_gpus"] else ""
    )
    packed = ", one sample" if row["packed_into_one_sample"] == "1" else ""
    sizes = f"TP {row['tp']}, PP {row['pp']}, mbs {row['mbs']}"
    return (
        f"{row['gpu'][:4]} x{row['gpus']}{shard}, {sizes}, {row['recompute']}{packed}, GBS "
        f"{row['gbs']}"
    )


def _query(row: Row) -> Query:
    gpus, replicas, shard = int(row["gpus"]), int(row["dp"]), int(row["optimizer_shard_gpus"] or 0)
    shape = ModelSpec(
        name=row["model"],
        num_hidden_layers=int(row["layers"]),
        hidden_size=int(row["hidden"]),
        num_attention_heads=int(row["heads"]),
        intermediate_size=int(row["ffn"]),
        gated_mlp=True,
        normalization="rmsnorm",
        vocab_size=int(row["vocab"]),
        tie_word_embeddings=False,
    )
    return Query(
        kind="training",
        model=shape,
        cluster=ClusterQuery(
            gpu=GPUS[row["gpu"]], num_gpus=gpus, gpus_per_node=min(int(row["gpus_per_node"]), gpus)
        ),
        training=TrainingWorkload(
            sequence_length=int(row["seq_tokens"]),
            global_batch_size=int(row["gbs"]),
            framework="internevo",
        ),
        parallel=layout(
            row,
            "tp",
            "pp",
            "mbs",
            sequence_parallel=row["sp"] == "1",
            recompute=row["recompute"],
            zero_stage=int(row["zero"]),
            data_parallel_shard_size=shard if shard < replicas else 0,
        ),
    )
