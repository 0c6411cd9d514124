"""InternEvo: what its ZeRO sends and keeps, how it splits layers, what it refuses."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from hp_tool.cost.candidates import Candidates
from hp_tool.cost.training import TrainingCosts
from hp_tool.domain.parallel import ParallelConfig
from hp_tool.domain.query import Query
from hp_tool.domain.result import Estimate
from hp_tool.errors import InputError
from hp_tool.questions import anatomy
from hp_tool.questions.schema import parse_query
from hp_tool.questions.training import estimate, recommend
from hp_tool.questions.training.problem import resolve_training

SHAPE: dict[str, Any] = {
    "num_hidden_layers": 32,
    "hidden_size": 4096,
    "num_attention_heads": 32,
    "intermediate_size": 11008,
    "vocab_size": 103168,
    "gated_mlp": True,
    "normalization": "rmsnorm",
    "tie_word_embeddings": False,
}
PARAMETERS = 7.322e9


def query(*, num_gpus: int, training: dict[str, Any] | None = None, **parallel: Any) -> Query:
    work = {
        "sequence_length": 2048,
        "global_batch_size": 8 * num_gpus,
        "framework": "internevo",
        **(training or {}),
    }
    return parse_query(
        {
            "kind": "training",
            "model": SHAPE,
            "cluster": {"gpu": "a100-sxm-80gb", "num_gpus": num_gpus},
            "training": work,
            "parallel": parallel,
        }
    )


def asked(*, num_gpus: int, **keys: Any) -> Estimate:
    return estimate(query=query(num_gpus=num_gpus, **keys))


def costs(config: ParallelConfig, **constants: float) -> TrainingCosts:
    problem = resolve_training(query(num_gpus=config.data_parallel_size))
    framework = dataclasses.replace(problem.profile.framework, **constants)  # type: ignore[arg-type]
    profile = dataclasses.replace(problem.profile, framework=framework)
    return dataclasses.replace(problem, profile=profile).costs(Candidates.alone(config))


def test_the_optimizers_step_needs_three_more_copies_of_the_shard() -> None:
    """16 bytes a parameter of states, 12 of the step; activations and logits are free by then."""
    found = asked(num_gpus=4, tensor_parallel_size=4, micro_batch_size=1, recompute="full").memory
    assert found is not None
    assert found.gradients_bytes == pytest.approx(2.0 * PARAMETERS / 4, rel=1e-3)
    assert found.allocated_bytes == pytest.approx(28.0 * PARAMETERS / 4, rel=2e-3)
    sharded = asked(num_gpus=64, micro_batch_size=4, recompute="none").memory
    assert sharded is not None
    assert (
        sharded.optimizer_bytes + sharded.gradients_bytes < sharded.activations_bytes
    )  # the backward pass is the peak


def test_gradients_are_reduced_over_all_replicas_and_only_shards_broadcast() -> None:
    """Nothing hides the broadcasts: hiding everything leaves as much of them as hiding nothing
    does.
    """

    def exposed(shard: int, overlap: float) -> float:
        config = ParallelConfig(data_parallel_size=64, data_parallel_shard_size=shard, zero_stage=1)
        return float(costs(config, data_parallel_overlap=overlap).parts["data_parallel"])

    reductions = {shard: exposed(shard, 0.0) - exposed(shard, 1.0) for shard in (1, 8, 0)}
    assert (
        reductions[1]
        == pytest.approx(reductions[8], rel=1e-9)
        == pytest.approx(reductions[0], rel=1e-9)
    )
    assert exposed(1, 1.0) == pytest.approx(0.0, abs=1e-4)
    assert exposed(1, 1.0) < exposed(8, 1.0) < exposed(0, 1.0)


def test_more_ranks_broadcast_smaller_shares_and_take_longer() -> None:
    def broadcasts(gpus: int) -> float:
        return float(
            costs(ParallelConfig(data_parallel_size=gpus), data_parallel_overlap=1.0).parts[
                "data_parallel"
            ]
        )

    assert broadcasts(8) < broadcasts(16) < broadcasts(32) < broadcasts(64) < 4.0 * broadcasts(16)


def test_the_last_stages_hold_the_layers_left_over() -> None:
    problem = resolve_training(query(num_gpus=6))
    stages = anatomy.stage_anatomies(
        problem=problem, config=ParallelConfig(pipeline_parallel_size=6, recompute="full")
    )
    assert [stage.layers for stage in stages] == [5, 5, 5, 5, 6, 6]
    fullest = asked(num_gpus=6, pipeline_parallel_size=6, micro_batch_size=1, recompute="full")
    assert fullest.memory is not None
    on_last = PARAMETERS - 2 * 4096 * 103168  # layers
    assert fullest.memory.weights_bytes == pytest.approx(
        2.0 * (on_last * 6 / 32 + 4096 * 103168), rel=1e-3
    )


@pytest.mark.parametrize(
    ("training", "parallel", "field"),
    [
        ({"precision": "fp8"}, {}, "training.precision"),
        ({"gradient_precision": "fp32"}, {}, "training.gradient_precision"),
        ({}, {"zero_stage": 2}, "parallel.zero_stage"),
        ({}, {"zero_stage": 0}, "parallel.zero_stage"),
        ({}, {"context_parallel_size": 2}, "parallel.context_parallel_size"),
        ({}, {"recompute": "selective"}, "parallel.recompute"),
    ],
)
def test_what_none_of_its_measured_runs_used_is_refused_by_name(
    training: Any, parallel: Any, field: str
) -> None:
    with pytest.raises(InputError) as refused:
        asked(num_gpus=8, training=training, **parallel)
    assert refused.value.field == field


def test_shards_within_a_node_are_measured_and_recommended_configurations_run() -> None:
    sharded = asked(num_gpus=16, micro_batch_size=1, data_parallel_shard_size=8)
    assert sharded.familiarity and sharded.familiarity.unmeasured == ()
    piped = asked(num_gpus=16, micro_batch_size=1, pipeline_parallel_size=2, zero_stage=3)
    assert piped.familiarity and piped.familiarity.unmeasured == (
        "parallel.zero_stage",
        "parallel.pipeline_parallel_size",
    )
    for one in recommend(
        query=query(num_gpus=16, data_parallel_shard_size=[0, 8]), top=8
    ).recommendations:
        parallel = one.parallel
        assert parallel.virtual_pipeline_parallel_size == parallel.context_parallel_size == 1
        assert parallel.recompute in ("none", "full") and parallel.zero_stage == 1
        assert estimate(
            query=query(
                num_gpus=16,
                **{k: v for k, v in dataclasses.asdict(parallel).items() if v is not None},
            )
        )
