"""FSDP queries: fp32 shards, whole models gathered layer by layer, and its own ZeRO stages."""

from __future__ import annotations

import pytest

from hp_tool.catalog import model
from hp_tool.cost.parameters import total_parameters
from hp_tool.domain.hardware import ClusterQuery
from hp_tool.domain.parallel import ParallelQuery
from hp_tool.domain.query import Query
from hp_tool.domain.workload import TrainingWorkload
from hp_tool.questions.training import estimate, recommend


def query(
    *, model: str = "llama-3-8b", gpus: int = 16, cross_entropy: str = "unfused", **parallel: object
) -> Query:
    return Query(
        kind="training",
        model=model,
        cluster=ClusterQuery(gpu="a100-sxm-80gb", num_gpus=gpus),
        training=TrainingWorkload(
            sequence_length=4096,
            global_batch_size=64,
            framework="torch-fsdp",
            cross_entropy=cross_entropy,  # type: ignore[arg-type]
        ),
        parallel=ParallelQuery(**parallel),  # type: ignore[arg-type]
    )


def test_states_are_sixteen_bytes_a_parameter_over_all_replicas() -> None:
    """fp32 weights, gradients and Adam's two states; no master copy."""
    memory = estimate(query=query(recompute="full")).memory
    assert memory is not None
    states = memory.weights_bytes + memory.gradients_bytes + memory.optimizer_bytes
    assert states == pytest.approx(16.0 * total_parameters(model("llama-3-8b")) / 16, rel=1e-9)


def test_left_out_zero_stage_is_full_sharding() -> None:
    assert estimate(query=query()) == estimate(query=query(zero_stage=3))


def test_a_search_tries_the_stages_that_fsdp_has() -> None:
    found = recommend(
        query=query(tensor_parallel_size=1, pipeline_parallel_size=1), top=100
    ).recommendations
    assert {one.parallel.zero_stage for one in found} == {2, 3}


def test_plain_loss_keeps_more_of_the_logits_than_a_fused_one() -> None:
    plain, fused = (
        estimate(query=query(cross_entropy=kind, recompute="full")).memory
        for kind in ("unfused", "fused")
    )
    assert plain is not None and fused is not None
    assert plain.logits_bytes == pytest.approx(3.5 * fused.logits_bytes)
