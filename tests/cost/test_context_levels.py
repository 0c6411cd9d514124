"""Context parallelism of two levels: its ends are the plain kinds, and in between it keeps the ring
inside fewer hops.
"""

from __future__ import annotations

import numpy as np
import pytest

from hp_tool.catalog import cluster, model
from hp_tool.cost.attention import (
    head_exchange_ranks,
    head_exchange_seconds,
    ring_merge_seconds,
)
from hp_tool.cost.block import shapes
from hp_tool.cost.candidates import Candidates
from hp_tool.cost.network import adjacent_group, all_to_all_seconds, dense_group
from hp_tool.cost.training import TrainingCosts, training_costs
from hp_tool.domain.hardware import ClusterQuery
from hp_tool.domain.parallel import ContextCommunication, ParallelConfig, Strategy
from hp_tool.domain.workload import TrainingWorkload
from tests.cost.cases import case_of

NODES = cluster(ClusterQuery(gpu="h100-sxm-80gb", num_gpus=128))
LLAMA = model("llama-3-8b")
WORKLOAD = TrainingWorkload(sequence_length=131072, global_batch_size=64)


def costs(
    config: ParallelConfig, kind: ContextCommunication, sizes: tuple[int, int] | None = None
) -> TrainingCosts:
    strategy = Strategy(
        context_parallel_communication=kind, hierarchical_context_parallel_sizes=sizes
    )
    case = case_of(model=LLAMA, workload=WORKLOAD, cluster=NODES, strategy=strategy)
    return training_costs(case=case, candidates=Candidates.alone(config))


CONFIG = ParallelConfig(
    tensor_parallel_size=2, context_parallel_size=16, data_parallel_size=4, sequence_parallel=True
)


@pytest.mark.parametrize(("sizes", "plain"), [((16, 1), "a2a"), ((1, 16), "p2p")])
def test_one_level_is_the_plain_kind(sizes: tuple[int, int], plain: ContextCommunication) -> None:
    assert costs(CONFIG, "a2a+p2p", sizes).parts == pytest.approx(costs(CONFIG, plain).parts)


def test_the_exchange_stays_inside_the_node_by_default() -> None:
    """Four pairs share a node of 8, and divide the 16 heads each of the pair holds."""
    assert costs(CONFIG, "a2a+p2p").parts == costs(CONFIG, "a2a+p2p", (4, 4)).parts
    several = Candidates.from_configs(
        [
            ParallelConfig(tensor_parallel_size=t, context_parallel_size=c)
            for t, c in ((1, 16), (2, 2), (8, 16), (4, 8))
        ]
    )
    ranks = dense_group(several, "cp", cluster=NODES)
    found = head_exchange_ranks(
        ranks, model=LLAMA, strategy=Strategy(), heads_split=several.tensor_parallel_size
    )
    np.testing.assert_array_equal(found, [8, 2, 1, 2])


def test_a_ring_copies_and_adds_up() -> None:
    """Two steps over 4,096 tokens of 32 heads and 8 of keys and values: passes over memory, counted
    by hand.
    """
    case = case_of(model=LLAMA, workload=WORKLOAD, cluster=NODES)
    s = shapes(case=case, candidates=Candidates.alone(ParallelConfig(context_parallel_size=32)))
    queries, keys_values = 4096 * 4096 * 2, 2 * 4096 * 1024 * 2
    gpu, framework = case.profile.gpu, case.profile.framework
    rate = (
        gpu.memory_fraction
        * case.cluster.gpu.memory_bandwidth_bytes_per_second
        / framework.elementwise_traffic_factor
    )
    forward, backward = ring_merge_seconds(case=case, s=s, steps=2, keys_values=keys_values)
    assert forward == pytest.approx(
        (6.75 * queries + 2.5 * keys_values) / rate + 6 * gpu.kernel_overhead_s
    )
    assert backward == pytest.approx(
        (5.75 * queries + 7.25 * keys_values) / rate + 7 * gpu.kernel_overhead_s
    )
    assert ring_merge_seconds(case=case, s=s, steps=1, keys_values=keys_values) == (0.0, 0.0)


def test_heads_are_exchanged_tensor_by_tensor() -> None:
    """Eight ranks: four all-to-alls forward, five backward, and four exposed copies in each pass,
    counted by hand.
    """
    case = case_of(model=LLAMA, workload=WORKLOAD, cluster=NODES)
    group = adjacent_group(8, cluster=NODES)
    queries, keys = 4096 * 4096 * 2, 4096 * 1024 * 2
    forward, backward = head_exchange_seconds(case=case, group=group, queries=queries, keys=keys)
    wide, narrow = (
        all_to_all_seconds(tensor * 7 / 8, machine=case, group=group) for tensor in (queries, keys)
    )
    gpu, framework = case.profile.gpu, case.profile.framework
    rate = (
        gpu.memory_fraction
        * case.cluster.gpu.memory_bandwidth_bytes_per_second
        / framework.elementwise_traffic_factor
    )
    copies = 2 * (3 * queries + keys) / rate + 4 * gpu.kernel_overhead_s
    assert forward == pytest.approx(2 * wide + 2 * narrow + copies)
    assert backward == pytest.approx(3 * wide + 2 * narrow + copies)
    alone = adjacent_group(1, cluster=NODES)
    assert head_exchange_seconds(case=case, group=alone, queries=queries, keys=keys) == (0.0, 0.0)


def test_two_levels_beat_the_exchange_over_nodes() -> None:
    parts = {
        kind: costs(CONFIG, kind).parts["context_parallel"] for kind in ("p2p", "a2a", "a2a+p2p")
    }
    assert 0 < parts["a2a+p2p"] < parts["a2a"]
