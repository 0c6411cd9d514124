"""Predictions for tables 4 and 5 and figures 1 and 7 of arXiv 2205.05198 (A100 80GB, s=2048,
V=51200, fp16, unfused attention, dropout 0.1): times, and activation memory of the first stage with
and without sequence parallelism and selective recomputation.

The published figures are rows of the evidence.
"""

from __future__ import annotations

import dataclasses
from pathlib import Path

from benchmarks.accuracy.comparison import Comparison
from benchmarks.accuracy.data import rows as rows_of
from benchmarks.accuracy.prepared import Prepared
from benchmarks.accuracy.published import estimate_query
from evidence.cases import training_case
from evidence.table import Row
from hp_tool.catalog import cluster, model
from hp_tool.cost.candidates import Candidates
from hp_tool.cost.case import TrainingCase
from hp_tool.cost.layer import layer_time
from hp_tool.domain.efficiency import EfficiencyProfile
from hp_tool.domain.hardware import ClusterQuery, ClusterSpec
from hp_tool.domain.parallel import ParallelConfig, Strategy
from hp_tool.domain.units import GIB
from hp_tool.domain.workload import TrainingWorkload

GPU = "a100-sxm-80gb"
MODELS = {"22B": "gpt-22b", "175B": "gpt3-175b", "530B": "mt-nlg-530b", "1T": "gpt-1t"}


SOFTWARE_2022 = {
    "sequence_length": 2048,
    "precision": "fp16",
    "attention": "unfused",
    "dropout": 0.1,
}
"""Settings of the software of 2022: unfused attention, dropout, fp16."""


def workload(global_batch_size: int) -> TrainingWorkload:
    """Return a workload with the settings of the software of 2022."""
    return TrainingWorkload(global_batch_size=global_batch_size, **SOFTWARE_2022)  # type: ignore[arg-type]


def a100(num_gpus: int) -> ClusterSpec:
    return cluster(ClusterQuery(gpu=GPU, num_gpus=num_gpus))


def table5(rows: list[Row], profile: EfficiencyProfile) -> list[Comparison]:
    """Return seconds per iteration: full recomputation without SP, and SP with selective
    recomputation.
    """
    return [
        Comparison(
            source="Table 5 (s)",
            model=run.case.name,
            what=run.case.what,
            published=run.case.step_s,
            predicted=float(
                dataclasses.replace(run.problem, profile=profile).costs(run.candidate).step_s
            ),
        )
        for run in (Prepared.from_case(training_case(row)) for row in rows)
    ]


def table4(rows: list[Row], profile: EfficiencyProfile) -> list[Comparison]:
    """Return the milliseconds of one 22B layer, forward and backward; recomputation counts as part
    of the backward pass.
    """
    comparisons = []
    for row in rows:
        config = ParallelConfig(
            tensor_parallel_size=row["tensor_parallel_size"],
            micro_batch_size=row["micro_batch_size"],
            sequence_parallel=row["sequence_parallel"],
        )
        times = layer_time(
            case=TrainingCase(
                model=model(MODELS["22B"]),
                cluster=a100(8),
                workload=workload(row["micro_batch_size"]),
                profile=profile,
                strategy=Strategy(),
            ),
            candidates=Candidates.from_configs((config,)),
        )
        forward = float((times.forward + times.tensor)[0])
        backward = float((times.backward + times.tensor_backward)[0])
        if row["recompute"] == "full":
            backward += forward
        if row["recompute"] == "selective":
            backward += float(times.repeated[0])
        measured = {"fwd": row["forward_s"], "bwd": row["backward_s"]}
        for direction, seconds in (("fwd", forward), ("bwd", backward)):
            comparisons.append(
                Comparison(
                    source="Table 4 (ms)",
                    model="22B",
                    what=f"{row['run']} {direction}",
                    published=round(1e3 * measured[direction], 6),
                    predicted=1e3 * seconds,
                )
            )
    return comparisons


SIZES = {
    # model: (pipeline parallel, model chunks, micro-batch, batch) of table 3; tensor parallel 8
    "gpt-22b": (1, 1, 4, 4),
    "gpt3-175b": (8, 3, 1, 64),
    "mt-nlg-530b": (35, 3, 1, 280),
    "gpt-1t": (64, 1, 1, 512),
}

VARIANTS = {
    # quantity: (recompute, sequence parallel)
    "fig1_act_gib_tp_baseline": ("none", False),
    "fig1_act_gib_sp_selective": ("selective", True),
    "fig7_sp_pct": ("none", True),
    "fig7_selective_pct": ("selective", False),
    "fig7_sp_selective_pct": ("selective", True),
    "fig7_full_recompute_pct": ("full", False),
}


def figures(folder: Path) -> list[Comparison]:
    """Return the activations of the layers in GiB (figure 1) and as a fraction of the
    tensor-parallel baseline's (figure 7).
    """
    comparisons = []
    for row in rows_of(folder, "korthikanti2022_fig1_fig7_memory"):
        name = row["quantity"]
        if name not in VARIANTS:
            continue
        recompute, sharded = VARIANTS[name]
        size = _layers(row["model"], recompute=recompute, sequence_parallel=sharded)
        baseline = _layers(row["model"], recompute="none", sequence_parallel=False)
        share = row["unit"] == "%"
        comparisons.append(
            Comparison(
                source="Figure 7 (%)" if share else "Figure 1 (GiB)",
                model=row["model"],
                what=name,
                published=row["value"],
                predicted=100.0 * size / baseline if share else size / GIB,
            )
        )
    return comparisons


def _layers(name: str, *, recompute: str, sequence_parallel: bool) -> float:
    pipeline, chunks, micro_batch, batch = SIZES[name]
    memory = estimate_query(
        {
            "model": name,
            "cluster": {"gpu": GPU, "num_gpus": 8 * pipeline},
            "training": {**SOFTWARE_2022, "global_batch_size": batch},
            "parallel": {
                "tensor_parallel_size": 8,
                "pipeline_parallel_size": pipeline,
                "virtual_pipeline_parallel_size": chunks,
                "micro_batch_size": micro_batch,
                "recompute": recompute,
                "sequence_parallel": sequence_parallel,
            },
        }
    ).memory
    assert memory is not None
    return memory.layer_activations_bytes
