"""Tables 4 and 5 of arXiv 2205.05198 (A100 80GB, s=2048, V=51200, fp16, unfused attention, dropout
0.1), predicted.

Published figures are rows of the evidence.
"""

from __future__ import annotations

import dataclasses

from benchmarks.accuracy.comparison import Comparison
from benchmarks.accuracy.prepared import Prepared
from evidence.cases import training_case
from evidence.table import Row
from hp_tool.catalog import cluster, model
from hp_tool.cost.candidates import Candidates
from hp_tool.cost.case import TrainingCase
from hp_tool.cost.layer import layer_time
from hp_tool.domain.efficiency import EfficiencyProfile
from hp_tool.domain.hardware import ClusterQuery, ClusterSpec
from hp_tool.domain.parallel import ParallelConfig, Strategy
from hp_tool.domain.workload import TrainingWorkload

GPU = "a100-sxm-80gb"
MODELS = {"22B": "gpt-22b", "175B": "gpt3-175b", "530B": "mt-nlg-530b", "1T": "gpt-1t"}


SOFTWARE_2022 = {
    "sequence_length": 2048,
    "precision": "fp16",
    "attention": "unfused",
    "dropout": 0.1,
}
"""No fused attention, dropout, 16-bit floats."""


def workload(global_batch_size: int) -> TrainingWorkload:
    """Return the software of 2022."""
    return TrainingWorkload(global_batch_size=global_batch_size, **SOFTWARE_2022)  # type: ignore[arg-type]


def a100(num_gpus: int) -> ClusterSpec:
    return cluster(ClusterQuery(gpu=GPU, num_gpus=num_gpus))


def table5(rows: list[Row], profile: EfficiencyProfile) -> list[Comparison]:
    """Seconds per iteration: full recomputation without SP, and SP with selective recomputation."""
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
        for run in (Prepared.of(training_case(row)) for row in rows)
    ]


def table4(rows: list[Row], profile: EfficiencyProfile) -> list[Comparison]:
    """Milliseconds of one 22B layer forward and backward, recomputation counted as backward."""
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
