"""nanotron: the split of blocks its source gives, what it keeps, what it refuses to start, and
hosts slower than devices.
"""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hp_tool.catalog import cluster
from hp_tool.catalog.efficiency import efficiency_profile
from hp_tool.cost.candidates import Candidates
from hp_tool.cost.case import TrainingCase
from hp_tool.cost.filled_stages import split_candidates, split_summary, stage_contents
from hp_tool.cost.memory import NEARLY_FULL
from hp_tool.cost.pipeline_stages import complete_pipeline
from hp_tool.cost.training import TrainingCosts, training_costs
from hp_tool.domain.hardware import ClusterQuery
from hp_tool.domain.model import ModelSpec
from hp_tool.domain.parallel import ParallelConfig
from hp_tool.domain.result import Estimate
from hp_tool.domain.workload import TrainingWorkload
from hp_tool.errors import InputError
from hp_tool.questions.schema import parse_query
from hp_tool.questions.training import estimate, recommend
from tests.cost.cases import case_of

LLAMA_1B: dict[str, Any] = {
    "num_hidden_layers": 16,
    "hidden_size": 2048,
    "intermediate_size": 8192,
    "num_attention_heads": 32,
    "vocab_size": 131072,
    "gated_mlp": True,
    "normalization": "rmsnorm",
    "tie_word_embeddings": True,
}
LLAMA_8B = LLAMA_1B | {
    "num_hidden_layers": 32,
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "tie_word_embeddings": False,
}


def asked(
    shape: dict[str, Any],
    *,
    nodes: int = 1,
    training: dict[str, Any] | None = None,
    **parallel: Any,
) -> Estimate:
    query = {
        "kind": "training",
        "model": shape,
        "cluster": {"gpu": "h100-sxm-80gb", "num_gpus": 8 * nodes},
        "training": {"sequence_length": 4096, "global_batch_size": 256, "framework": "nanotron"}
        | (training or {}),
        "parallel": parallel,
    }
    return estimate(query=parse_query(query))


def costs(config: ParallelConfig, *, nodes: int = 1, **constants: Any) -> TrainingCosts:
    machine = cluster(ClusterQuery(gpu="h100-sxm-80gb", num_gpus=8 * nodes))
    profile = efficiency_profile(gpu=machine.gpu, framework="nanotron")
    case = TrainingCase(
        model=ModelSpec(name="1b", **LLAMA_1B),
        cluster=machine,
        workload=TrainingWorkload(
            sequence_length=4096, global_batch_size=256, framework="nanotron"
        ),
        profile=dataclasses.replace(
            profile, framework=dataclasses.replace(profile.framework, **constants)
        ),
    )
    return training_costs(case=case, candidates=Candidates.alone(config))


def test_blocks_are_split_as_nanotrons_builder_splits_them() -> None:
    """By hand from build_model: thresholds 17.1 r, the block that passes one stays; the output
    layer weighs 2.2 layers.
    """
    shape = ModelSpec(name="8b", **LLAMA_8B)
    two, sixteen, thirty_two = (split_candidates(shape, p) for p in (2, 16, 32))
    assert (two.first, two.most, two.output, two.output_from_end, two.empty) == (18, 18, 14, 0, 0)
    assert (sixteen.first, sixteen.output, sixteen.output_from_end, sixteen.empty) == (
        3,
        2,
        1,
        0,
    )  # the loss is alone
    assert (thirty_two.output, thirty_two.output_from_end, thirty_two.empty) == (0, 2, 0)
    small = ModelSpec(name="1b", **LLAMA_1B)
    assert (
        split_candidates(small, 8).empty == 0 and split_candidates(small, 16).empty == 1
    )  # the grid's 1B never started on 16 stages


@given(
    layers=st.integers(1, 96),
    stages=st.integers(1, 64),
    layer=st.integers(1, 10**9),
    output=st.integers(0, 10**10),
)
def test_every_layer_is_on_one_stage(layers: int, stages: int, layer: int, output: int) -> None:
    found = split_summary(
        layers=layers, layer_weight=float(layer), output_weight=float(output), stages=stages
    )
    assert 1 <= found.first <= found.most <= layers
    assert found.output <= found.most and 0 <= found.output_from_end < stages
    assert layers <= found.most * (stages - found.empty)


@pytest.mark.parametrize("shape", [LLAMA_1B, LLAMA_8B], ids=["1b", "8b"])
def test_a_pipelines_ends_have_the_layers_of_their_split(shape: dict[str, Any]) -> None:
    model, sizes = ModelSpec(name="llama", **shape), (1, 2, 4, 8)
    case = case_of(
        model=model,
        workload=TrainingWorkload(sequence_length=4096, global_batch_size=64, framework="nanotron"),
    )
    pipeline = complete_pipeline(
        case, Candidates.from_configs([ParallelConfig(pipeline_parallel_size=p) for p in sizes])
    )
    fullest = pipeline.critical.count
    for row, p in enumerate(sizes):
        counts, output_at = stage_contents(model, p)
        fewer = [each[row] for each in (pipeline.fewer_first, pipeline.fewer_last, pipeline.fewer)]
        assert fullest[row] == max(counts)
        assert fewer == [
            max(counts) - counts[0],
            max(counts) - counts[output_at],
            p * max(counts) - sum(counts),
        ]


def test_arrays_and_numbers_agree() -> None:
    shape = ModelSpec(name="8b", **LLAMA_8B)
    sizes = np.array([[1], [4], [2], [32], [4]])
    found = split_candidates(shape, sizes)
    for name in found._fields:
        assert getattr(found, name).shape == sizes.shape
        assert getattr(found, name).ravel().tolist() == [
            getattr(split_candidates(shape, int(p)), name) for p in sizes.ravel()
        ]


def test_stages_that_would_hold_nothing_are_refused_with_their_number() -> None:
    (reason,) = asked(
        LLAMA_1B, nodes=16, tensor_parallel_size=8, pipeline_parallel_size=16, micro_batch_size=1
    ).reasons
    assert reason.code == "layers_not_divisible" and "has empty stages: 1" in reason.message
    assert asked(
        LLAMA_8B, nodes=16, tensor_parallel_size=8, pipeline_parallel_size=16, micro_batch_size=1
    ).feasible


def test_too_few_micro_batches_are_refused() -> None:
    (reason,) = asked(
        LLAMA_1B, tensor_parallel_size=1, pipeline_parallel_size=8, micro_batch_size=64
    ).reasons
    assert reason.code == "too_few_micro_batches" and (reason.needed, reason.available) == (7, 4)


def test_weights_gradients_and_states_are_what_its_source_allocates() -> None:
    """1.34 B parameters: 2 bytes of weights, 4 of gradients, 12 of states; 2 more of buckets where
    there are replicas.
    """
    alone = asked(LLAMA_1B, tensor_parallel_size=8, zero_stage=0, micro_batch_size=1)
    replicated = asked(LLAMA_1B, nodes=2, tensor_parallel_size=8, zero_stage=0, micro_batch_size=1)
    parameters = alone.memory.weights_bytes / 2.0
    assert parameters * 8 == pytest.approx(1.342e9, rel=2e-3)
    assert alone.memory.gradients_bytes == pytest.approx(4.0 * parameters)
    assert replicated.memory.gradients_bytes == pytest.approx(6.0 * parameters)
    assert alone.memory.optimizer_bytes == pytest.approx(12.0 * parameters)


def with_queue(
    queued: float, *, nodes: int = 1, tensor: int = 4, pipeline: int = 1, micro_batch: int = 1
) -> TrainingCosts:
    config = ParallelConfig(
        tensor_parallel_size=tensor,
        pipeline_parallel_size=pipeline,
        data_parallel_size=8 * nodes // (tensor * pipeline),
        micro_batch_size=micro_batch,
        zero_stage=1,
        sequence_parallel=True,
    )
    return costs(config, nodes=nodes, queued_inputs=queued)


def test_gathered_inputs_wait_for_the_device_as_far_as_the_host_is_ahead() -> None:
    """16 layers gather 32 inputs of 16 MiB in each pass, and the backward pass of a micro-batch
    before it as many again.
    """

    def waiting(queued: float, **sizes: int) -> float:
        return float(
            with_queue(queued, **sizes).first_stage_bytes
            - with_queue(0.0, **sizes).first_stage_bytes
        )

    gathered = 0.75 * 16 * 2.0**20
    assert waiting(50.0) == pytest.approx(50 * gathered)
    assert waiting(1000.0) == pytest.approx(64 * gathered)
    assert waiting(1000.0, nodes=64, micro_batch=2) == pytest.approx(
        32 * 2 * gathered
    )  # one micro-batch a step
    assert waiting(50.0, pipeline=2) == 0.0  # messages make the host wait


def test_groups_over_several_nodes_are_not_refused_for_inputs_that_wait() -> None:
    inside, across = (
        with_queue(64.0, tensor=8, micro_batch=32),
        with_queue(64.0, nodes=4, tensor=32, micro_batch=64),
    )
    assert not inside.feasible and with_queue(0.0, tensor=8, micro_batch=32).feasible
    assert across.feasible and across.memory_total_bytes == pytest.approx(across.capacity_bytes)


def test_a_layer_keeps_sixteen_bytes_a_hidden_and_eight_an_mlp_element() -> None:
    """Norm and matmul inputs (8), queries, keys, values and the core's output (8); gate, up,
    activated gate, product (8).
    """
    tokens, heads = 4096, 32
    found = asked(LLAMA_1B, tensor_parallel_size=1, micro_batch_size=1)
    layer = tokens * (16 * 2048 + 8 * 8192 + 4 * heads)
    assert found.memory.layer_activations_bytes == pytest.approx(16 * layer)
    assert found.memory.logits_bytes == pytest.approx(8.0 * tokens * 131072)


@pytest.mark.parametrize("micro", [1, 2])
def test_small_layers_take_the_hosts_time(micro: int) -> None:
    """Eight-way tensor parallelism of 1B: devices are done in half the time that launching takes,
    whatever the batch.
    """
    config = ParallelConfig(
        tensor_parallel_size=8, data_parallel_size=1, micro_batch_size=micro, sequence_parallel=True
    )
    found = costs(config, host_launch_s=1e-4)
    assert found.step_s * micro / 256 == pytest.approx(16 * 41e-4, rel=0.15)
    assert costs(config, host_launch_s=0.0).step_s < 0.7 * found.step_s


def test_a_pipeline_on_a_nearly_full_device_takes_longer_by_its_chance() -> None:
    """1B with ever larger micro-batches: at NEARLY_FULL of the device the chance is a half, and
    more memory only slows. A micro-batch's activations in all layers are freed and got again.
    """
    config = ParallelConfig(pipeline_parallel_size=2, data_parallel_size=4)
    ratios, shares = [], []
    sd = efficiency_profile(
        gpu=cluster(ClusterQuery(gpu="h100-sxm-80gb", num_gpus=8)).gpu, framework="nanotron"
    ).framework.memory_log_sd
    for micro in (1, 2, 4, 8, 16):
        there = dataclasses.replace(config, micro_batch_size=micro)
        slow, plain = (costs(there, retry_bytes_per_second=rate) for rate in (1e10, None))
        shares.append(float(plain.memory_total_bytes / plain.device_bytes))
        ratios.append(float(slow.step_s / plain.step_s))
        chance = 0.5 * math.erfc(math.log(NEARLY_FULL / shares[-1]) / sd / math.sqrt(2.0))
        layer = micro * 4096 * (16 * 2048 + 8 * 8192 + 4 * 32)
        slowdown = 1.0 + 256 / (4 * micro) * 16 * layer / 1e10 / float(plain.step_s)
        assert slow.retry_slowdown == pytest.approx(slowdown) and plain.retry_slowdown == 1.0
        assert math.log(ratios[-1]) / math.log(slowdown) == pytest.approx(chance, abs=0.011)
    assert shares[0] < 0.5 < NEARLY_FULL < shares[-1] and ratios == sorted(ratios)
    alone = ParallelConfig(data_parallel_size=8, micro_batch_size=16)
    assert (
        costs(alone, retry_bytes_per_second=1e10).step_s
        == costs(alone, retry_bytes_per_second=None).step_s
    )


def test_retries_cost_the_same_time_on_any_number_of_stages() -> None:
    """As nanotron's full runs lost it: a stage waits for the allocators of all others."""
    lost = []
    for stages in (2, 4, 8):
        config = ParallelConfig(
            pipeline_parallel_size=stages, data_parallel_size=8 // stages, micro_batch_size=4
        )
        slow, plain = (costs(config, retry_bytes_per_second=rate) for rate in (1e10, None))
        lost.append(
            (float(slow.retry_slowdown) - 1.0)
            * float(plain.step_s)
            * config.data_parallel_size
            / 64
        )
    assert lost == pytest.approx([lost[0]] * 3)


@given(host=st.floats(0.0, 0.001), stall=st.floats(0.0, 0.01), held=st.floats(0.0, 1.0))
def test_slower_hosts_never_speed_a_step_up(host: float, stall: float, held: float) -> None:
    config = ParallelConfig(
        tensor_parallel_size=4,
        pipeline_parallel_size=2,
        data_parallel_size=64,
        sequence_parallel=True,
    )
    constants = {"host_launch_s": host, "host_pipeline_stall_s": stall, "message_stall_s": held}
    found = costs(config, nodes=64, **constants)
    assert sum(found.parts.values()) == pytest.approx(found.step_s)
    for name, value in constants.items():
        assert costs(config, nodes=64, **constants | {name: value + 1e-3}).step_s >= found.step_s


@pytest.mark.parametrize(
    ("training", "parallel", "field"),
    [
        ({"precision": "fp8"}, {}, "training.precision"),
        ({"optimizer": "muon"}, {}, "training.optimizer"),
        (
            {},
            {"virtual_pipeline_parallel_size": 2, "pipeline_parallel_size": 2},
            "parallel.virtual_pipeline_parallel_size",
        ),
        ({}, {"zero_stage": 3}, "parallel.zero_stage"),
        ({}, {"recompute": "selective"}, "parallel.recompute"),
    ],
)
def test_what_nanotron_does_not_have_is_refused_by_name(
    training: Any, parallel: Any, field: str
) -> None:
    with pytest.raises(InputError) as refused:
        asked(LLAMA_1B, training=training, **parallel)
    assert refused.value.field == field


def test_experts_are_refused() -> None:
    with pytest.raises(InputError) as refused:
        asked(LLAMA_1B | {"num_experts": 8, "num_experts_per_tok": 2, "tie_word_embeddings": False})
    assert refused.value.field == "model"


def test_recommended_configurations_are_ones_it_can_run() -> None:
    query = parse_query(
        {
            "kind": "training",
            "model": LLAMA_8B,
            "cluster": {"gpu": "h100-sxm-80gb", "num_gpus": 32},
            "training": {
                "sequence_length": 4096,
                "global_batch_size": 256,
                "framework": "nanotron",
            },
            "parallel": {},
        }
    )
    found = recommend(query=query, top=10)
    assert len(found.recommendations) == 10
    for one in found.recommendations:
        parallel = one.parallel
        assert parallel.virtual_pipeline_parallel_size == parallel.context_parallel_size == 1
        assert parallel.recompute in ("none", "full") and parallel.zero_stage <= 1


def test_an_all_reduce_hides_behind_the_backward_pass_of_one_stage() -> None:
    """Replicas wait for 1 - overlap of the seconds; optimizer shards and pipelines wait for all of
    them.
    """

    def exposed(config: ParallelConfig, overlap: float | None) -> float:
        found = costs(config, nodes=2, data_parallel_overlap=0.0, all_reduce_overlap=overlap)  # type: ignore[arg-type]
        return float(found.parts["data_parallel"])

    replicated = ParallelConfig(data_parallel_size=16, zero_stage=0, micro_batch_size=2)
    assert exposed(replicated, 0.6) == pytest.approx(0.4 * exposed(replicated, None))
    for other in (
        ParallelConfig(data_parallel_size=16, zero_stage=1),
        ParallelConfig(data_parallel_size=8, pipeline_parallel_size=2, zero_stage=0),
    ):
        assert exposed(other, 0.6) == exposed(other, None) > 0.0


def test_each_bucket_is_a_collective_of_its_own() -> None:
    """Slower hops are paid for every 50 MiB of fp32 gradients: under ZeRO 1 for each hop around the
    ring, twice; under ZeRO 0 for the chains up and down within nodes, as trees join these.
    """
    shipped = efficiency_profile(
        gpu=cluster(ClusterQuery(gpu="h100-sxm-80gb", num_gpus=8)).gpu, framework="nanotron"
    ).framework

    def exchange_s(nodes: int, zero_stage: int, **link: float) -> float:
        config = ParallelConfig(
            data_parallel_size=8 * nodes, micro_batch_size=1, zero_stage=zero_stage
        )
        network = dataclasses.replace(shipped.network, **link)
        found = costs(
            config, nodes=nodes, network=network, data_parallel_overlap=0.0, all_reduce_overlap=0.0
        )
        return float(found.parts["data_parallel"])

    parameters = 16 * (4 * 2048**2 + 3 * 2048 * 8192) + 131072 * 2048
    buckets = parameters * 4 / (50 * 2**20)
    for nodes in (2, 8, 32):
        hops = {
            zero: exchange_s(nodes, zero, latency_per_peer_s=3e-6)
            - exchange_s(nodes, zero, latency_per_peer_s=2e-6)
            for zero in (0, 1)
        }
        assert hops[1] == pytest.approx(2 * buckets * (8 * nodes - 1) * 1e-6, rel=1e-3)
        assert hops[0] == pytest.approx(2 * buckets * 7 * 1e-6, rel=1e-3)
        levels = exchange_s(nodes, 0, latency_s=2e-5) - exchange_s(nodes, 0, latency_s=1e-5)
        assert levels == pytest.approx(2 * buckets * math.log2(nodes) * 1e-5, rel=1e-3)
