"""Where the ranks of one configuration lie: which node each is on, and which groups stay inside a fast domain."""

from __future__ import annotations

from dataclasses import dataclass

from hp_tool.cost.candidates import Candidates
from hp_tool.cost.network import dense_group, expert_group, group_size, sharing
from hp_tool.domain.hardware import ClusterSpec
from hp_tool.domain.parallel import ParallelConfig

MAX_NODES = 16
"""Drawn; the others go on in the same pattern."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RankPlace:
    """One device: its global rank, and its place in each parallel dimension, 0-based."""

    rank: int
    tensor: int
    context: int
    data: int
    pipeline: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Node:
    """One host and its devices, in order."""

    index: int
    ranks: tuple[RankPlace, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class RankGroup:
    """Ranks that talk to each other in one parallel dimension."""

    name: str
    size: int
    in_domain: int
    """Of them inside one NVLink domain (a node, where there is none larger)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Placement:
    """Ranks counted through the dimensions in `order`, innermost first, and laid on the nodes one after the other."""

    order: str
    num_nodes: int
    gpus_per_node: int
    nvlink_domain_size: int
    nodes: tuple[Node, ...]
    """The first MAX_NODES."""
    groups: tuple[RankGroup, ...]
    """Of more than one rank."""


def placement(*, config: ParallelConfig, cluster: ClusterSpec) -> Placement:
    """The placement of a configuration that uses all of the cluster's devices."""
    sizes = {
        "tp": config.tensor_parallel_size,
        "cp": config.context_parallel_size,
        "dp": config.data_parallel_size,
        "pp": config.pipeline_parallel_size,
    }
    order = [name for name in cluster.rank_order.split("-") if name in sizes]
    per_node = cluster.gpus_per_node
    num_nodes = cluster.num_gpus // per_node

    def place(rank: int) -> RankPlace:
        at, left = {}, rank
        for name in order:
            left, at[name] = divmod(left, sizes[name])
        return RankPlace(rank=rank, tensor=at["tp"], context=at["cp"], data=at["dp"], pipeline=at["pp"])

    return Placement(
        order="-".join(order),
        num_nodes=num_nodes,
        gpus_per_node=per_node,
        nvlink_domain_size=cluster.nvlink_domain_size,
        nodes=tuple(
            Node(index=node, ranks=tuple(map(place, range(node * per_node, (node + 1) * per_node))))
            for node in range(min(num_nodes, MAX_NODES))
        ),
        groups=_groups(Candidates.alone(config), cluster),
    )


def _groups(c: Candidates, cluster: ClusterSpec) -> tuple[RankGroup, ...]:
    groups = []
    for name, axis in (("tensor", "tp"), ("context", "cp"), ("expert", "ep"), ("data", "dp"), ("pipeline", "pp")):
        group = (expert_group if axis == "ep" else dense_group)(c, axis, order=cluster.rank_order)
        in_domain = int(sharing(group, block=cluster.nvlink_domain_size))
        groups.append(RankGroup(name=name, size=int(group_size(group)), in_domain=in_domain))
    return tuple(group for group in groups if group.size > 1)
