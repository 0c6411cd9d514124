"""Published training runs as queries, one row a configuration; the report says which constants saw
which of them.
"""

from __future__ import annotations

import dataclasses
import math
from collections import defaultdict
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.accuracy.data import Row, read
from hp_tool.catalog import gpu, model
from hp_tool.domain.hardware import ClusterQuery, Precision
from hp_tool.domain.model import ModelSpec
from hp_tool.domain.parallel import ParallelQuery
from hp_tool.domain.query import Query
from hp_tool.domain.units import GIB
from hp_tool.domain.workload import OverlapSpec, TrainingWorkload
from hp_tool.questions.training.problem import named_model

SYSTEMS_2020 = {"DGX-2 V100": ("v100-sxm-32gb", 16), "DGX-A100": ("a100-sxm-40gb", 8)}
SYSTEMS_BRIDGE = {"DGX-H100": "h100-sxm-80gb", "DGX-B200": "b200-sxm-180gb"}
MODELS_B200 = {"llama3-70b": "llama-3-70b", "deepseekv2": "deepseek-v2"}
NO_OVERLAP = OverlapSpec(
    tensor_parallel=False,
    context_parallel=False,
    expert_parallel=False,
    pipeline_parallel=False,
    data_parallel=False,
)
MODELS_BRIDGE = {
    "LLAMA2-7B": "llama-2-7b",
    "LLAMA2-13B": "llama-2-13b",
    "LLAMA2-70B": "llama-2-70b",
    "LLAMA3-8B": "llama-3-8b",
    "LLAMA3_8B": "llama-3-8b",
    "LLAMA3-70B": "llama-3-70b",
    "LLAMA3_70B": "llama-3-70b",
    "LLAMA3.1_405B": "llama-3.1-405b",
    "GPT3-5B": "gpt3-5b",
    "GPT3-20B": "gpt3-20b",
    "GPT3-175B": "gpt3-175b",
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Case:
    """A published run as a query, and the seconds its step took."""

    name: str
    what: str
    query: Query
    step_s: float = math.nan
    """Not a number where memory alone was published."""
    allocated_bytes: float | None = None
    """Peak of what is in use within the allocator."""
    reserved_bytes: float | None = None
    """Peak of what the allocator holds."""
    used_bytes: float | None = None
    """What the allocator holds, or the whole device."""
    source: str = ""
    date: str = ""
    """Year and month that the figure, or the release that it belongs to, came out: 2025-09."""

    def __hash__(self) -> int:
        return hash((self.source, self.name, self.what))  # a GPU of its own in a query has dicts

    @property
    def layout(self) -> str:
        """Model and sizes without the batch: rows that are not independent of each other."""
        return f"{self.name} {self.what.rpartition(',')[0]}"

    @property
    def card(self) -> str:
        """The GPU as the query names it."""
        return str(self.cluster.gpu)

    @property
    def cluster(self) -> ClusterQuery:
        assert isinstance(self.query.cluster, ClusterQuery)
        return self.query.cluster

    @property
    def die(self) -> str:
        return str(gpu(self.card).silicon)

    @property
    def has_experts(self) -> bool:
        return named_model(self.query.model).num_experts is not None

    @property
    def release(self) -> str:
        """The framework's release that it ran under; empty where none is known."""
        assert self.query.training is not None
        return self.query.training.framework_version or ""

    @property
    def task(self) -> str:
        assert self.query.training is not None
        return self.query.training.task

    @property
    def setting(self) -> str:
        """What was asked, without the release and who ran it: rows that agree in it are one
        vote.
        """
        assert self.query.training is not None
        training = dataclasses.replace(self.query.training, framework_version=None)
        return repr(dataclasses.replace(self.query, training=training))


LAYOUT = {
    "tp": "tensor_parallel_size",
    "pp": "pipeline_parallel_size",
    "vp": "virtual_pipeline_parallel_size",
    "cp": "context_parallel_size",
    "ep": "expert_parallel_size",
    "etp": "expert_tensor_parallel_size",
    "mbs": "micro_batch_size",
}
"""What most tables call the sizes of a layout."""


def layout(row: Row, *columns: str, **others: Any) -> ParallelQuery:
    """Return the layout of a row: the sizes in these columns, 1 where a cell is empty, and what
    else is known.
    """
    sizes = {
        LAYOUT[column]: 1 if row[column] in ("", "n/a") else int(row[column]) for column in columns
    }
    return ParallelQuery(**sizes, **others)


def megatron_2020_cases(folder: Path) -> list[Case]:
    """GPT of 1B to 8B on V100 and A100: tensor times data parallelism, one micro-batch a step,
    everything recomputed.

    Nothing ran beside the collectives of tensor parallelism yet. Replicas reduced their gradients
    behind the backward pass (--DDP-impl torch) from TP 4 on; at TP 1 and 2 the README of that
    commit calls it slower than reducing them afterwards.
    """
    cases = []
    for row in read(folder, "megatron_lm_2020_scaling.csv"):
        card, per_node = SYSTEMS_2020[row["system"]]
        shape = ModelSpec(
            name=row["case"],
            num_hidden_layers=int(row["layers"]),
            hidden_size=int(row["hidden"]),
            num_attention_heads=int(row["heads"]),
            vocab_size=51200,
            max_position_embeddings=1024,
        )
        behind_backward = int(row["tp"]) > 2 and int(row["dp"]) > 1
        query = Query(
            kind="training",
            model=shape,
            cluster=ClusterQuery(
                gpu=card, num_gpus=int(row["gpus"]), gpus_per_node=min(per_node, int(row["gpus"]))
            ),
            training=TrainingWorkload(
                sequence_length=int(row["seq"]),
                global_batch_size=int(row["gbs"]),
                precision="fp16",
                attention="unfused",
                dropout=0.1,
                gradient_precision="fp16",  # reduced as they are: fp32 was an option
                overlap=OverlapSpec(tensor_parallel=False, data_parallel=behind_backward or None),
            ),
            parallel=layout(
                row,
                "tp",
                micro_batch_size=int(row["gbs"]) // int(row["dp"]),
                sequence_parallel=False,
                recompute="full",
                zero_stage=0,
            ),
        )
        what = f"{row['system']}, TP {row['tp']}, DP {row['dp']}"
        step_s = float(row["iter_ms"]) * 1e-3
        cases.append(
            Case(
                name=row["case"],
                what=what,
                query=query,
                step_s=step_s,
                source="Megatron-LM 2020",
                date="2020-10",
            )
        )
    return cases


def bridge_cases(folder: Path) -> list[Case]:
    """NVIDIA's published recipes on H100 and B200, fp8: releases of one configuration answer with
    their median.
    """
    grouped: dict[tuple[str, ...], list[Row]] = defaultdict(list)
    keys = ("system", "model", "gpus", "gbs", "mbs", "seq", "tp", "pp", "vp", "cp", "fsdp")
    for row in read(folder, "training_megatron_bridge.csv"):
        if (
            row["model"] in MODELS_BRIDGE
            and row["system"] in SYSTEMS_BRIDGE
            and bridge_precision(row) is not None
        ):
            grouped[(str(bridge_precision(row)), *(row[key] for key in keys))].append(row)
    return [bridge_case(rows, name=MODELS_BRIDGE[rows[0]["model"]]) for rows in grouped.values()]


def bridge_precision(row: Row) -> Precision | None:
    """Tensor-wise fp8 is what H100 runs; on B200 the second figure is block-scaled. Others are left
    out.
    """
    if "MX" in row["precision"] and row["system"] == "DGX-B200":
        return "mxfp8" if row["variant"] == "paren" or "(" not in row["precision"] else "fp8"
    return "fp8" if row["precision"].startswith("FP8") and row["variant"] != "paren" else None


def bridge_date(release: str) -> str:
    """2026-02 of 26.02.01 or NeMo26.02."""
    year, month = release.removeprefix("NeMo").split(".")[:2]
    return f"20{year}-{month}"


def bridge_case(rows: list[Row], *, name: str) -> Case:
    """Rows of one configuration, whose rates answer with their median."""
    row, sequence = rows[0], int(rows[0]["seq"])
    precision = bridge_precision(row)
    assert precision is not None
    releases = sorted(one["release"].removeprefix("NeMo") for one in rows)
    query = Query(
        kind="training",
        model=name,
        cluster=ClusterQuery(gpu=SYSTEMS_BRIDGE[row["system"]], num_gpus=int(row["gpus"])),
        training=TrainingWorkload(
            sequence_length=sequence,
            global_batch_size=int(row["gbs"]),
            precision=precision,
            cross_entropy="fused",
            gradient_precision="bf16",  # the recipes set grad_reduce_in_fp32 to False
            framework_version=releases[len(releases) // 2],
        ),
        parallel=layout(
            row, "tp", "pp", "vp", "cp", "mbs", zero_stage=1 if row["fsdp"] in ("", "0") else 3
        ),
    )
    rate = median(float(one["tokens_per_s_gpu"]) for one in rows)
    sizes = f"TP {row['tp']}, PP {row['pp']}, VP {row['vp']}, CP {row['cp']}, GBS {row['gbs']}"
    return Case(
        name=name,
        what=f"{row['system'][4:]} x{row['gpus']}, {precision}, {sizes}",
        query=query,
        step_s=int(row["gbs"]) * sequence / (rate * int(row["gpus"])),
        source="Megatron Bridge and NeMo",
        date=bridge_date(row["release"]),
    )


def b200_cases(folder: Path) -> list[Case]:
    """Cut-down models on 8 B200, nothing overlapped: step time and allocated memory."""
    cases = []
    for row in read(folder, "memory_b200_megatron.csv"):
        sequence, micro, batches, dp = (
            int(row[key])
            for key in ("sequence_length", "micro_batch_size", "num_microbatches", "dp")
        )
        query = Query(
            kind="training",
            model=dataclasses.replace(
                model(MODELS_B200[row["model"]]), num_hidden_layers=int(row["num_hidden_layers"])
            ),
            cluster=ClusterQuery(gpu="b200-sxm-180gb", num_gpus=int(row["gpus"])),
            training=TrainingWorkload(
                sequence_length=sequence,
                global_batch_size=micro * batches * dp,
                cross_entropy="fused",
                overlap=NO_OVERLAP,
            ),
            parallel=layout(row, "tp", "pp", "ep", micro_batch_size=micro),
        )
        cases.append(
            Case(
                name=f"{MODELS_B200[row['model']]} cut",
                what=f"TP {row['tp']}, PP {row['pp']}, EP {row['ep']}, DP {dp}, {batches} "
                "micro-batches",
                query=query,
                step_s=float(row["real_ms"]) * 1e-3,
                allocated_bytes=float(row["real_alloc_gib"]) * GIB,
                reserved_bytes=float(row["real_reserved_gib"]) * GIB,
                source="Cut to fit 8 B200",
                date="2025-09",
            )
        )
    return cases
