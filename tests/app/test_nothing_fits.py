"""Where nothing is acceptable, `recommend` shards further, or says what comes nearest."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np

from hp_tool.domain.query import Query
from hp_tool.questions.schema import parse_query
from hp_tool.questions.training import config_query, estimate, recommend
from hp_tool.questions.training.problem import resolve_training
from hp_tool.questions.training.ranking.rank import cost_space


def query(
    *, model: str, num_gpus: int, training: dict[str, Any] | None = None, **change: Any
) -> Query:
    return parse_query(
        {
            "kind": "training",
            "model": model,
            "cluster": {
                "gpu": "a100-sxm-80gb",
                "num_gpus": num_gpus,
                "gpus_per_node": min(num_gpus, 8),
            },
            "training": {"sequence_length": 4096, "global_batch_size": 32} | (training or {}),
            **change,
        }
    )


SPLIT_BY_DATA_ALONE = {
    "tensor_parallel_size": 1,
    "pipeline_parallel_size": 1,
    "context_parallel_size": 1,
    "micro_batch_size": 1,
    "recompute": "full",
}


def test_further_sharding_is_tried_where_the_usual_stages_do_not_fit() -> None:
    asked = query(model="llama-2-13b", num_gpus=8, parallel=SPLIT_BY_DATA_ALONE)
    few = SPLIT_BY_DATA_ALONE | {"zero_stage": [0, 1]}
    usual = query(model="llama-2-13b", num_gpus=8, parallel=few, training={"offload": "none"})
    assert recommend(query=usual).recommendations == ()
    found = recommend(query=asked)
    assert found.nearest_misses == () and found.space.feasible > 0
    assert {row.parallel.zero_stage for row in found.recommendations} <= {2, 3}


def test_offload_is_tried_where_nothing_else_fits_and_the_query_leaves_it_open() -> None:
    asked = query(model="llama-3-8b", num_gpus=1)
    assert asked.training is not None
    best = recommend(query=asked, top=1).recommendations[0]
    assert best.estimate.provenance["assumed"]["training.offload"] == "optimizer"  # type: ignore[index]
    assert best.estimate.memory is not None and best.estimate.memory.host_bytes > 0.0
    assert (
        recommend(
            query=replace(asked, training=replace(asked.training, offload="none"))
        ).recommendations
        == ()
    )
    roomy = recommend(query=query(model="llama-3-8b", num_gpus=8), top=1).recommendations[0]
    assert "training.offload" not in roomy.estimate.provenance["assumed"]  # type: ignore[operator]


def test_the_nearest_misses_lack_least() -> None:
    asked = query(model="gpt-1t", num_gpus=64)
    found = recommend(query=asked)
    assert found.recommendations == () and found.space.feasible == 0
    assert len(found.nearest_misses) == 3
    sizes = [
        row.estimate.memory.total_bytes
        for row in found.nearest_misses
        if row.estimate.memory is not None
    ]
    assert sizes == sorted(sizes)
    assert sizes[0] == np.min(cost_space(problem=resolve_training(asked)).memory_total_bytes)
    for row in found.nearest_misses:
        assert not row.estimate.feasible
        assert [reason.code for reason in row.estimate.reasons] == ["memory"]
        alone = estimate(
            query=replace(asked, parallel=config_query(row.parallel)), with_fixes=False
        )
        assert alone.memory is not None and row.estimate.memory is not None
        assert np.isclose(alone.memory.total_bytes, row.estimate.memory.total_bytes, rtol=1e-12)


def test_a_deadline_out_of_reach_is_missed_by_as_little_as_can_be() -> None:
    asked = query(
        model="llama-3-8b",
        num_gpus=8,
        training={"total_tokens": 1e12},
        constraints={"max_days": 1.0},
        parallel={"zero_stage": 1},
    )
    found = recommend(query=asked)
    open_ended = recommend(
        query=replace(asked, constraints=replace(asked.constraints, max_days=None), rank_by="mean")
    )
    assert (
        len({str(row.parallel) for row in found.nearest_misses}) == len(found.nearest_misses) == 3
    )
    best = found.nearest_misses[0]
    assert [reason.code for reason in best.estimate.reasons] == ["target_missed"]
    fastest = min(
        open_ended.recommendations,
        key=lambda row: row.estimate.time.step_s if row.estimate.time else 0.0,
    )
    assert best.parallel == fastest.parallel


def test_a_deadline_is_missed_by_least_with_any_exchange_of_a_sequence() -> None:
    asked = query(
        model="llama-2-13b",
        num_gpus=8,
        training={"sequence_length": 8192, "global_batch_size": 8, "total_tokens": 1e12},
        constraints={"max_days": 1.0},
        parallel={"tensor_parallel_size": 1, "context_parallel_size": 8, "zero_stage": 3},
    )
    found = recommend(query=asked).nearest_misses
    open_ended = recommend(
        query=replace(asked, constraints=replace(asked.constraints, max_days=None), rank_by="mean"),
        top=5,
    )
    fastest = min(
        open_ended.recommendations,
        key=lambda row: row.estimate.time.step_s if row.estimate.time else 0.0,
    )
    assert (
        fastest.parallel.context_parallel_communication == "a2a"
        and found[0].parallel == fastest.parallel
    )
