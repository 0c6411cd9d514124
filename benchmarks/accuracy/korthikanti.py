"""Tables 4 and 5 of arXiv 2205.05198 (A100 80GB, s=2048, V=51200, fp16, unfused attention, dropout
0.1), predicted.

Published figures are read from the reference data; this module says which query each row stands
for.
"""

from __future__ import annotations

from benchmarks.accuracy.comparison import Comparison
from benchmarks.accuracy.data import Row
from benchmarks.accuracy.heldout import Case
from hp_tool.catalog import cluster, model
from hp_tool.cost.candidates import Candidates
from hp_tool.cost.case import TrainingCase
from hp_tool.cost.layer import layer_time
from hp_tool.cost.training import training_costs
from hp_tool.domain.efficiency import EfficiencyProfile
from hp_tool.domain.hardware import ClusterQuery, ClusterSpec
from hp_tool.domain.parallel import ParallelConfig, Strategy
from hp_tool.domain.query import Query
from hp_tool.domain.serving import config_query
from hp_tool.domain.workload import TrainingWorkload

GPU = "a100-sxm-80gb"
MODELS = {"22B": "gpt-22b", "175B": "gpt3-175b", "530B": "mt-nlg-530b", "1T": "gpt-1t"}


def workload(global_batch_size: int) -> TrainingWorkload:
    """The software of 2022: no fused attention, dropout, 16-bit floats."""
    return TrainingWorkload(
        sequence_length=2048,
        global_batch_size=global_batch_size,
        precision="fp16",
        attention="unfused",
        dropout=0.1,
    )


def a100(num_gpus: int) -> ClusterSpec:
    return cluster(ClusterQuery(gpu=GPU, num_gpus=num_gpus))


def table5(rows: list[Row], profile: EfficiencyProfile) -> list[Comparison]:
    """Seconds per iteration: full recomputation without SP, and SP with selective recomputation."""
    return [_iteration(*figure, profile) for figure in _figures(rows)]


def _figures(rows: list[Row]) -> list[tuple[Row, str, str, bool]]:
    """(row, column, recomputation, sequence parallelism) of every figure printed."""
    columns = (("iter_s_full_recompute", "full", False), ("iter_s_present_work", "selective", True))
    return [(row, *kind) for row in rows for kind in columns if row[kind[0]]]


def _name(row: Row, recompute: str, sharded: bool) -> str:
    return f"{recompute}{' + SP' if sharded else ''}, DP {row['dp']}"


def _config(row: Row, recompute: str, sharded: bool) -> ParallelConfig:
    return ParallelConfig(
        tensor_parallel_size=int(row["tp"]),
        pipeline_parallel_size=int(row["pp"]),
        virtual_pipeline_parallel_size=int(row["interleave_m"]),
        data_parallel_size=int(row["dp"]),
        micro_batch_size=int(row["mbs"]),
        sequence_parallel=sharded,
        recompute=recompute,  # type: ignore[arg-type]
        zero_stage=0,
    )


def _iteration(
    row: Row, column: str, recompute: str, sharded: bool, profile: EfficiencyProfile
) -> Comparison:
    size = row["model"].split()[0]
    costs = training_costs(
        case=TrainingCase(
            model=model(MODELS[size]),
            cluster=a100(int(row["gpus"])),
            workload=workload(int(row["gbs"])),
            profile=profile,
        ),
        candidates=Candidates.from_configs((_config(row, recompute, sharded),)),
    )
    return Comparison(
        source="Table 5 (s)",
        model=size,
        what=_name(row, recompute, sharded),
        published=float(row[column]),
        predicted=float(costs.step_s[0]),
    )


def table4(rows: list[Row], profile: EfficiencyProfile) -> list[Comparison]:
    """Milliseconds of one 22B layer forward and backward, recomputation counted as backward."""
    comparisons = []
    for row in rows:
        config = ParallelConfig(
            tensor_parallel_size=int(row["tp"]),
            micro_batch_size=int(row["mbs"]),
            sequence_parallel="sequence_parallelism" in row["experiment"],
        )
        times = layer_time(
            case=TrainingCase(
                model=model(MODELS["22B"]),
                cluster=a100(8),
                workload=workload(int(row["mbs"])),
                profile=profile,
                strategy=Strategy(),
            ),
            candidates=Candidates.from_configs((config,)),
        )
        forward = float((times.forward + times.tensor)[0])
        backward = float((times.backward + times.tensor_backward)[0])
        if "full" in row["experiment"]:
            backward += forward
        if "selective" in row["experiment"]:
            backward += float(times.repeated[0])
        for direction, seconds in (("fwd", forward), ("bwd", backward)):
            comparisons.append(
                Comparison(
                    source="Table 4 (ms)",
                    model="22B",
                    what=f"{row['experiment']} {direction}",
                    published=float(row[f"{direction}_ms"]),
                    predicted=1e3 * seconds,
                )
            )
    return comparisons


def table5_cases(rows: list[Row]) -> list[Case]:
    """Table 5 as queries: what `table5` predicts, as anyone would ask it."""
    return [
        Case(
            name=row["model"].split()[0],
            what=_name(row, recompute, sharded),
            step_s=float(row[column]),
            source="arXiv 2205.05198",
            date="2022-05",
            query=Query(
                kind="training",
                model=MODELS[row["model"].split()[0]],
                cluster=ClusterQuery(gpu=GPU, num_gpus=int(row["gpus"])),
                training=workload(int(row["gbs"])),
                parallel=config_query(_config(row, recompute, sharded)),
            ),
        )
        for row, column, recompute, sharded in _figures(rows)
    ]
