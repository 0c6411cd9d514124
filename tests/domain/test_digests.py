"""Digests: the same for the same thing, however it is written; different where a step time may
differ.
"""

from __future__ import annotations

from dataclasses import replace

import pytest

from hp_tool.domain.digests import configuration_digest, json_digest, problem_digest
from hp_tool.domain.hardware import ClusterSpec, GpuSpec
from hp_tool.domain.measurement import Fidelity
from hp_tool.domain.model import ModelSpec
from hp_tool.domain.parallel import ParallelConfig, Recompute
from hp_tool.domain.workload import TrainingWorkload

GPU = GpuSpec(
    name="cpu",
    kind="cpu",
    memory_bytes=2**30,
    memory_bandwidth_bytes_per_second=1e10,
    peak_flops_per_second={"fp32": 1e11},
    pcie_bandwidth_bytes_per_second=1e10,
    inter_node_bandwidth_bytes_per_second=1e9,
    power_w=10.0,
)
CLUSTER = ClusterSpec(
    gpu=GPU,
    num_gpus=4,
    gpus_per_node=4,
    nvlink_domain_size=4,
    inter_node_bandwidth_bytes_per_second=1e9,
)
MODEL = ModelSpec(
    name="a", num_hidden_layers=2, hidden_size=64, num_attention_heads=4, vocab_size=256
)
TRAINING = TrainingWorkload(sequence_length=128, global_batch_size=8)


def test_a_digest_does_not_change_between_versions() -> None:
    """Stored runs are found by it, so what it was must stay what it is."""
    expected = "a6be7ed57661649a81d27fcffcaeb7609f3d94597308d325510d423272d409c3"
    assert configuration_digest(parallel=ParallelConfig(), fidelity=Fidelity(steps=3)) == expected


def test_a_recompute_name_is_short_for_the_mapping() -> None:
    short = configuration_digest(parallel=ParallelConfig(recompute="full"))
    assert short == configuration_digest(
        parallel=ParallelConfig(recompute=Recompute(granularity="full")), fidelity=Fidelity()
    )
    assert short != configuration_digest(
        parallel=ParallelConfig(recompute=Recompute(granularity="full", num_layers=2))
    )


@pytest.mark.parametrize(
    "other",
    [
        ParallelConfig(tensor_parallel_size=2),
        ParallelConfig(pipeline_parallel_size=2),
        ParallelConfig(sequence_parallel=True),
        ParallelConfig(recompute="selective"),
        ParallelConfig(zero_stage=0),
    ],
)
def test_other_configurations_differ(other: ParallelConfig) -> None:
    assert configuration_digest(parallel=other) != configuration_digest(parallel=ParallelConfig())
    assert configuration_digest(
        parallel=other, fidelity=Fidelity(num_hidden_layers=1)
    ) != configuration_digest(parallel=other)


def test_names_prices_and_length_of_training_are_not_part_of_the_problem() -> None:
    renamed = problem_digest(
        model=replace(MODEL, name="b"),
        cluster=replace(CLUSTER, name="lab", price_per_gpu_hour=2.0),
        training=replace(TRAINING, total_tokens=1e9),
    )
    assert renamed == problem_digest(model=MODEL, cluster=CLUSTER, training=TRAINING)


def test_model_cluster_and_workload_are() -> None:
    digests = {
        problem_digest(model=MODEL, cluster=CLUSTER, training=TRAINING),
        problem_digest(model=replace(MODEL, hidden_size=128), cluster=CLUSTER, training=TRAINING),
        problem_digest(model=MODEL, cluster=replace(CLUSTER, num_gpus=8), training=TRAINING),
        problem_digest(
            model=MODEL, cluster=CLUSTER, training=replace(TRAINING, framework_version="0.16")
        ),
        problem_digest(
            model=MODEL,
            cluster=replace(CLUSTER, gpu=replace(GPU, name="l40s-48gb")),
            training=TRAINING,
        ),
    }
    assert len(digests) == 5


def test_the_order_of_keys_does_not_matter() -> None:
    assert (
        json_digest({"a": 1, "b": [1, 2]})
        == json_digest({"b": [1, 2], "a": 1})
        != json_digest({"b": [2, 1], "a": 1})
    )
