"""Published runs that are for checking only: BLOOM's topology search and Primus' pipeline
schedules. No constant sees them.
"""

from __future__ import annotations

import dataclasses
from pathlib import Path

from benchmarks.accuracy.data import Row, read
from benchmarks.accuracy.heldout import Case, layout
from hp_tool.catalog import model
from hp_tool.domain.hardware import ClusterQuery
from hp_tool.domain.query import Query
from hp_tool.domain.workload import TrainingWorkload

OMNI_PATH_BYTES_PER_SECOND = 4 * 12.5e9 / 8
"""A GPU's share of Jean Zay's four 100 Gb/s ports a node."""
SCHEDULES = {
    "1f1b": None,
    "1f1b-interleaved": None,
    "zbv": "zbv",
    "zbv-formatted": "zbv",
    "zero-bubble": "zb-h1",
}
"""Primus' names of schedules that a query can ask for; its zbb (twice ZB-H1's memory), v-half and
v-min cannot be.
"""
MICRO_BATCHES_A_STAGE = 4
"""Not told: a common choice. Ratios of schedules depend on it, and nothing is fitted to them."""


def bloom_cases(folder: Path) -> list[Case]:
    """177B to 205B models on A100 under Megatron-DeepSpeed of February 2022, everything recomputed;
    asked as Megatron Core.
    """
    return [_bloom(row) for row in read(folder, "grid_a100_bloom.csv")]


def _bloom(row: Row) -> Case:
    shape = dataclasses.replace(
        model("bloom-176b"),
        name=row["nominal_size"],
        num_hidden_layers=int(row["layers"]),
        hidden_size=int(row["hidden"]),
        num_attention_heads=int(row["heads"]),
        num_key_value_heads=None,
        head_dim=None,
        intermediate_size=int(row["ffn"]),
    )
    query = Query(
        kind="training",
        model=shape,
        cluster=ClusterQuery(
            gpu="a100-sxm-80gb",
            num_gpus=int(row["gpus"]),
            inter_node_bandwidth_bytes_per_second=OMNI_PATH_BYTES_PER_SECOND,
        ),
        training=TrainingWorkload(
            sequence_length=int(row["seq_tokens"]),
            global_batch_size=int(row["gbs"]),
            precision=row["precision"],  # type: ignore[arg-type]
            attention="unfused",
            gradient_precision=row["precision"],  # type: ignore[arg-type]
        ),
        parallel=layout(
            row,
            "tp",
            "pp",
            "mbs",
            sequence_parallel=False,
            recompute="full",
            zero_stage=int(row["zero"]),
        ),
    )
    what = (
        f"x{row['gpus']}, {row['layers']} x {row['hidden']}, {row['heads']} heads, PP "
        f"{row['pp']}, mbs {row['mbs']}"
    )
    return Case(
        name=row["nominal_size"],
        what=f"{what}, GBS {row['gbs']}",
        query=query,
        step_s=float(row["step_s"]),
        source="BLOOM's topology search",
        date=row["date"][:7],
    )


def schedule_cases(folder: Path) -> list[tuple[Case, Case]]:
    """(1F1B, another schedule) of a model on a card, each with seconds that a token takes a GPU:
    the ratio is the figure.
    """
    rows = [
        row
        for row in read(folder, "schedules_primus.csv")
        if row["tokens_s_gpu"] and row["schedule"] in SCHEDULES
    ]
    base = {row["model"]: _schedule(row) for row in rows if row["schedule"] == "1f1b"}
    return [(base[row["model"]], _schedule(row)) for row in rows if row["schedule"] != "1f1b"]


def _schedule(row: Row) -> Case:
    p, gpus = int(row["pp"]), int(row["gpus"])
    query = Query(
        kind="training",
        model=row["model"],
        cluster=ClusterQuery(gpu=row["gpu"].lower(), num_gpus=gpus),
        training=TrainingWorkload(
            sequence_length=4096,
            global_batch_size=MICRO_BATCHES_A_STAGE * p * (gpus // p),
            cross_entropy="fused",
        ),
        parallel=layout(
            row, "pp", "vp", "ep", micro_batch_size=1, pipeline_schedule=SCHEDULES[row["schedule"]]
        ),
    )
    return Case(
        name=row["model"],
        what=f"{row['gpu']} x{gpus}, PP {p}, VP {row['vp']}, {row['schedule']}",
        query=query,
        step_s=1.0 / float(row["tokens_s_gpu"]),
        source="Primus' schedules",
        date="2026-01",
    )
