"""Published FSDP runs as cases: MosaicML's MPT on A100, and torchtitan's Llama."""

from __future__ import annotations

import dataclasses
from pathlib import Path

from benchmarks.accuracy.data import Row, read
from benchmarks.accuracy.heldout import Case, layout
from hp_tool.domain.hardware import ClusterQuery
from hp_tool.domain.query import Query
from hp_tool.domain.workload import TrainingWorkload
from hp_tool.errors import UnsupportedError
from hp_tool.questions.training.problem import resolve_training

GPUS_MPT = {
    "a100_40gb": "a100-sxm-40gb",
    "a100_80gb": "a100-sxm-80gb",
    "h100_80gb": "h100-sxm-80gb",
}
GPUS_TITAN = {"A100-80GB": "a100-sxm-80gb", "H200": "h200-sxm-141gb"}
"""Not in it: an H100 of 96 GB and 2.4 TB/s with its power limited to 500 W."""
SHARDING = {"FULL_SHARD": 3, "SHARD_GRAD_OP": 2}
MODELS_TITAN = {
    "llama3.1-8b": "llama-3.1-8b",
    "llama3.1-70b": "llama-3.1-70b",
    "llama3-8b": "llama-3-8b",
    "llama3-70b": "llama-3-70b",
    "llama2-13b": "llama-2-13b",
    "llama2-70b": "llama-2-70b",
}
RECOMPUTE_TITAN = {"none": "none", "full": "full", "selective op": "per_op"}
"""Not in it: `selective layer`, every second layer."""


def mpt_cases(folder: Path) -> list[Case]:
    """MPT of 125M to 70B under llm-foundry: sharded over all GPUs, gradients reduced in 16 bits
    (mixed_precision PURE), the loss in flash-attn's fused kernel, whole layers recomputed or
    nothing.
    """
    return [_mpt(row) for row in read(folder, "training_llm_foundry_fsdp.csv")]


def _mpt(row: Row) -> Case:
    gpu, gpus, batch, sequence = (
        GPUS_MPT[row["gpu"]],
        int(row["gpus"]),
        int(row["gbs"]),
        int(row["seq"]),
    )
    recompute = "full" if row["activation_ckpt"] == "True" else "none"
    query = Query(
        kind="training",
        model=row["model"],
        cluster=ClusterQuery(gpu=gpu, num_gpus=gpus),
        training=TrainingWorkload(
            sequence_length=sequence,
            global_batch_size=batch,
            framework="torch-fsdp",
            gradient_precision="bf16",
            cross_entropy="fused",
            attention_kernel="triton",
        ),
        parallel=layout(row, "mbs", recompute=recompute, zero_stage=SHARDING[row["sharding"]]),
    )
    return Case(
        name=row["model"],
        what=f"{gpu.upper()} x{gpus}, s {sequence}, mbs {row['mbs']}, {recompute}, GBS {batch}",
        query=query,
        step_s=batch * sequence / float(row["tokens_per_s"]),
    )


def mpt_h100_cases(folder: Path) -> list[Case]:
    """MPT of 1B to 30B on 8 to 512 H100, in bf16 and fp8; otherwise as mpt_cases."""
    return [_mpt_h100(row) for row in read(folder, "training_llm_foundry_h100.csv")]


def _mpt_h100(row: Row) -> Case:
    recompute = "True" if row["activation_checkpointing"] == "True" else "False"
    same = {
        "gpu": "h100_80gb",
        "seq": row["seq_tokens"],
        "activation_ckpt": recompute,
        "tokens_per_s": row["tokens_s"],
    }
    case = _mpt({**row, **same})
    if "fp8" not in row["precision"]:
        return case
    training = dataclasses.replace(case.query.training, precision="fp8")  # type: ignore[type-var]
    return dataclasses.replace(
        case, what=f"{case.what}, fp8", query=dataclasses.replace(case.query, training=training)
    )


@dataclasses.dataclass(frozen=True, kw_only=True)
class LeftOut:
    """A row that no query can state, and what is missing."""

    what: str
    why: str


def titan_cases(folder: Path) -> tuple[list[Case], list[LeftOut]]:
    """(Llama 2 and 3 under torchtitan's FSDP2 in eager mode, rows left out): gradients reduced in
    fp32, the loss unfused.

    Left out by name: torch.compile (it fuses elementwise kernels), float8 and asynchronous tensor
    parallelism of a compiler, GPUs with a lowered power limit, and recomputation that is not
    modelled.
    """
    cases, left = [], []
    for row in read(folder, "training_torchtitan.csv"):
        what = (
            f"{row['hw'].split()[0]} x{row['gpus']}, s {row['seq']}, mbs {row['local_bs']}, TP "
            f"{row['tp']}, {row['ac']}"
        )
        why = _missing(row)
        case = None if why else _titan(row, what)
        if case is not None:
            try:
                resolve_training(case.query)
            except UnsupportedError as error:
                case, why = None, str(error)
        if case is None:
            left.append(LeftOut(what=f"{row['model']} {what}", why=why or ""))
        else:
            cases.append(case)
    return cases, left


def _missing(row: Row) -> str | None:
    if row["tps_per_gpu"] == "OOM":
        return "ran out of memory: no step time"
    if row["hw"] not in GPUS_TITAN:
        return f"a GPU that no catalogue has: {row['hw']}"
    if row["torch_compile"] == "1":
        return "torch.compile"
    if row["ac"] not in RECOMPUTE_TITAN:
        return f"recomputation of {row['ac']}"
    return None


def _titan(row: Row, what: str) -> Case:
    gpus, batch, sequence = int(row["gpus"]), int(row["gbs"]), int(row["seq"])
    query = Query(
        kind="training",
        model=MODELS_TITAN[row["model"]],
        cluster=ClusterQuery(gpu=GPUS_TITAN[row["hw"]], num_gpus=gpus),
        training=TrainingWorkload(
            sequence_length=sequence, global_batch_size=batch, framework="torch-fsdp"
        ),
        parallel=layout(
            row,
            "tp",
            "cp",
            micro_batch_size=int(row["local_bs"]),
            recompute=RECOMPUTE_TITAN[row["ac"]],
        ),
    )
    step_s = batch * sequence / (float(row["tps_per_gpu"]) * gpus)
    return Case(name=row["model"], what=what, query=query, step_s=step_s)
