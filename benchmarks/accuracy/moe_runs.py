"""NVIDIA's published mixture-of-experts recipes as cases, one a release: releases of one
configuration differ by a factor.
"""

from __future__ import annotations

import dataclasses
from pathlib import Path

from benchmarks.accuracy.data import Row, read
from benchmarks.accuracy.heldout import SYSTEMS_BRIDGE, Case, bridge_case, bridge_precision

MODELS = {"Qwen3_30B_a3B": "qwen3-30b-a3b"}
NEWEST = "26.02.01"
"""First release with today's grouped matmuls, dispatcher and CUDA graphs; before it the same rows
took up to twice as long.
"""


def moe_cases(folder: Path) -> list[Case]:
    """Every release of every configuration; rows printed twice count once. Under-specified all of
    them: recomputation, CUDA graphs and router balancing are not in the published tables.
    """
    cases = {}
    for row in read(folder, "training_megatron_bridge.csv"):
        if (
            row["model"] in MODELS
            and row["system"] in SYSTEMS_BRIDGE
            and bridge_precision(row) is not None
        ):
            # Rows of 25.09 dropped tokens above the mean load; one of the two tables they are
            # printed in says so.
            dropped = row["release"] == "25.09"
            case = _case(row, dropped=dropped)
            cases[case.what] = case
    return list(cases.values())


def newest(cases: list[Case]) -> list[Case]:
    """Those of today's software."""
    return [case for case in cases if case.release >= NEWEST]


def _case(row: Row, *, dropped: bool) -> Case:
    case = bridge_case([row], name=MODELS[row["model"]])
    training, parallel = case.query.training, case.query.parallel
    assert training is not None
    query = dataclasses.replace(
        case.query,
        training=dataclasses.replace(
            training,
            framework_version=row["release"],
            parameter_precision="fp8",  # as every preset of these precisions
            cross_entropy="in_place",
            expert_capacity_factor=1.0 if dropped else None,
            # Token dropping keeps shapes fixed; the recipe for B200 records the whole iteration as
            # a CUDA graph then.
            cuda_graphs=dropped and row["system"] == "DGX-B200",
        ),
        parallel=dataclasses.replace(parallel, expert_parallel_size=int(row["ep"])),
    )
    sizes = (
        f"EP {row['ep']}, micro-batch {row['mbs']}{', tokens dropped' if dropped else ''}, "
        f"release {row['release']}"
    )
    return dataclasses.replace(case, query=query, what=f"{case.what}, {sizes}")
