"""Ranks lie as Megatron Core counts them."""

from __future__ import annotations

from hp_tool.catalog import cluster
from hp_tool.domain.hardware import ClusterQuery
from hp_tool.domain.parallel import ParallelConfig
from hp_tool.questions import anatomy
from hp_tool.questions.anatomy import MAX_NODES

CONFIG = ParallelConfig(
    tensor_parallel_size=8, pipeline_parallel_size=4, data_parallel_size=2, sequence_parallel=True
)


def h100(num_gpus: int) -> ClusterQuery:
    return ClusterQuery(gpu="h100-sxm-80gb", num_gpus=num_gpus)


def test_tensor_ranks_are_neighbours_and_pipeline_ranks_far_apart() -> None:
    found = anatomy.place_ranks(config=CONFIG, cluster=cluster(h100(64)))
    assert (found.order, found.num_nodes, len(found.nodes)) == ("tp-cp-dp-pp", 8, 8)
    assert [rank.tensor for rank in found.nodes[3].ranks] == list(range(8))
    assert {(rank.pipeline, rank.data) for rank in found.nodes[3].ranks} == {(1, 1)}
    assert {group.name: (group.size, group.in_domain) for group in found.groups} == {
        "tensor": (8, 8),
        "data": (2, 1),
        "pipeline": (4, 1),
    }


def test_another_order_puts_replicas_outside() -> None:
    from dataclasses import replace

    ordered = replace(cluster(h100(64)), rank_order="tp-cp-ep-pp-dp")
    found = anatomy.place_ranks(config=CONFIG, cluster=ordered)
    assert found.order == "tp-cp-pp-dp"
    assert [node.ranks[0].pipeline for node in found.nodes] == [0, 1, 2, 3, 0, 1, 2, 3]


def test_every_rank_has_a_place_of_its_own_and_large_clusters_are_cut() -> None:
    config = ParallelConfig(
        tensor_parallel_size=4,
        pipeline_parallel_size=8,
        context_parallel_size=2,
        data_parallel_size=8,
    )
    found = anatomy.place_ranks(config=config, cluster=cluster(h100(512)))
    assert (found.num_nodes, len(found.nodes)) == (64, MAX_NODES)
    places = [(r.tensor, r.context, r.data, r.pipeline) for node in found.nodes for r in node.ranks]
    assert len(set(places)) == len(places) == MAX_NODES * 8
